"""DSpark, the block drafter inside DeepSeek's own checkpoints (V4-Flash-0731, V4-Flash-DSpark, V4-Pro-DSpark).

Stages of V4's decoder layer draft a block in one pass, from the anchor and noise tokens, over a context made of the
target's last layers: the mean of their paths, projected and normed. A Markov head corrects each slot by the token
before it. All of it lies under `mtp.0`, `mtp.1`, ... of a checkpoint (`native.py`).

    dspark = load_dspark(folder, target.config)
    target.generate(**inputs, assistant_model=dspark)   # the same loop as the HyperDFlash drafter, just as lossless

Source: vLLM's `models/deepseek_v4/nvidia/dspark.py` and `v1/worker/gpu/spec_decode/dspark/`, which `serving/tests`
compares with. vLLM shortens the block to the drafts asked for; here it always has the length it was trained with.

Legend: B batch, C context positions, K block (anchor included), D hidden, m residual paths (`hc_mult`), L tapped
layers, V vocabulary, R rank of the Markov head.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from ..common.files import read_json
from ..generation_hyperdflash import DraftRequest, head_logits, num_worth_verifying
from .native import DSPARK, NativeDrafter, load_module, module_folder, module_tensors

# What a checkpoint's config.json says of its module
SETTINGS = ("dspark_block_size", "dspark_target_layer_ids", "dspark_noise_token_id", "dspark_markov_rank")
_FIRST_STAGE = (
    "main_proj.",
    "main_norm.",
)  # the parts of the first stage; other parts outside the layers: of the last


class DSparkAttention(DeepseekV4Attention):
    """V4's sliding attention with its sink, of a block over the last `sliding_window` positions of the context and all
    of itself, in both directions. The window is the block's: it does not move with the slot."""

    def forward(
        self,
        hidden_states: torch.Tensor,  # (B, K, D)
        context: torch.Tensor,  # (B, C, D)
        position_embeddings: tuple[torch.Tensor, torch.Tensor],  # cos and sin, (B, C + K, half of the rotated part)
        attention_mask: torch.Tensor | None,
        cache: Cache | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns `(B, K, D)` and the attention weights. A mask is `(B, 1, K, C + K)` and comes without a cache."""
        (B, K), C = hidden_states.shape[:2], context.shape[1]
        cos, sin = position_embeddings
        block_cos, block_sin = cos[:, C:], sin[:, C:]
        # Queries of the block only: nothing is predicted at context positions
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden_states))).view(B, K, -1, self.head_dim).transpose(1, 2)
        q = apply_rotary_pos_emb(self.q_b_norm(q), block_cos, block_sin)  # (B, heads, K, head_dim)
        # One head, which is key and value
        source = torch.cat([context, hidden_states], dim=1)
        kv = self.kv_norm(self.kv_proj(source)).view(B, C + K, 1, self.head_dim).transpose(1, 2)
        kv = apply_rotary_pos_emb(kv, cos, sin)
        if attention_mask is None:
            context_kv, block_kv = kv[:, :, :C], kv[:, :, C:]
            if cache is not None:  # the cache takes the context only: a block is gone after its round
                context_kv = cache.update(context_kv, context_kv, self.layer_idx)[0]
            kv = torch.cat([context_kv[:, :, -self.sliding_window :], block_kv], dim=2)
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attention(self, q, kv, kv, attention_mask, scaling=self.scaling, s_aux=self.sinks)
        # The values were rotated with the keys: turned back at the query's position
        out = apply_rotary_pos_emb(out.transpose(1, 2), block_cos, -block_sin).transpose(1, 2)
        out = self.o_a_proj(out.reshape(B, K, self.config.o_groups, -1)).flatten(2)
        return self.o_b_proj(out), weights


class DSparkStage(DeepseekV4DecoderLayer):
    """V4's decoder layer, hyper-connections and MoE included, with the attention above."""

    def __init__(self, config: DeepseekV4Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.self_attn = DSparkAttention(config, layer_idx)


class DSparkMarkovHead(nn.Module):
    """Bias of a slot's logits from the token before it: `markov_w2 @ markov_w1[previous]`."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.dspark_markov_rank)
        self.markov_w2 = nn.Linear(config.dspark_markov_rank, config.vocab_size, bias=False)

    def forward(self, previous_ids: torch.LongTensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`(N,)` -> the token's state `(N, R)`, which the confidence head reads too, and the bias `(N, V)`."""
        states = self.markov_w1(previous_ids)
        return states, self.markov_w2(states)


class DSparkConfidenceHead(nn.Module):
    """Logit of the probability that a slot's draft is accepted if those before it are, in fp32."""

    def __init__(self, config: DeepseekV4Config):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.dspark_markov_rank, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor, markov_states: torch.Tensor) -> torch.Tensor:
        """A slot's state before the last norm `(N, D)` and the state of the token before it `(N, R)` -> `(N,)`."""
        return self.proj(torch.cat([hidden_states, markov_states], dim=-1).to(self.proj.weight.dtype))[:, 0]


class DeepseekV4DSpark(NativeDrafter):
    """Slot 0 is the anchor and predicts the first draft; the slots behind it are noise tokens.

    Embedding and LM head are the target's and are handed in; nothing of them is stored here.

    Args:
        config: the target's, with the settings of the module (`SETTINGS`).
        num_stages (`int`, *optional*, defaults to 3): decoder layers.

    Attributes:
        verify_cost (`float`, *optional*): draft no more than is worth verifying, as the confidence head tells, where
            one more verified token costs so much of a round without drafts. None: every slot is drafted.
    """

    kind = DSPARK
    verify_cost: float | None = None
    _keep_in_fp32_modules_strict = [*NativeDrafter._keep_in_fp32_modules_strict, "confidence_head"]

    def __init__(self, config: DeepseekV4Config, num_stages: int = 3):
        stages = {
            "num_hidden_layers": num_stages,
            "layer_types": ["sliding_attention"] * num_stages,
            "mlp_layer_types": ["moe"] * num_stages,
        }
        config = DeepseekV4Config(**{**config.to_dict(), **stages})
        super().__init__(config)
        D = config.hidden_size
        self.main_proj = nn.Linear(len(config.dspark_target_layer_ids) * D, D, bias=False)
        self.main_norm = DeepseekV4RMSNorm(D, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList([DSparkStage(config, i) for i in range(num_stages)])
        self.hc_head = DeepseekV4HyperHead(config)
        self.norm = DeepseekV4RMSNorm(D, eps=config.rms_norm_eps)
        self.markov_head = DSparkMarkovHead(config)
        self.confidence_head = DSparkConfidenceHead(config)
        self.rotary_emb = DeepseekV4RotaryEmbedding(config)
        self.refuse_to_generate()
        self.post_init()

    def checkpoint_name(self, name: str) -> str:
        """See `NativeDrafter`."""
        if name.startswith("layers."):
            return f"mtp.{name.removeprefix('layers.')}"
        return f"mtp.{0 if name.startswith(_FIRST_STAGE) else len(self.layers) - 1}.{name}"

    @property
    def max_drafts(self) -> int:
        """The most drafts per round: every slot predicts one."""
        return self.config.dspark_block_size

    @property
    def tapped_layer_ids(self) -> list[int]:
        """Target layers whose outputs are read."""
        return self.config.dspark_target_layer_ids

    @property
    def dtype(self) -> torch.dtype:
        """The projections'. The library takes the first parameter's, which may be one that stays fp32."""
        return self.main_proj.weight.dtype

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draft one block (or, with a mask, many blocks side by side).

        Args:
            noise_embeds (`torch.Tensor` of shape `(B, K, D)`): the target's embeddings of the anchor and of noise
                tokens.
            context_hidden_states (`torch.Tensor` of shape `(B, C, m, L * D)`): the outputs of the tapped layers,
                concatenated, at the C positions before the anchor that the cache does not hold yet.
            attention_mask (`torch.Tensor` of shape `(B, 1, K, C + K)`, *optional*): additive, and used as it is; not
                with a cache. By default every slot sees the window before the block and the whole block.
            position_ids (`torch.LongTensor` of shape `(B, C + K)`, *optional*): absolute positions of context and
                block; by default they continue the cache's.
            cache (`Cache`, *optional*): keys of earlier context, to which this call adds its own.

        Returns:
            `(hidden, collapsed)`: `(B, K, D)` for the LM head, where slot k predicts the token at anchor + k + 1; and
            the same before the last norm, which the confidence head reads.
        """
        context = self.main_norm(self.main_proj(context_hidden_states.mean(2)))  # (B, C, D)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            num_new = context.shape[1] + noise_embeds.shape[1]
            position_ids = torch.arange(past, past + num_new, device=noise_embeds.device)[None]
        rope = self.rotary_emb(noise_embeds, position_ids=position_ids, layer_type="main")
        x = noise_embeds.unsqueeze(2).repeat(1, 1, self.config.hc_mult, 1)  # (B, K, m, D)
        for layer in self.layers:
            x = layer(x, context=context, position_embeddings=rope, attention_mask=attention_mask, cache=cache)
        collapsed = self.hc_head(x)  # (B, K, D)
        return self.norm(collapsed), collapsed

    def validate_call(self, target, generation_mode, generation_config) -> None:
        """Raise `ValueError` for a call or a target that this module cannot draft for."""
        super().validate_call(target, generation_mode, generation_config)
        asked = generation_config.num_assistant_tokens
        if asked != 20:  # the library's default for every assistant
            check_num_drafts(asked, self.config.dspark_block_size, f"num_assistant_tokens={asked}")
        _check_settings(self.config, target.config.num_hidden_layers, "this DSpark module")

    def new_noise_ids(self, device: torch.device) -> torch.LongTensor:
        """What every round starts from, `(1, K)`: room for the anchor, then noise tokens."""
        return torch.full((1, self.config.dspark_block_size), self.config.dspark_noise_token_id, device=device)

    def propose(self, request: DraftRequest, choose: Callable[[torch.Tensor], torch.LongTensor]) -> None:
        """Draft a block, slot by slot; arguments as in `HyperDFlashAssistant.propose`.

        With `verify_cost`, whether a slot is drafted depends on the drafts before it, never on its own, so that
        sampling stays exact.
        """
        weight = self.main_proj.weight
        embeds = request.target.model.embed_tokens(request.noise_ids).to(weight)  # (1, K, D)
        # Positions of the context, which ends just before the anchor, and of the block, which starts with it
        start, stop = request.position - request.context.shape[1], request.position + request.noise_ids.shape[1]
        positions = torch.arange(start, stop, device=weight.device)[None]
        # 1. All slots of the block in one pass
        hidden, collapsed = self(embeds, request.context.to(weight), position_ids=positions, cache=request.cache)
        logits = head_logits(request.target, hidden[0, : request.num_drafts])  # (n, V)
        # 2. Each slot is corrected by the token chosen before it
        previous, rates = request.noise_ids[0, :1], []
        for slot in range(len(logits)):
            states, bias = self.markov_head(previous.to(weight.device))
            if self.verify_cost is not None:
                rates.append(float(self.confidence_head(collapsed[0, slot : slot + 1], states).sigmoid()))
                if num_worth_verifying(rates, self.verify_cost) <= slot:
                    break
            previous = choose(logits[slot : slot + 1] + bias.to(logits))


def load_dspark(checkpoint: str | Path, config: DeepseekV4Config) -> DeepseekV4DSpark:
    """Read the module of a checkpoint, a folder or a Hub id, in the dtype of `config`, the target's.

    Its settings (`SETTINGS`) are those of the folder's own `config.json`, or else of `config`.

    Raises `ValueError` as `check_kind` and `load_module` do, and for settings that are missing or cannot be; `OSError`
    for no weights at all.
    """
    folder = module_folder(DSPARK, checkpoint)
    config = dspark_config(folder, config, checkpoint)
    num_stages = 1 + max(int(name.split(".")[1]) for name in module_tensors(folder))
    return load_module(lambda: DeepseekV4DSpark(config, num_stages), folder, checkpoint, config)


def dspark_config(folder: Path, config: DeepseekV4Config, where: str | Path) -> DeepseekV4Config:
    """The target's config with the settings of the module in `folder`; errors as in `load_dspark`."""
    own = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    settings = {name: own.get(name, getattr(config, name, None)) for name in SETTINGS}
    if missing := [name for name, value in settings.items() if value is None]:
        raise ValueError(
            f"{where} has DSpark's tensors, but neither its config.json nor the target's says {', '.join(missing)}: "
            "take config.json from the checkpoint that the tensors come from"
        )
    config = DeepseekV4Config(**{**config.to_dict(), **settings})
    _check_settings(config, config.num_hidden_layers, str(where))
    return config


def _check_settings(config: DeepseekV4Config, num_layers: int, where: str) -> None:
    layers, noise = config.dspark_target_layer_ids, config.dspark_noise_token_id
    if not all(0 <= i < num_layers for i in layers):
        raise ValueError(f"{where} reads the target's layers {layers} (from 0), but the target has {num_layers}")
    if not 0 <= noise < config.vocab_size:
        raise ValueError(f"{where}: dspark_noise_token_id {noise} is outside the vocabulary of {config.vocab_size}")


def check_num_drafts(asked: int, block_size: int, what: str) -> None:
    """Raises `ValueError` for more drafts per round than the module has slots: it was trained with no others."""
    if asked > block_size:
        raise ValueError(
            f"{what}: this DSpark module drafts at most {block_size} tokens per round (dspark_block_size {block_size})"
        )
