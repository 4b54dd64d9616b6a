"""Configuration of a HyperDFlash drafter. The defaults are the drafter for DeepSeek-V4-Flash."""

from typing import TYPE_CHECKING

import transformers
from packaging.version import Version

TESTED_TRANSFORMERS = ("5.24.0",)  # the first is also the oldest that works

# Here, as this is the first file of a drafter's folder that runs, whichever Auto class loads it. Older versions load
# the drafter, but keep the target's cache under another name, and `generate` then misses a cache that is there.
if Version(transformers.__version__) < Version(TESTED_TRANSFORMERS[0]):
    raise ImportError(
        f"HyperDFlash needs transformers {TESTED_TRANSFORMERS[0]} or later, and {transformers.__version__} is "
        "installed: pip install --upgrade transformers"
    )

from huggingface_hub.dataclasses import strict  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402

if TYPE_CHECKING:
    # Never runs, but is read: transformers names a folder's module by a hash over the files it imports, and takes two
    # models for one when their configuration modules are the same. With this line the hash covers all of the code.
    from .modeling_hyperdflash import HyperDFlashModel  # noqa: F401


CONTEXT_SOURCES = ("pre_hc_head", "hidden_layers")
REDUCERS = ("hc_gate", "fc", "mean")
DRAFT_HEADS = ("none", "markov")
VERIFICATIONS = ("block", "token")
LAYER_TYPES = ("full_attention", "sliding_attention")
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)


@strict
class HyperDFlashConfig(PreTrainedConfig):
    r"""
    Configuration of [`HyperDFlashModel`]. Fields that transformers' drafters share keep their names.

    Args:
        block_size (`int`, *optional*, defaults to 7):
            Positions of a block, including the anchor: it drafts `block_size - 1` tokens (the paper's "(6)" is 7).
        mask_token_id (`int`, *optional*, defaults to 128799):
            Token whose embedding fills the slots to be predicted: a row of the target's embedding.
        context_source (`str`, *optional*, defaults to `"pre_hc_head"`):
            `"pre_hc_head"`: the target's final residual before its hc_head collapses it (paper, section 2.1).
            `"hidden_layers"`: the outputs of `target_layer_ids`, paths averaged, concatenated (vanilla DFlash).
        target_layer_ids (`list[int]`, *optional*):
            Zero-based target layers whose outputs are read; for `"pre_hc_head"` the target's last layer.
        reducer (`str`, *optional*, defaults to `"hc_gate"`):
            How the `hc_mult` paths become one vector: `"hc_gate"` (paper, equation 1 and section 2.2), `"fc"` (a dense
            projection) or `"mean"`. `"hc_gate"` and `"mean"` need `"pre_hc_head"` and `target_hidden_size ==
            hidden_size`; `init` falls back to `"fc"` and says so.
        reducer_path_norm (`bool`, *optional*, defaults to `True`):
            RMSNorm of each path before the gate weighs it; off, the gate is the target's own collapse.
        hc_mult (`int`, *optional*, defaults to 4), hc_eps (`float`, *optional*, defaults to 1e-6):
            The target's number of residual paths, and the offset of its gate.
        target_hidden_size (`int`, *optional*, defaults to 4096), target_num_hidden_layers (`int`, defaults to 43):
            The target's width and depth.
        vocab_size (`int`, *optional*, defaults to 129280):
            The target's vocabulary; embedding and LM head are the target's and never stored here.
        hidden_size (`int`, *optional*, defaults to 4096), num_hidden_layers (`int`, *optional*, defaults to 5),
        intermediate_size, num_attention_heads, num_key_value_heads, head_dim (`int`, *optional*):
            The drafter's own sizes. At another width than the target's, two projections stand around its layers:
            the target's embeddings go down to it, its states up to the target's LM head.
        sliding_window (`int`, *optional*, defaults to 2048):
            Positions that a slot can see, itself included, in the layers that `layer_types` calls
            `"sliding_attention"`: all of them, by default.
        draft_head (`str`, *optional*, defaults to `"none"`):
            `"none"`: the slots of a block are predicted independently, as in the paper. `"markov"`: the logits of a
            slot get a bias from the token chosen for the slot before it.
        markov_rank (`int`, *optional*, defaults to 256), markov_gate (`bool`, *optional*, defaults to `False`):
            Rank of that bias, and whether the slot's hidden state weighs its parts.
        draft_confidence (`bool`, *optional*, defaults to `False`):
            Estimate the acceptance of each slot, and draft only what is worth verifying.
        verify_cost (`float`, *optional*, defaults to 0.03):
            Time of one more draft and its verification, as a share of a round without drafts, against which a draft's
            gain is weighed (`python -m hyperdflash.benchmark.profile_rounds` measures it).
        verification (`str`, *optional*, defaults to `"block"`):
            How sampled drafts are verified, losslessly either way: `"block"` judges a round's drafts together (arXiv
            2403.10444) and keeps more of them than `"token"`, which judges one after the other (arXiv 2211.17192).
            Greedy decoding is the same with both.
        bos_token_id (`int`, *optional*), eos_token_id (`int` or `list[int]`, *optional*), pad_token_id (`int`,
        *optional*):
            The target's. transformers' text-generation pipeline compares them with the target's own.
        target_name_or_path (`str`, *optional*), target_revision (`str`, *optional*), target_fingerprint (`dict`,
        *optional*):
            The target this drafter was made for; the fingerprint is compared at the first `generate`.
        encoding (`dict`, *optional*):
            Generation of the chat encoding, and the modes trained on, as `{"generation": ..., "modes": [...]}`.

    Raises huggingface_hub's `StrictDataclassClassValidationError` for values that contradict each other, naming them;
    `StrictDataclassFieldValidationError` for a value of the wrong type.
    """

    model_type = "hyperdflash"

    block_size: int = 7
    mask_token_id: int = 128799
    context_source: str = "pre_hc_head"
    target_layer_ids: list[int] | None = None
    reducer: str = "hc_gate"
    reducer_path_norm: bool = True
    hc_mult: int = 4
    hc_eps: float = 1e-6
    target_hidden_size: int = 4096
    target_num_hidden_layers: int = 43
    vocab_size: int = 129280

    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: str = "silu"
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    sliding_window: int = 2048
    max_position_embeddings: int = 1048576
    use_cache: bool = True

    draft_head: str = "none"
    markov_rank: int = 256
    markov_gate: bool = False
    draft_confidence: bool = False
    verify_cost: float | int = 0.03

    verification: str = "block"

    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    target_name_or_path: str | None = None
    target_revision: str | None = None
    target_fingerprint: dict | None = None
    encoding: dict | None = None

    def __post_init__(self, **kwargs) -> None:
        if self.target_layer_ids is None:
            self.target_layer_ids = [self.target_num_hidden_layers - 1]
        if self.layer_types is None:
            self.layer_types = ["sliding_attention"] * self.num_hidden_layers
        # The library would take the second and ignore the first, which an editor of config.json may have meant
        theta, stated = kwargs.get("rope_theta"), (self.rope_parameters or {}).get("rope_theta")
        if None not in (theta, stated) and theta != stated:
            raise ValueError(f"rope_theta {theta} contradicts rope_parameters, which has {stated}: change it there")
        super().__post_init__(**kwargs)

    @property
    def tapped_layer_ids(self) -> list[int] | None:
        """Target layers whose outputs the drafter reads; None for the residual before hc_head."""
        return self.target_layer_ids if self.context_source == "hidden_layers" else None

    def validate_block(self) -> None:
        """Block, vocabulary and mask token fit each other."""
        if self.block_size < 2:
            raise ValueError(f"block_size {self.block_size} leaves no slot to draft: it counts the anchor")
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is outside the target's {self.vocab_size} embedding rows"
            )

    def validate_heads(self) -> None:
        """Rank and cost are in range."""
        if self.markov_rank < 1:
            raise ValueError(f"markov_rank must be at least 1; got {self.markov_rank}")
        if not 0 <= self.verify_cost < float("inf"):
            raise ValueError(f"verify_cost, a share of a round's time, must be at least 0; got {self.verify_cost}")

    def validate_context(self) -> None:
        """Source, tapped layers and reducer fit each other."""
        for name, value, allowed in (
            ("context_source", self.context_source, CONTEXT_SOURCES),
            ("reducer", self.reducer, REDUCERS),
            ("draft_head", self.draft_head, DRAFT_HEADS),
            ("verification", self.verification, VERIFICATIONS),
            *(("layer_types", layer_type, LAYER_TYPES) for layer_type in self.layer_types),
        ):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {value!r}")
        last = self.target_num_hidden_layers - 1
        if not self.target_layer_ids or not all(0 <= i <= last for i in self.target_layer_ids):
            raise ValueError(f"target_layer_ids {self.target_layer_ids} must lie in 0..{last}, the target's layers")
        if self.context_source == "pre_hc_head" and self.target_layer_ids != [last]:
            raise ValueError(
                f"context_source 'pre_hc_head' reads the last layer, target_layer_ids [{last}]; "
                f"got {self.target_layer_ids}"
            )
        if self.reducer != "fc" and self.context_source != "pre_hc_head":
            raise ValueError(
                f"reducer {self.reducer!r} needs context_source 'pre_hc_head'; use 'fc' with hidden_layers"
            )
        if self.reducer != "fc" and self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"reducer {self.reducer!r} needs the target's width {self.target_hidden_size} to be the drafter's "
                f"{self.hidden_size}; use reducer 'fc'"
            )

    def validate_layers(self) -> None:
        """Sizes are at least 1, the window reaches beyond the block, and the heads divide into groups."""
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        # The last slot of a block sees `sliding_window - block_size` positions before the anchor
        if "sliding_attention" in self.layer_types and self.sliding_window <= self.block_size:
            raise ValueError(
                f"sliding_window {self.sliding_window} hides all context from the last slot of a block of "
                f"{self.block_size} positions: it must be larger than block_size"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )


HyperDFlashConfig.register_for_auto_class()

__all__ = ["HyperDFlashConfig"]
