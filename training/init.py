"""Make a drafter for a DeepSeek-V4 checkpoint: `hyperdflash init TARGET OUT`.

    hyperdflash init deepseek-ai/DeepSeek-V4-Flash drafter                 # a Hub id: fetches up to three shards
    hyperdflash init examples/tiny/target drafter --mask-token-id 3        # seconds on a CPU

Of the target only `config.json`, the safetensors index and a few tensors are read: hc_head's three, the final norm and
four embedding rows, from the shards that hold them, in the official naming or in transformers'. None of them is ever
quantised. The result is a Hub folder: configuration, random weights around the inherited gate, the code, and
`custom_generate/`.
"""

import argparse
import json
import logging
import shutil
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import DeepseekV4Config

from ..common.checkpoint import GATE_TENSORS, TargetCheckpoint, read_identity
from ..common.files import check_output, written_whole
from ..configuration_hyperdflash import HyperDFlashConfig
from ..modeling_hyperdflash import HyperDFlashModel
from ..pairing_hyperdflash import special_token_name, target_fingerprint

logger = logging.getLogger(__name__)

V4_VOCAB_SIZE, V4_MASK_TOKEN_ID = 129280, 128799  # DeepSeek's own drafters use this token for the slots to predict


# ---------------------------------------------------------------------------------------------------------- the target


# --------------------------------------------------------------------------------------------------------- the drafter


def default_sizes(hidden_size: int, num_attention_heads: int | None = None, head_dim: int | None = None) -> dict:
    """The drafter's sizes for a width: at 4096 those of the V4-Flash drafter, at others the same proportions.

    Five layers from a width of 1024 on, else two; an MLP of three times the width, rounded up to a multiple of 64;
    heads that together are as wide as the model, four of them to a key/value head where that divides.
    """
    if head_dim is None:
        head_dim = next(d for d in (128, 64, 16) if hidden_size >= 8 * d or d == 16)
    heads = num_attention_heads or max(hidden_size // head_dim, 1)
    return {
        "num_hidden_layers": 5 if hidden_size >= 1024 else 2,
        "intermediate_size": -(-3 * hidden_size // 64) * 64,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if heads % 4 else heads // 4,
        "head_dim": head_dim,
    }


def spread_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """Evenly spaced target layers for vanilla DFlash, from the second to the third-last."""
    last = max(num_target_layers - 3, 1)
    return sorted({min(round(float(i)), num_target_layers - 1) for i in torch.linspace(1, last, num_layers)})


def choose_mask_token(target: DeepseekV4Config, mask_token_id: int | None) -> int:
    """The mask token, checked. Raises `ValueError` when none is given for a vocabulary that is not V4's, or when it is
    outside the vocabulary or one of the target's special tokens."""
    V = target.vocab_size
    if mask_token_id is None:
        if V != V4_VOCAB_SIZE:
            raise ValueError(
                f"which token of the target's {V} is free for use as the mask is not known (V4-Flash's is "
                f"{V4_MASK_TOKEN_ID} of {V4_VOCAB_SIZE}): say it with --mask-token-id (mask_token_id=)"
            )
        mask_token_id = V4_MASK_TOKEN_ID
    if not 0 <= mask_token_id < V:
        raise ValueError(f"mask_token_id {mask_token_id} is outside the target's vocabulary of {V} tokens")
    if name := special_token_name(mask_token_id, target):
        raise ValueError(f"mask_token_id {mask_token_id} is the target's {name}: choose a token of its own")
    return mask_token_id


def why_no_gate(context_source: str, hidden_size: int, target: DeepseekV4Config, has_hc_head: bool) -> str | None:
    """Why the gate cannot be inherited from the target, or None when it can."""
    if context_source != "pre_hc_head":
        return f"context_source {context_source!r} is not the residual that hc_head collapses"
    if hidden_size != target.hidden_size:
        return f"the drafter's width {hidden_size} is not the target's {target.hidden_size}"
    if not has_hc_head:
        return "the target has no learned hc_head"
    return None


def drafter_config(
    target: DeepseekV4Config,
    *,
    has_hc_head: bool = True,
    reducer: str | None = None,
    context_source: str = "pre_hc_head",
    mask_token_id: int | None = None,
    hidden_size: int | None = None,
    target_layer_ids: list[int] | None = None,
    num_attention_heads: int | None = None,
    head_dim: int | None = None,
    **kwargs,
) -> HyperDFlashConfig:
    """The drafter's configuration for a target's; arguments and errors as in `init_drafter`, None for the default."""
    hidden_size = hidden_size or target.hidden_size
    reason = why_no_gate(context_source, hidden_size, target, has_hc_head)
    if reducer == "hc_gate" and reason:
        raise ValueError(f"reducer 'hc_gate' cannot be inherited: {reason}. Leave reducer out for 'fc'")
    if reducer is None and reason:
        logger.warning(f"reducer 'fc' (a dense projection) instead of 'hc_gate': {reason}")
    sizes = default_sizes(hidden_size, num_attention_heads, head_dim)
    sizes.update({name: value for name, value in kwargs.items() if value is not None})
    if context_source == "hidden_layers" and target_layer_ids is None:
        target_layer_ids = spread_layers(target.num_hidden_layers, sizes["num_hidden_layers"])
    mask_token_id = choose_mask_token(target, mask_token_id)
    try:
        return HyperDFlashConfig(
            mask_token_id=mask_token_id,
            context_source=context_source,
            target_layer_ids=target_layer_ids,
            reducer=reducer or ("fc" if reason else "hc_gate"),
            hc_mult=target.hc_mult,
            hc_eps=target.hc_eps,
            target_hidden_size=target.hidden_size,
            target_num_hidden_layers=target.num_hidden_layers,
            vocab_size=target.vocab_size,
            hidden_size=hidden_size,
            rms_norm_eps=target.rms_norm_eps,
            max_position_embeddings=target.max_position_embeddings,
            **sizes,
        )
    except StrictDataclassError as error:
        raise ValueError(str(error.__cause__ or error)) from error


def init_drafter(
    target: str | Path,
    output: str | Path,
    *,
    num_hidden_layers: int | None = None,
    block_size: int = 7,
    reducer: str | None = None,
    reducer_path_norm: bool | None = None,
    context_source: str = "pre_hc_head",
    mask_token_id: int | None = None,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_attention_heads: int | None = None,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    sliding_window: int | None = None,
    target_layer_ids: list[int] | None = None,
    draft_head: str | None = None,
    markov_rank: int | None = None,
    markov_gate: bool | None = None,
    draft_confidence: bool | None = None,
    verify_cost: float | None = None,
    revision: str | None = None,
    seed: int = 0,
) -> Path:
    """Make a drafter folder for a target: its gate inherited, everything else random.

    Args:
        target: a folder or Hub id of a DeepSeek-V4 checkpoint; stored as its Hub id or the folder's own name.
        output: the folder to be made; it must not exist or be empty.
        block_size: positions of a block, the anchor included.
        reducer: `"hc_gate"` wherever the gate can be inherited, else `"fc"`, which a warning then says. `"mean"` and
            `"fc"` can be asked for.
        reducer_path_norm: whether the gate weighs normed paths, by default true; off, it is the target's own collapse.
        mask_token_id: a token of the target that texts do not use; needed unless the vocabulary is V4's 129,280.
        hidden_size, num_hidden_layers, intermediate_size, num_attention_heads, num_key_value_heads, head_dim: sizes of
            the drafter, by default those of `default_sizes` at the target's width.
        target_layer_ids: for `context_source="hidden_layers"`, by default one for each drafter layer, evenly spaced.
        draft_head, markov_rank, markov_gate, draft_confidence, verify_cost: heads beyond the paper, by default none.
            See [`HyperDFlashConfig`].
        revision: branch, tag or commit of a Hub id; the commit is stored.
        seed: of the random weights.

    Returns the folder's path.

    Raises `ValueError` for a target that is not DeepSeek-V4 or options that contradict it, `OSError` when `output` is
    in use or a file of the target is missing. Nothing is left behind then.
    """
    output = check_output(output)
    checkpoint = TargetCheckpoint(target, revision)
    has_hc_head = any(name in checkpoint for name in GATE_TENSORS)
    config = drafter_config(
        checkpoint.config,
        has_hc_head=has_hc_head,
        reducer=reducer,
        reducer_path_norm=reducer_path_norm,
        context_source=context_source,
        mask_token_id=mask_token_id,
        hidden_size=hidden_size,
        target_layer_ids=target_layer_ids,
        num_attention_heads=num_attention_heads,
        head_dim=head_dim,
        num_hidden_layers=num_hidden_layers,
        block_size=block_size,
        intermediate_size=intermediate_size,
        num_key_value_heads=num_key_value_heads,
        sliding_window=sliding_window,
        draft_head=draft_head,
        markov_rank=markov_rank,
        markov_gate=markov_gate,
        draft_confidence=draft_confidence,
        verify_cost=verify_cost,
    )
    tensors = read_identity(checkpoint, has_hc_head)
    config.target_name_or_path, config.target_revision = checkpoint.name, checkpoint.revision
    model = new_drafter(config, tensors, seed)
    with written_whole(output) as folder:
        model.save_pretrained(folder)
        copy_custom_generate(folder)
    return output


def new_drafter(config: HyperDFlashConfig, tensors: dict[str, torch.Tensor], seed: int = 0) -> HyperDFlashModel:
    """A drafter in fp32 with random weights around the gate in `tensors`, the target's as `read_identity` names them;
    their fingerprint goes into the config."""
    config.target_fingerprint = target_fingerprint(tensors)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HyperDFlashModel(config)
    if config.reducer == "hc_gate":
        with torch.no_grad():
            for name in GATE_TENSORS:
                getattr(model.reducer, name.replace("hc_head_", "hc_")).copy_(tensors[name])
    return model


def copy_custom_generate(folder: str | Path) -> None:
    """Add `custom_generate/`, which `save_pretrained` does not know of, to a drafter's folder."""
    destination = Path(folder) / "custom_generate"
    destination.mkdir(exist_ok=True)
    shutil.copyfile(Path(__file__).parents[1] / "custom_generate" / "generate.py", destination / "generate.py")


# ---------------------------------------------------------------------------------------------------- the command line


_SIZE_OPTIONS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "markov_rank",
)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Raises what `init_drafter` raises."""
    names = ("revision", "block_size", "mask_token_id", "context_source", "reducer", "target_layer_ids", "seed")
    names += ("draft_head", "markov_gate", "draft_confidence", "verify_cost", *_SIZE_OPTIONS)
    output = init_drafter(args.target, args.output, **{name: getattr(args, name) for name in names})
    config = json.loads((output / "config.json").read_text())
    print(
        f"{output}: a drafter of {config['num_hidden_layers']} layers for {config['target_name_or_path']}, "
        f"reducer {config['reducer']}, {config['block_size'] - 1} drafts a block. It is untrained"
    )
    return 0
