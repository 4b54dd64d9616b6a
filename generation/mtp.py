"""DeepSeek-V4's native multi-token-prediction module, which transformers leaves out.

One V4 decoder layer that reads the target's un-collapsed residual and the embedding of the next token, and predicts
the token after it. It lives under `mtp.0.*` in a checkpoint and shares embedding and head with the target.
`mtp_state_dict` writes those tensors in the official naming; `load_mtp` reads that and transformers' naming.

    mtp = load_mtp(folder, target.config, max_drafts=3)
    target.generate(**inputs, assistant_model=mtp)      # the same loop as the HyperDFlash drafter, just as lossless

Legend: B batch, T sequence, m paths (`hc_mult`), D hidden, V vocabulary.
"""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import DeepseekV4Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4PreTrainedModel,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
)

from ..common.checkpoint import file_in, tensor_files
from ..generation_hyperdflash import DraftRequest, HyperDFlashAssistant, check_devices, head_logits, warn_of_cap
from ..pairing_hyperdflash import check_call

PREFIX = "mtp.0."

# transformers' name inside a decoder layer -> the official checkpoint's (experts are split per expert as well).
_OFFICIAL_NAMES = {
    "layer.self_attn.q_a_proj.": "attn.wq_a.",
    "layer.self_attn.q_b_proj.": "attn.wq_b.",
    "layer.self_attn.q_a_norm.": "attn.q_norm.",
    "layer.self_attn.kv_proj.": "attn.wkv.",
    "layer.self_attn.kv_norm.": "attn.kv_norm.",
    "layer.self_attn.o_a_proj.": "attn.wo_a.",
    "layer.self_attn.o_b_proj.": "attn.wo_b.",
    "layer.self_attn.sinks": "attn.attn_sink",
    "layer.input_layernorm.": "attn_norm.",
    "layer.post_attention_layernorm.": "ffn_norm.",
    "layer.attn_hc.": "hc_attn_",
    "layer.ffn_hc.": "hc_ffn_",
    "layer.mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "layer.mlp.gate.": "ffn.gate.",
    "layer.mlp.shared_experts.gate_proj.": "ffn.shared_experts.w1.",
    "layer.mlp.shared_experts.down_proj.": "ffn.shared_experts.w2.",
    "layer.mlp.shared_experts.up_proj.": "ffn.shared_experts.w3.",
    "hc_head.hc_": "hc_head_",
}


class DeepseekV4MTP(HyperDFlashAssistant, DeepseekV4PreTrainedModel):
    """One MTP step: `x = h_proj(hnorm(H)) + e_proj(enorm(embed(next token)))` on every path, one V4 decoder layer
    (sliding attention, top-k MoE), the module's own head collapse and norm.

    Embedding and LM head are the target's and are handed in; nothing of them is stored here. As an assistant it drafts
    `max_drafts` tokens per round, one after the other: its own output takes the residual's place for the next one.

    Args:
        config: the target's.
        max_drafts (`int`, *optional*, defaults to 3): the deployment of the paper's MTP(3).
    """

    tapped_layer_ids = None  # the residual before hc_head
    verification = "block"
    max_drafts = 3  # an attribute, where the drafter's is derived from its block

    def __init__(self, config: DeepseekV4Config, max_drafts: int = 3):
        one_layer = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"]}
        config = DeepseekV4Config(**{**config.to_dict(), **one_layer})
        super().__init__(config)
        self.max_drafts = max_drafts
        D = config.hidden_size
        self.enorm = DeepseekV4RMSNorm(D, eps=config.rms_norm_eps)
        self.hnorm = DeepseekV4RMSNorm(D, eps=config.rms_norm_eps)
        self.e_proj = nn.Linear(D, D, bias=False)
        self.h_proj = nn.Linear(D, D, bias=False)
        self.layer = DeepseekV4DecoderLayer(config, layer_idx=0)
        self.hc_head = DeepseekV4HyperHead(config)
        self.norm = DeepseekV4RMSNorm(D, eps=config.rms_norm_eps)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        self.refuse_to_generate()
        self.post_init()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Whether the experts may run in one kernel, as the target's do. The library looks for its decorator in the
        text of the module that defines the class; it stands in DeepSeek-V4's module, not in this one."""
        return True

    def forward(self, next_embeds, residual, input_ids=None, position_ids=None, cache=None):
        """One step over a sequence.

        Args:
            next_embeds (`torch.Tensor` of shape `(B, T, D)`): embeddings of the tokens at positions t + 1.
            residual (`torch.Tensor` of shape `(B, T, m, D)`): the target's pre-collapse residual at positions t, or
                this module's own output of the step before.
            input_ids (`torch.LongTensor` of shape `(B, T)`, *optional*): those tokens' ids (for hash-routed layers).

        Returns:
            `(hidden, residual)`: `(B, T, D)`, ready for the LM head, which predicts position t + 2; and `(B, T, m,
            D)`.
        """
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(past, past + next_embeds.shape[1], device=next_embeds.device)[None]
        mask = create_sliding_window_causal_mask(
            config=self.config, inputs_embeds=next_embeds, attention_mask=None, cache=cache, position_ids=position_ids
        )
        x = self.h_proj(self.hnorm(residual)) + self.e_proj(self.enorm(next_embeds)).unsqueeze(2)
        rope = {"main": self.rotary_emb(next_embeds, position_ids=position_ids, layer_type="main")}
        x = self.layer(
            x,
            position_embeddings=rope,
            position_ids=position_ids,
            attention_mask=mask,
            input_ids=input_ids,
            cache=cache,
        )
        return self.norm(self.hc_head(x)), x

    @property
    def dtype(self) -> torch.dtype:
        """The projections'. The library takes the first parameter's, a norm's, which stays fp32."""
        return self.e_proj.weight.dtype

    def validate_call(self, target, generation_mode, generation_config) -> None:
        """Raise `ValueError` for a call or a target that this module cannot draft for."""
        check_call(generation_mode, generation_config)
        check_devices(self, target)
        for name in ("vocab_size", "hidden_size", "hc_mult"):
            ours, theirs = getattr(self.config, name), getattr(target.config, name)
            if ours != theirs:
                raise ValueError(
                    f"this MTP module was made for a target with {name} {ours}, but the target has {theirs}"
                )
        warn_of_cap(self.max_drafts, generation_config.num_assistant_tokens)

    def new_noise_ids(self, device) -> torch.LongTensor:
        """Room for the anchor alone."""
        return torch.zeros((1, 1), dtype=torch.long, device=device)

    def propose(self, request: DraftRequest, choose: Callable[[torch.Tensor], torch.LongTensor]) -> None:
        """Draft one token after the other; arguments as in `HyperDFlashAssistant.propose`.

        The cache keeps what came from the target's residuals. Steps on the module's own output are taken back: their
        positions come again, with residuals of the target, once they are verified.
        """
        length, position, cache = request.context.shape[1], request.position, request.cache
        device, weight = request.noise_ids.device, self.e_proj.weight
        # Position t is read with the token at t + 1, so the last of them is the anchor
        next_ids = request.ids[:, -length:].to(device)
        positions = torch.arange(position - length, position, device=weight.device)[None]
        residual, verified = request.context.to(weight), None
        for step in range(request.num_drafts):
            embeds = request.target.model.embed_tokens(next_ids)
            hidden, residual = self(
                embeds.to(weight), residual, input_ids=next_ids, position_ids=positions, cache=cache
            )
            verified = verified or [dict(vars(layer)) for layer in cache.layers]
            draft = choose(head_logits(request.target, hidden[:, -1]))
            next_ids, residual = draft[None].to(device), residual[:, -1:]
            positions = torch.full_like(positions[:, -1:], position + step)
        for layer, state in zip(cache.layers, verified, strict=True):
            vars(layer).update(state)  # updates make new tensors, so the old ones are still what they were


def mtp_state_dict(mtp: DeepseekV4MTP, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """The module's tensors under `mtp.0.*` in the official names; hyper-connections and router bias in fp32."""
    out = {}
    for name, tensor in mtp.state_dict().items():
        keep = any(part in name for part in ("attn_hc", "ffn_hc", "hc_head", "sinks", "e_score_correction_bias"))
        tensor = tensor.detach().to(torch.float32 if keep else dtype)
        if name == "layer.mlp.experts.gate_up_proj":
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                out[f"{PREFIX}ffn.experts.{i}.w1.weight"] = gate.contiguous()
                out[f"{PREFIX}ffn.experts.{i}.w3.weight"] = up.contiguous()
        elif name == "layer.mlp.experts.down_proj":
            for i, expert in enumerate(tensor):
                out[f"{PREFIX}ffn.experts.{i}.w2.weight"] = expert.contiguous()
        else:
            out[PREFIX + _official_name(name)] = tensor.contiguous()
    return out


def _official_name(name: str) -> str:
    for ours, official in _OFFICIAL_NAMES.items():
        if name.startswith(ours):
            return official + name.removeprefix(ours)
    return name


def load_mtp(checkpoint: str | Path, config: DeepseekV4Config, max_drafts: int = 3) -> DeepseekV4MTP:
    """Read `mtp.0.*` of a checkpoint folder, in the official naming or in transformers', in the dtype of `config`.
    Weights in FP8 or FP4, as V4-Flash's are, are dequantised.

    Hyper-connections, norms and router bias stay in fp32, as in the target. Raises `ValueError` as `check_mtp_names`
    does, and for a module of other shapes; `OSError` for no weights at all.
    """
    folder = Path(checkpoint)
    files = tensor_files(partial(file_in, folder), checkpoint)
    files = {name: file for name, file in files.items() if name.startswith(PREFIX)}
    check_mtp_names(files, checkpoint)
    with torch.device("meta"):  # 256 experts of V4-Flash need no random values first
        mtp = DeepseekV4MTP(config, max_drafts)
    mtp.rotary_emb = DeepseekV4RotaryEmbedding(mtp.config)  # no checkpoint has its buffers
    dtype = config.dtype or torch.get_default_dtype()
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # as config.json has it
    try:
        with ExitStack() as stack:
            opened = {
                file: stack.enter_context(safe_open(folder / file, framework="pt")) for file in set(files.values())
            }
            read = partial(_read, opened, files)
            state = {}
            for name, value in mtp.state_dict().items():
                keep = any(part in name for part in mtp._keep_in_fp32_modules_strict)
                state[name] = _find(read, name, value, torch.float32 if keep else dtype)
        mtp.load_state_dict(state, assign=True)
    except KeyError as error:
        raise ValueError(
            f"{checkpoint} holds an incomplete MTP module: there is no tensor named {error.args[0]}"
        ) from error
    except RuntimeError as error:  # of other shapes: the library names them all
        raise ValueError(f"the MTP module of {checkpoint} does not fit the target's config: {error}") from error
    return mtp.eval()


def _read(opened: dict, files: dict[str, str], name: str) -> torch.Tensor:
    """One tensor of the checkpoint, in bf16 where a scale beside it says that it is quantised."""
    tensor = opened[files[name]].get_tensor(name)
    stem = name.removesuffix("weight")
    for scale in (f"{stem}scale", f"{stem}weight_scale_inv"):
        if scale in files and scale != name:
            pair = {"weight": tensor, "weight_scale_inv": opened[files[scale]].get_tensor(scale)}
            return Fp8Dequantize(None).convert(pair)["weight"]
    return tensor


def _find(read: Callable[[str], torch.Tensor], name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a checkpoint for our `name`, of the shape of `value` where it is put together from experts, which
    are fused in transformers' naming only. Read one by one, so that no more than one is held twice."""
    try:
        return read(PREFIX + name.removeprefix("layer.")).to(dtype)
    except KeyError:
        if not name.startswith("layer.mlp.experts."):
            return read(PREFIX + _official_name(name)).to(dtype)
    fused = torch.empty(value.shape, dtype=dtype)
    parts = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
    for i, expert in enumerate(fused):
        for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
            weight = read(f"{PREFIX}ffn.experts.{i}.{part}.weight")
            if weight.shape != rows.shape:  # `copy_` would repeat a smaller one
                raise RuntimeError(f"expert {i}'s {part} is {tuple(weight.shape)}, expected {tuple(rows.shape)}")
            rows.copy_(weight)
    return fused


def check_mtp_names(names: Collection[str], where: str | Path) -> None:
    """Whether the tensors of a checkpoint have the native module among them, told by their names alone.

    Raises `ValueError` when they have none; by name for DSpark, which the 0731 checkpoints carry in the same place.
    """
    if any(name.startswith(f"{PREFIX}main_proj") for name in names):
        raise ValueError(
            f"{where} carries DSpark under mtp.*, not the native MTP module: that is in the preview checkpoint"
        )
    if f"{PREFIX}e_proj.weight" not in names:
        raise ValueError(f"{where} holds no native MTP module: there is no tensor named {PREFIX}e_proj.weight")
