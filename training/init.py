"""Make a drafter for a DeepSeek-V4 checkpoint: `hyperdflash init TARGET OUT`.

    hyperdflash init deepseek-ai/DeepSeek-V4-Flash drafter                 # a Hub id: fetches a few tensors
    hyperdflash init examples/tiny/target drafter --mask-token-id 3        # seconds on a CPU

Of the target only `config.json`, the safetensors index and a few tensors are read: hc_head's three, the final norm and
four embedding rows, in the official naming or in transformers' own. Checkpoints never quantise them. The result is a
Hub folder: configuration, random weights around the inherited gate, the code, and `custom_generate/`.
"""

import argparse
import json
import logging
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import DeepseekV4Config

from ..common.checkpoint import GATE_TENSORS, TargetCheckpoint, read_identity
from ..common.files import check_output, copy_encoding, written_whole
from ..common.options import DRAFTER_OPTIONS as OPTIONS
from ..configuration_hyperdflash import HyperDFlashConfig
from ..modeling_hyperdflash import HyperDFlashModel
from ..pairing_hyperdflash import SPECIAL_TOKENS, special_token_name, target_fingerprint

logger = logging.getLogger(__name__)

V4_VOCAB_SIZE, V4_MASK_TOKEN_ID = 129280, 128799  # DeepSeek's own drafters use this token for the slots to predict


# Options that do nothing without another one
_NEEDED = {
    "markov_rank": ("draft_head", "markov"),
    "markov_gate": ("draft_head", "markov"),
    "verify_cost": ("draft_confidence", True),
    "reducer_path_norm": ("reducer", "hc_gate"),
}


# --------------------------------------------------------------------------------------------------------- the drafter


def default_sizes(hidden_size: int, num_attention_heads: int | None = None, head_dim: int | None = None) -> dict:
    """The drafter's sizes for a width: at 4096 those of the V4-Flash drafter, at others the same proportions.

    Five layers from a width of 1024 on, else two; an MLP of three times the width, rounded up to a multiple of 64;
    heads that together are as wide as the model, four or more of them to a key/value head. Of those there are a power
    of two, at most eight, so that as many processes of a server can share them.
    """
    if head_dim is None:
        # The largest with eight heads or more; 16 is for tiny models
        head_dim = next(d for d in (128, 64, 16) if hidden_size >= 8 * d or d == 16)
    heads = num_attention_heads or max(hidden_size // head_dim, 1)
    return {
        "num_hidden_layers": 5 if hidden_size >= 1024 else 2,
        "intermediate_size": -(-3 * hidden_size // 64) * 64,
        "num_attention_heads": heads,
        "num_key_value_heads": next(n for n in (8, 4, 2, 1) if n == 1 or (heads >= 4 * n and heads % n == 0)),
        "head_dim": head_dim,
    }


def spread_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """Evenly spaced target layers for vanilla DFlash, from the second to the third-last."""
    last = max(num_target_layers - 3, 1)
    # A set: a small target may have fewer layers than are asked for
    return sorted({min(round(float(i)), num_target_layers - 1) for i in torch.linspace(1, last, num_layers)})


def choose_mask_token(target: DeepseekV4Config, mask_token_id: int | None) -> int:
    """The mask token, checked.

    Raises `ValueError` when none is given for a vocabulary that is not V4's, and for one that is outside the
    vocabulary or one of the target's special tokens.
    """
    V = target.vocab_size
    if mask_token_id is None:
        if V != V4_VOCAB_SIZE:
            raise ValueError(
                f"the target has a vocabulary of {V} tokens, not V4's {V4_VOCAB_SIZE}, so its mask token is unknown: "
                "name one that texts do not use with --mask-token-id (mask_token_id=)"
            )
        mask_token_id = V4_MASK_TOKEN_ID
    if not 0 <= mask_token_id < V:
        raise ValueError(f"mask_token_id {mask_token_id} is outside the target's vocabulary of {V} tokens")
    if name := special_token_name(mask_token_id, target):
        raise ValueError(f"mask_token_id {mask_token_id} is the target's {name}: choose another token")
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


def drafter_config(target: DeepseekV4Config, *, has_hc_head: bool = True, **options) -> HyperDFlashConfig:
    """The configuration of a new drafter for a target's; options and errors as in `init_drafter`."""
    if unknown := sorted(options.keys() - OPTIONS.keys()):
        raise TypeError(f"a new drafter has no option {', '.join(unknown)}; its options are {', '.join(OPTIONS)}")
    # The command line passes every option, None where the user gave nothing
    given = {name: value for name, value in options.items() if value is not None}
    source = given.setdefault("context_source", "pre_hc_head")
    width = given.setdefault("hidden_size", target.hidden_size)
    reason = why_no_gate(source, width, target, has_hc_head)
    if given.get("reducer") == "hc_gate" and reason:
        raise ValueError(f"reducer 'hc_gate' cannot be inherited: {reason}. Leave reducer out for 'fc'")
    if "reducer" not in given and reason:
        logger.warning(f"reducer 'fc' (a dense projection) instead of 'hc_gate': {reason}")
    given.setdefault("reducer", "fc" if reason else "hc_gate")
    # Once width and heads are settled, from which the other sizes follow
    given = {**default_sizes(width, given.get("num_attention_heads"), given.get("head_dim")), **given}
    if source == "hidden_layers" and "target_layer_ids" not in given:
        given["target_layer_ids"] = spread_layers(target.num_hidden_layers, given["num_hidden_layers"])
    given["mask_token_id"] = choose_mask_token(target, given.get("mask_token_id"))
    try:
        config = HyperDFlashConfig(
            hc_mult=target.hc_mult,
            hc_eps=target.hc_eps,
            target_hidden_size=target.hidden_size,
            target_num_hidden_layers=target.num_hidden_layers,
            vocab_size=target.vocab_size,
            rms_norm_eps=target.rms_norm_eps,
            max_position_embeddings=target.max_position_embeddings,
            **{name: getattr(target, name, None) for name in SPECIAL_TOKENS},
            **given,
        )
    except StrictDataclassError as error:
        # @strict wraps the validator's own error, which names the value, in one of its own
        raise ValueError(str(error.__cause__ or error)) from error
    check_useful(config, given)
    return config


def check_useful(config: HyperDFlashConfig, given: dict) -> None:
    """Raises `ValueError` for given options that do nothing, also where they repeat the default."""
    for name, (other, value) in _NEEDED.items():
        if name in given and getattr(config, other) != value:
            raise ValueError(f"{name}={given[name]} needs {other}={value}, and {other} is {getattr(config, other)}")


def read_vocabulary(checkpoint: TargetCheckpoint) -> tuple[set[int], dict[int, str]]:
    """Ids of the target's added tokens, and its words by id; empty where its tokenizer cannot be read."""
    try:
        tokenizer = json.loads(checkpoint.file("tokenizer.json").read_text(encoding="utf-8"))
        added = {token["id"] for token in tokenizer["added_tokens"]}
        return added, {index: word for word, index in tokenizer["model"]["vocab"].items()}
    except (OSError, ValueError, KeyError, AttributeError):  # no such file, or not one that transformers wrote
        return set(), {}


def warn_of_ordinary_token(token_id: int, added: set[int], words: dict[int, str]) -> None:
    """Warn of a mask token that is an ordinary word of the target's; arguments as from `read_vocabulary`."""
    if added and token_id not in added and token_id in words:
        logger.warning(
            f"mask_token_id {token_id} is {words[token_id]!r}, an ordinary token of the target's texts: a special or "
            f"unused one serves better (special ones are {', '.join(map(str, sorted(added)[:8]))}, ...)"
        )


def init_drafter(
    target: str | Path, output: str | Path, *, revision: str | None = None, seed: int = 0, **options
) -> Path:
    """Make a drafter folder for a target: its gate inherited, everything else random.

    Args:
        target: a folder or Hub id of a DeepSeek-V4 checkpoint; stored as its Hub id or the folder's own name.
        output: the folder to be made; it must not exist or be empty.
        revision: branch, tag or commit of a Hub id; the commit is stored.
        seed: of the random weights.
        options: fields of [`HyperDFlashConfig`], where they are documented; `OPTIONS` lists them. None stands for the
            default: sizes by `default_sizes` at the target's width, `reducer` `"hc_gate"` wherever the gate can be
            inherited and else `"fc"`, which a warning then says. `mask_token_id` is needed unless the vocabulary is
            V4's 129,280: a token that texts do not use.

    Returns the folder's path.

    Raises `ValueError` for a target that is not DeepSeek-V4 or options that contradict it or each other, `TypeError`
    for an unknown option, `OSError` when `output` is in use or a file of the target is missing. Nothing is left behind
    then.
    """
    output = check_output(output)
    checkpoint = TargetCheckpoint(target, revision)
    # Before any tensor is read, which from the Hub is a download
    config = drafter_config(checkpoint.config, has_hc_head=checkpoint.has_hc_head, **options)
    warn_of_ordinary_token(config.mask_token_id, *read_vocabulary(checkpoint))
    tensors = read_identity(checkpoint)
    config.target_name_or_path, config.target_revision = checkpoint.name, checkpoint.revision
    model = new_drafter(config, tensors, seed)
    with written_whole(output) as folder:
        model.save_pretrained(folder)
        copy_encoding(folder)
    return output


def new_drafter(config: HyperDFlashConfig, tensors: dict[str, torch.Tensor], seed: int = 0) -> HyperDFlashModel:
    """A drafter in fp32 with random weights around the gate in `tensors`, the target's as `read_identity` names them;
    their fingerprint goes into the config."""
    config.target_fingerprint = target_fingerprint(tensors)
    # Reproducible by its own seed; the caller's generator stays where it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = HyperDFlashModel(config)
    if config.reducer == "hc_gate":
        with torch.no_grad():
            for name in GATE_TENSORS:
                getattr(model.reducer, name.replace("hc_head_", "hc_")).copy_(tensors[name])
    return model


# ---------------------------------------------------------------------------------------------------- the command line


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Raises what `init_drafter` raises."""
    output = init_drafter(
        args.target,
        args.output,
        revision=args.revision,
        seed=args.seed,
        **{name: getattr(args, name) for name in OPTIONS},
    )
    config = HyperDFlashConfig.from_pretrained(output)
    # To count parameters, the weights need not be loaded again
    with torch.device("meta"):
        number = HyperDFlashModel(config).num_parameters()
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    print(
        f"{output}: a drafter of {config.num_hidden_layers} layers for {config.target_name_or_path}, "
        f"reducer {config.reducer}, {config.block_size - 1} drafts per block, {number:,} parameters, {size:,} bytes. "
        "It is untrained"
    )
    return 0
