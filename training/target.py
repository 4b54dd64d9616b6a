"""What training needs from the target: its residuals, and the frozen parts around them.

Legend: B batch, T sequence, m residual paths, D hidden, V vocabulary, L tapped layers.
"""

import hashlib
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperHead, DeepseekV4RMSNorm

from ..common.checkpoint import TargetCheckpoint
from ..configuration_hyperdflash import HyperDFlashConfig
from ..pairing_hyperdflash import fingerprint_rows, plain_weight
from ..target_hyperdflash import ResidualTap


class Features(NamedTuple):
    """The target's side of a batch.

    Attributes:
        context_hidden_states (`torch.Tensor` of shape `(B, T, m, L * D)`): what the drafter reads. For
            `context_source="hidden_layers"` the paths are averaged already, `(B, T, 1, L * D)`.
        residual (`torch.Tensor` of shape `(B, T, m, D)`): the final residual, which the teacher reads; the same tensor
            for `context_source="pre_hc_head"`.
    """

    context_hidden_states: torch.Tensor
    residual: torch.Tensor


class TargetHead:
    """The target's embedding, LM head, final norm and hc_head: frozen, and never trained.

    Attributes:
        config (`DeepseekV4Config`): the target's.
        tensors (`dict[str, torch.Tensor]`): all of them by name; embedding and LM head are `(V, D)`.
    """

    def __init__(self, config: DeepseekV4Config, tensors: dict[str, torch.Tensor]):
        self.config = config
        # Detached: no gradient reaches the target's own parameters
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        self.embedding = self.tensors["embed_tokens.weight"]
        self.lm_head = self.tensors.get("lm_head.weight", self.embedding)  # absent where it is tied
        self.norm, self.hc_head = (
            DeepseekV4RMSNorm(config.hidden_size, config.rms_norm_eps),
            DeepseekV4HyperHead(config),
        )
        # The modules share these tensors: an embedding and a head of V4's size are not held twice
        self.norm.weight.data = self.tensors["norm.weight"]
        for name in ("hc_fn", "hc_base", "hc_scale"):
            getattr(self.hc_head, name).data = self.tensors[f"hc_head.{name}"]

    @classmethod
    def from_target(cls, target: DeepseekV4ForCausalLM) -> "TargetHead":
        """The head of a loaded target, sharing its tensors; a tied LM head is left out."""
        for what, module in (("embedding", target.model.embed_tokens), ("LM head", target.lm_head)):
            if plain_weight(module) is None:
                raise ValueError(
                    f"the target's {what} is a {type(module).__name__} without a plain weight: training reads both, "
                    "so take a checkpoint in which they are not quantised"
                )
        model, lm_head = target.model, target.lm_head.weight
        tensors = {
            "embed_tokens.weight": model.embed_tokens.weight,
            "norm.weight": model.norm.weight,
            **{f"hc_head.{name}": parameter for name, parameter in model.hc_head.named_parameters()},
        }
        # Tied weights are one tensor, which safetensors refuses to store under two names
        if lm_head is not model.embed_tokens.weight:
            tensors["lm_head.weight"] = lm_head
        return cls(target.config, tensors)

    @classmethod
    def from_checkpoint(cls, checkpoint: TargetCheckpoint, dtype: str = "auto") -> "TargetHead":
        """The head as that of the loaded target would be, read from the files that hold it; no model is made.

        Raises `ValueError` for tensors that are missing, or not plain floating-point ones.
        """
        config = checkpoint.config
        m, V, D = config.hc_mult, config.vocab_size, config.hidden_size
        shapes = {
            "embed_tokens.weight": ("embed.weight", (V, D)),
            "norm.weight": ("norm.weight", (D,)),
            "hc_head.hc_fn": ("hc_head_fn", (m, m * D)),
            "hc_head.hc_base": ("hc_head_base", (m,)),
            "hc_head.hc_scale": ("hc_head_scale", (1,)),
            "lm_head.weight": ("head.weight", (V, D)),
        }
        if config.tie_word_embeddings:  # stored once, as the embedding
            del shapes["lm_head.weight"]
        tensors = {name: checkpoint.read(stored, shape) for name, (stored, shape) in shapes.items()}
        # "auto" is the configuration's in transformers, whatever the files hold; hc_head and norm are fp32 in any case
        dtype = config.dtype if dtype == "auto" else getattr(torch, dtype)
        for name, tensor in tensors.items():
            if name not in ("embed_tokens.weight", "lm_head.weight"):
                tensors[name] = tensor.float()
            elif dtype is not None:
                tensors[name] = tensor.to(dtype)
        return cls(config, tensors)

    @cached_property
    def sha256(self) -> str:
        """Over names, dtypes, shapes and bytes of all tensors, embedding and head in bf16: a run is the same one on a
        CPU that loads them in fp32."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            if name in ("embed_tokens.weight", "lm_head.weight"):
                tensor = tensor.to(torch.bfloat16)
            # Tensors of other shapes can have the same bytes
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            # As bytes: numpy has no bf16
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def identity(self) -> dict[str, torch.Tensor]:
        """The tensors that a drafter inherits and is identified by, under their official names."""
        return {
            **{f"hc_head_{name}": self.tensors[f"hc_head.hc_{name}"] for name in ("fn", "base", "scale")},
            "norm.weight": self.tensors["norm.weight"],
            "embed.weight": self.embedding[fingerprint_rows(len(self.embedding)).to(self.embedding.device)],
        }

    def to(self, device: torch.device | str) -> "TargetHead":
        """A copy on one device; the target's own tensors stay where they are."""
        return TargetHead(self.config, {name: tensor.to(device) for name, tensor in self.tensors.items()})

    def embed(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """`(..., )` -> `(..., D)`."""
        return nn.functional.embedding(input_ids, self.embedding)

    @torch.no_grad()
    def teacher_hidden(self, residual: torch.Tensor, kind: str) -> torch.Tensor:
        """The normed state that the LM head turns into the teacher's logits, `(B, T, m, D)` -> `(B, T, D)`.

        `"mean_pool"` averages the paths, which the paper's implementation does (section 2.3); `"hc_head"` collapses
        them as the target does, so its logits are the target's own.
        """
        with torch.autocast(residual.device.type, enabled=False):
            residual = residual.float()  # the teacher in fp32, whatever training's precision
            return self.norm(residual.mean(2) if kind == "mean_pool" else self.hc_head(residual))


class OnlineFeatures:
    """Residuals from the target itself, run in every step: in eval mode, without autograd, at its own precision."""

    def __init__(self, target: DeepseekV4ForCausalLM, config: HyperDFlashConfig):
        self.target, self.config = target, config
        self.head = TargetHead.from_target(target)

    @torch.no_grad()
    def __call__(self, batch: dict) -> Features:
        """Features of `batch["input_ids"]` `(B, T)`, padded on the right, so that no token sees padding."""
        target = self.target
        # Module by module: a caller may have left some of them in eval mode
        was_training = {module: module.training for module in target.modules()}
        target.eval()
        try:
            with (
                ResidualTap(target, self.config.tapped_layer_ids) as tap,
                # For pre_hc_head both taps read the same tensor, which costs a reference and no copy
                ResidualTap(target) as final,
                torch.autocast(target.device.type, enabled=False),
            ):
                # The body alone: logits of all tokens are not needed
                target.model(batch["input_ids"].to(target.device), use_cache=False)
                context, residual = tap.take(), final.take()  # (B, T, m, L * D) and (B, T, m, D)
        finally:
            for module, training in was_training.items():
                # Not `train()`, which sets all submodules alike
                module.training = training
        if self.config.context_source == "pre_hc_head":
            return Features(residual, residual)
        return Features(context.mean(2, keepdim=True), residual)  # (B, T, 1, L * D)
