"""DeepSeek-V4's native multi-token-prediction module, which transformers leaves out.

One V4 decoder layer that reads the target's un-collapsed residual and the embedding of the next token, and predicts
the token after it. It lives under `mtp.0.*` in a checkpoint (`native.py`), and embedding and head are the target's.

    mtp = load_mtp(folder, target.config, max_drafts=3)
    target.generate(**inputs, assistant_model=mtp)      # the same loop as the HyperDFlash drafter, just as lossless

Legend: B batch, T sequence, m paths (`hc_mult`), D hidden, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
)

from ..generation_hyperdflash import DraftRequest, head_logits, warn_of_cap
from .native import MTP, NativeDrafter, load_module, module_folder


class DeepseekV4MTP(NativeDrafter):
    """One MTP step: `x = h_proj(hnorm(H)) + e_proj(enorm(embed(next token)))` on every path, one V4 decoder layer
    (sliding attention, top-k MoE), the module's own head collapse and norm.

    Embedding and LM head are the target's and are handed in; nothing of them is stored here. As an assistant it drafts
    `max_drafts` tokens per round, one after the other: its own output takes the residual's place for the next one.

    Args:
        config: the target's.
        max_drafts (`int`, *optional*, defaults to 3): the deployment of the paper's MTP(3).
    """

    kind = MTP
    tapped_layer_ids = None  # the residual before hc_head
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

    def checkpoint_name(self, name: str) -> str:
        """See `NativeDrafter`."""
        return f"mtp.0.{name.removeprefix('layer.')}"

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
        super().validate_call(target, generation_mode, generation_config)
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


def load_mtp(checkpoint: str | Path, config: DeepseekV4Config, max_drafts: int = 3) -> DeepseekV4MTP:
    """Read the module of a checkpoint, a folder or a Hub id, in the dtype of `config`, the target's.

    Raises `ValueError` as `check_kind` and `load_module` do; `OSError` for no weights at all.
    """
    folder = module_folder(MTP, checkpoint)
    return load_module(lambda: DeepseekV4MTP(config, max_drafts), folder, checkpoint, config)
