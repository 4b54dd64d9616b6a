"""The HyperDFlash drafter: one pass over an anchor and K - 1 mask tokens drafts K - 1 tokens.

The context is the target's residual streams before they are collapsed, reduced by a gate inherited from the target's
hc_head. Embedding and LM head are the target's, and the caller brings them, so nothing of the target is stored here.

Legend: B batch, C context positions, K block (anchor included), D hidden, D_t the target's hidden, m residual paths
(`hc_mult`), L tapped layers, V vocabulary, R rank of the Markov head, hd head dimension.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
    rotate_half,
)
from transformers.utils import logging

from .configuration_hyperdflash import HyperDFlashConfig
from .generation_hyperdflash import HyperDFlashAssistant
from .pairing_hyperdflash import custom_generate_source

logger = logging.get_logger(__name__)


class HyperDFlashGateReducer(nn.Module):
    """Gated reduction of the residual paths, in fp32 (paper, equation 1 and section 2.2).

    `alpha = sigmoid(hc_fn @ RMSNorm(vec(H)) * hc_scale + hc_base) + eps`, one independent scalar per path, and
    `y = sum_j alpha_j * RMSNorm_j(H_j)`. `hc_fn`, `hc_base` and `hc_scale` are copied from the target's hc_head; the
    norm of each path is the drafter's own. Without it the result is the target's own collapse.
    """

    def __init__(self, config: HyperDFlashConfig):
        super().__init__()
        m, D = config.hc_mult, config.hidden_size
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps
        self.hc_fn = nn.Parameter(torch.empty(m, m * D))
        self.hc_base = nn.Parameter(torch.empty(m))
        self.hc_scale = nn.Parameter(torch.empty(1))
        self.path_norm = nn.Parameter(torch.empty(m, D)) if config.reducer_path_norm else None

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """`(B, C, m, D)` -> `(B, C, D)`, in the input's dtype."""
        # Bf16 would round the gate, which the target keeps in fp32
        with torch.autocast(residual.device.type, enabled=False):
            return self._reduce(residual.float()).to(residual.dtype)

    def _reduce(self, H_BCmD: torch.Tensor) -> torch.Tensor:
        # The gate sees all paths at once, normed together: their relative sizes are what it weighs
        flat = H_BCmD.flatten(2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        alpha_BCm = (
            torch.sigmoid(flat @ self.hc_fn.float().T * self.hc_scale.float() + self.hc_base.float()) + self.eps
        )
        if self.path_norm is not None:  # the drafter's own: every path enters at the same scale
            H_BCmD = H_BCmD * torch.rsqrt(H_BCmD.square().mean(-1, keepdim=True) + self.norm_eps)
            H_BCmD = H_BCmD * self.path_norm.float()
        return (alpha_BCm.unsqueeze(-1) * H_BCmD).sum(2)


class HyperDFlashFCReducer(nn.Module):
    """Dense projection: of the flattened paths, or of the tapped layers with their paths averaged (vanilla DFlash)."""

    def __init__(self, config: HyperDFlashConfig):
        super().__init__()
        self.average_paths = config.context_source == "hidden_layers"
        num_inputs = len(config.target_layer_ids) if self.average_paths else config.hc_mult
        self.fc = nn.Linear(num_inputs * config.target_hidden_size, config.hidden_size, bias=False)

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """`(B, C, m, L * D)` -> `(B, C, D)`; L is 1 for the pre-collapse residual."""
        return self.fc(residual.mean(2) if self.average_paths else residual.flatten(2))


class HyperDFlashMeanReducer(nn.Module):
    """Average of the paths: what public V4 drafters use."""

    def __init__(self, config: HyperDFlashConfig):
        super().__init__()

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """`(B, C, m, D)` -> `(B, C, D)`."""
        return residual.mean(2)


class HyperDFlashMarkovHead(nn.Module):
    """Bias of a slot's logits from the token chosen for the slot before it: `markov_w2 @ markov_w1[previous]`.

    Zero before training. With `markov_gate` the slot's hidden state weighs the R parts.
    """

    def __init__(self, config: HyperDFlashConfig):
        super().__init__()
        self.markov_w1 = nn.Parameter(torch.empty(config.vocab_size, config.markov_rank))
        self.markov_w2 = nn.Parameter(torch.empty(config.vocab_size, config.markov_rank))
        self.gate = nn.Linear(config.target_hidden_size, config.markov_rank) if config.markov_gate else None

    def forward(self, previous_ids: torch.LongTensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(N,)` and `(N, D_t)` -> `(N, V)`."""
        return self.bias(self.states(previous_ids, hidden_states))

    def states(self, previous_ids: torch.LongTensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(...)` and `(..., D_t)` -> `(..., R)`, of which `markov_w2` makes the bias."""
        states = nn.functional.embedding(previous_ids, self.markov_w1)
        return states if self.gate is None else states * torch.sigmoid(self.gate(hidden_states))

    def bias(self, states: torch.Tensor) -> torch.Tensor:
        """`(..., R)` -> `(..., V)`."""
        return nn.functional.linear(states, self.markov_w2)


class HyperDFlashConfidenceHead(nn.Module):
    """Two logits per slot, of the probability that its draft is accepted if those before it are: in greedy decoding,
    and when sampling at temperature 1.

    It reads the slot's hidden state, which is known before any draft is chosen: a decision that looked at the drafts
    would change what sampling draws.
    """

    def __init__(self, config: HyperDFlashConfig):
        super().__init__()
        self.proj = nn.Linear(config.target_hidden_size, 2)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`(..., D_t)` -> `(..., 2)`; no gradient flows through its input."""
        return self.proj(hidden_states.detach())


@dataclass
class HyperDFlashModelOutput(BaseModelOutputWithPast):
    """What the drafter's heads add: `markov_states` `(B, K, R)` when `previous_ids` were given, and
    `confidence_logits` `(B, K, 2)`."""

    markov_states: torch.Tensor | None = None
    confidence_logits: torch.Tensor | None = None


REDUCERS = {"hc_gate": HyperDFlashGateReducer, "fc": HyperDFlashFCReducer, "mean": HyperDFlashMeanReducer}


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `(B, heads, T, head_dim)` by the last T of the positions in `cos` and `sin` `(B, >= T, head_dim)`."""
    length = x.shape[-2]
    return x * cos[:, None, -length:] + rotate_half(x) * sin[:, None, -length:]


class HyperDFlashAttention(nn.Module):
    """Block queries over [context ; block] keys and values; q/k norm per head, RoPE at absolute positions."""

    def __init__(self, config: HyperDFlashConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = False
        D, hd = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(D, config.num_attention_heads * hd, bias=False)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * hd, bias=False)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * hd, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * hd, D, bias=False)
        self.q_norm = Qwen3RMSNorm(hd, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(hd, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,  # (B, K, D)
        context: torch.Tensor,  # (B, C, D)
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, (B, C + K, hd)
        attention_mask: torch.Tensor | BlockMask | None,
        cache: Cache | None,
    ) -> torch.Tensor:
        """Returns `(B, K, D)`. The mask is `(B, 1, K, keys)`, over what the cache returns and the block."""
        B, K = hidden_states.shape[:2]
        C, hd = context.shape[1], self.config.head_dim
        cos, sin = position_embeddings
        # Queries of the block only: nothing is predicted at context positions
        q = self.q_norm(self.q_proj(hidden_states).view(B, K, -1, hd)).transpose(1, 2)  # (B, heads, K, hd)
        # Joined behind the projections, which are narrower
        k, v = (torch.cat([proj(context), proj(hidden_states)], dim=1) for proj in (self.k_proj, self.v_proj))
        k = self.k_norm(k.view(B, C + K, -1, hd)).transpose(1, 2)  # (B, KV heads, C + K, hd)
        v = v.view(B, C + K, -1, hd).transpose(1, 2)
        # Under autocast the norms' fp32 weights widen q and k; attention wants one dtype
        q, k = apply_rotary(q, cos, sin).to(v.dtype), apply_rotary(k, cos, sin).to(v.dtype)
        if cache is not None:  # the cache takes the context only: a block is gone after its round
            context_k, context_v = cache.update(k[:, :, :C], v[:, :, :C], self.layer_idx)
            k, v = torch.cat([context_k, k[:, :, C:]], dim=2), torch.cat([context_v, v[:, :, C:]], dim=2)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.config.attention_dropout if self.training else 0.0
        out, _ = attention(self, q, k, v, attention_mask, scaling=self.scaling, dropout=dropout)  # (B, K, heads, hd)
        return self.o_proj(out.reshape(B, K, -1))


class HyperDFlashDecoderLayer(GradientCheckpointingLayer):
    """Attention and SwiGLU MLP with pre-norm on the block; the context is normed once, by the model."""

    def __init__(self, config: HyperDFlashConfig, layer_idx: int):
        super().__init__()
        self.self_attn = HyperDFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, context: torch.Tensor, **kwargs) -> torch.Tensor:
        """`(B, K, D)` and `(B, C, D)` -> `(B, K, D)`; `kwargs` are the attention's."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), context, **kwargs)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class HyperDFlashPreTrainedModel(PreTrainedModel):
    config_class = HyperDFlashConfig
    config: HyperDFlashConfig
    base_model_prefix = "model"
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HyperDFlashDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # Every checkpoint of the target keeps hc_head in fp32, so that an inherited gate is copied without rounding
    _keep_in_fp32_modules_strict = ["hc_fn", "hc_base", "hc_scale", "path_norm"]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but a checkpoint that lacks a tensor, or has another one, is refused: a drafter with
        random weights would run and accept nothing.

        Raises `ValueError` that names the tensors, `OSError` when there are no weights at all.
        """
        try:
            # Mis-shaped tensors are collected too, to be named below; the library's own error does not name them.
            model, info = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                **{**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True},
            )
        except OSError as error:
            if "file named" not in str(error) or "model.safetensors" not in str(error):
                raise
            raise OSError(
                f"{pretrained_model_name_or_path} holds no weights of a drafter. Make weights for your target with "
                "`hyperdflash init TARGET OUT` and train them, or load a trained drafter"
            ) from error
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info[problem]:
                names = ", ".join(sorted(map(str, info[problem]))[:5])
                raise ValueError(
                    f"{pretrained_model_name_or_path} does not fit its config: {problem.replace('_', ' ')}: {names}"
                )
        return (model, info) if output_loading_info else model

    @classmethod
    def can_generate(cls) -> bool:
        return False

    def get_input_embeddings(self) -> None:
        """None: the embedding is the target's. accelerate asks when it shards a model (FSDP2)."""

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, *args, **kwargs):
        """As in transformers, and with `custom_generate/`, which the library does not copy with the code."""
        folder = Path(save_directory)
        if is_main_process:  # before the library's own work, which may end in an upload
            (folder / "custom_generate").mkdir(parents=True, exist_ok=True)
            (folder / "custom_generate" / "generate.py").write_text(custom_generate_source(), encoding="utf-8")
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)
        if is_main_process:
            for file in folder.glob("*.safetensors"):  # safetensors writes files that only their owner can read
                file.chmod(folder.stat().st_mode & 0o666)

    def _get_files_timestamps(self, working_dir: str | os.PathLike) -> dict[str, float]:
        """Of what `save_pretrained(push_to_hub=True)` leaves out unless it changes: never `custom_generate/`."""
        stamps = super()._get_files_timestamps(working_dir)
        stamps.pop("custom_generate", None)
        return stamps

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, HyperDFlashGateReducer):
            nn.init.normal_(module.hc_fn, std=self.config.initializer_range)
            nn.init.zeros_(module.hc_base)
            nn.init.ones_(module.hc_scale)
            if module.path_norm is not None:
                nn.init.ones_(module.path_norm)
        elif isinstance(module, HyperDFlashMarkovHead):
            nn.init.normal_(module.markov_w1, std=self.config.initializer_range)
            nn.init.zeros_(module.markov_w2)


class HyperDFlashModel(HyperDFlashAssistant, HyperDFlashPreTrainedModel):
    """The drafter. Give it to `target.generate(assistant_model=...)`; `forward` follows the DFlash protocol."""

    def __init__(self, config: HyperDFlashConfig):
        super().__init__(config)
        self.reducer = REDUCERS[config.reducer](config)
        self.context_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([HyperDFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.markov_head = HyperDFlashMarkovHead(config) if config.draft_head == "markov" else None
        self.confidence_head = HyperDFlashConfidenceHead(config) if config.draft_confidence else None
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        # At another width than the target's: its embeddings down, the states up to its LM head
        same, sizes = config.hidden_size == config.target_hidden_size, (config.target_hidden_size, config.hidden_size)
        self.embed_proj = None if same else nn.Linear(*sizes, bias=False)
        self.head_proj = None if same else nn.Linear(*sizes[::-1], bias=False)
        self.refuse_to_generate()
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def dtype(self) -> torch.dtype:
        """The layers' dtype. The library takes the first parameter's, which is the gate's and stays fp32."""
        return self.norm.weight.dtype

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        previous_ids: torch.LongTensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> HyperDFlashModelOutput:
        """Draft one block (or, in training, many blocks side by side).

        Args:
            noise_embeds (`torch.Tensor` of shape `(B, K, target_hidden_size)`):
                The target's embeddings of the anchor and of K - 1 mask tokens.
            context_hidden_states (`torch.Tensor` of shape `(B, C, m, target_hidden_size)`):
                The target's pre-collapse residuals of the C context positions that the cache does not hold yet, all
                before the anchor. For `context_source="hidden_layers"`, the tapped layers concatenated on the last
                axis.
            attention_mask (`torch.Tensor`, *optional*):
                None: every slot sees all context (within the window) and the whole block. `(B, cached + C + K)` of
                ones and zeros: as usual. 4-D `(B, 1, K, kv)`, or a flex `BlockMask`: used as it is on every layer. A
                dict of such masks: by layer type.
            position_ids (`torch.LongTensor` of shape `(B, C + K)`, *optional*):
                Absolute positions of context and block; by default they continue the cache's.
            cache (`Cache`, *optional*):
                Keys and values of earlier context, to which this call adds its own. Blocks never enter it.
            previous_ids (`torch.LongTensor` of shape `(B, K)`, *optional*):
                For training a Markov head: the true token before each slot's.
            output_hidden_states (`bool`, *optional*):
                Return the block's states `(B, K, D)` before the first layer and after each; the last ones are normed.

        Returns:
            `HyperDFlashModelOutput` whose `last_hidden_state` `(B, K, target_hidden_size)` goes through the target's
            LM head: slot k predicts the token at anchor + k.

        Raises `ValueError` for `previous_ids` without a Markov head, `TypeError` for an unknown argument.
        """
        # peft's wrappers pass a language model's arguments, as None
        if unknown := [name for name, value in kwargs.items() if value is not None]:
            raise TypeError(f"HyperDFlashModel.forward has no argument {', '.join(unknown)}")
        if previous_ids is not None and self.markov_head is None:
            raise ValueError(f"previous_ids are for draft_head 'markov', and this is {self.config.draft_head!r}")
        context = self.context_norm(self.reducer(context_hidden_states.to(noise_embeds.dtype)))  # (B, C, D)
        if torch.is_autocast_enabled(context.device.type):  # once, not in every projection of every layer
            context = context.to(torch.get_autocast_dtype(context.device.type))
        hidden_states = noise_embeds if self.embed_proj is None else self.embed_proj(noise_embeds)  # (B, K, D)
        B, K = noise_embeds.shape[:2]
        num_new = context.shape[1] + K
        past = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(past, past + num_new, device=noise_embeds.device).expand(B, -1)
        position_embeddings = self.rotary_emb(noise_embeds, position_ids)
        masks = {  # one of each kind, which the layers share
            layer_type: self._mask(attention_mask, layer_type, past + num_new, num_new, noise_embeds)
            for layer_type in set(self.config.layer_types)
        }
        all_states = ()
        for layer, layer_type in zip(self.layers, self.config.layer_types, strict=True):
            all_states += (hidden_states,)
            hidden_states = layer(
                hidden_states,
                context,
                position_embeddings=position_embeddings,
                attention_mask=masks[layer_type],
                cache=cache,
            )
        hidden_states = self.norm(hidden_states)
        all_states += (hidden_states,)
        if self.head_proj is not None:
            hidden_states = self.head_proj(hidden_states)  # (B, K, target_hidden_size)
        return HyperDFlashModelOutput(
            last_hidden_state=hidden_states,
            cache=cache,
            hidden_states=all_states if output_hidden_states else None,
            markov_states=None if previous_ids is None else self.markov_head.states(previous_ids, hidden_states),
            confidence_logits=None if self.confidence_head is None else self.confidence_head(hidden_states),
        )

    def _mask(
        self,
        attention_mask: torch.Tensor | BlockMask | dict | None,
        layer_type: str,
        num_total: int,  # positions of cache, context and block
        num_new: int,  # positions of context and block
        embeds: torch.Tensor,  # (B, K, D_t)
    ) -> torch.Tensor | BlockMask | None:
        """Additive `(B, 1, K, kv)` mask of one layer type, or None where every slot sees every key.

        A sliding layer returns the last `window - 1 + new` keys only, so a slot's window decides among those.
        """
        if isinstance(attention_mask, dict):
            attention_mask = attention_mask[layer_type]
        # Training brings masks that already say everything
        if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim == 4):
            return attention_mask
        K = embeds.shape[1]
        window = self.config.sliding_window if layer_type == "sliding_attention" else num_total
        padded = attention_mask is not None and not attention_mask.bool().all()
        if not padded and num_total <= window:
            return None
        first = max(num_total - (window - 1 + num_new), 0)  # keys before it are no longer in a sliding layer's cache
        keys = torch.arange(first, num_total, device=embeds.device)
        visible = keys[None, None] > keys[-K:][None, :, None] - window
        if padded:
            visible = visible & attention_mask[:, None, first:].bool()
        mask = torch.zeros(visible.shape, dtype=embeds.dtype, device=embeds.device)
        return mask.masked_fill(~visible, torch.finfo(embeds.dtype).min).unsqueeze(1)


HyperDFlashModel.register_for_auto_class("AutoModel")

__all__ = ["HyperDFlashModel", "HyperDFlashPreTrainedModel"]
