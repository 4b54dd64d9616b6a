"""What is refused, before a token is served: one sentence that names the value and the way out.

A wrong set-up does not crash by itself: it drafts from garbage and accepts nothing. Every function here works on plain
values and needs no engine.
"""

import logging
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from transformers import PreTrainedConfig

from . import fingerprint

logger = logging.getLogger("hyperdflash_sglang")

NESTED = "hyperdflash_config"
READ_SGLANG = "0.5.23"
REDUCERS, DRAFT_HEADS = ("hc_gate", "fc", "mean"), ("none", "markov")
USE_READ = f"use SGLang {READ_SGLANG}, whose sources this was written against"
EXPORT_AGAIN = "export the drafter again with `hyperdflash export DRAFTER OUT --format sglang`"


def sglang_version() -> str:
    """The installed version, for messages."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of an unknown version"


@cache
def warn_that_it_never_ran() -> None:
    """Once a process: no engine has run this."""
    logger.warning(
        "hyperdflash-sglang was written against the sources of SGLang %s and has never run in an engine; this is "
        "SGLang %s: compare greedy output with and without drafts",
        READ_SGLANG,
        sglang_version(),
    )


@contextmanager
def named():
    """Says in a refusal whose it is and which SGLang it meets."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"hyperdflash-sglang in SGLang {sglang_version()}: {error}") from None


class TransformersFolder(PreTrainedConfig):
    """Stands for the configuration of a drafter in transformers' form, which SGLang cannot load."""

    model_type = "hyperdflash"

    @named()
    def __init__(self, **kwargs):
        raise ValueError(
            "this is a drafter's folder for transformers (model_type 'hyperdflash'): make the one for SGLang with "
            "`hyperdflash export DRAFTER OUT --format sglang` and give SGLang that"
        )


def is_sglangs_own(cls: type) -> bool:
    """Whether a model class is SGLang's, or this plug-in's."""
    return cls.__module__.split(".")[0] in ("sglang", "hyperdflash_sglang")


# ------------------------------------------------------------------------------------------------------- the target


@named()
def check_target(target, drafter: dict, stages: int) -> None:
    """The target's configuration is one that the drafter was made for. Raises `ValueError`."""
    check_fields(drafter)
    if target.model_type != "deepseek_v4":
        raise ValueError(
            f"the target's model_type is {target.model_type!r}: a HyperDFlash drafter needs a DeepSeek-V4 target "
            "('deepseek_v4'), as V4.1 has no learned hc_head"
        )
    if stages > 1:
        raise ValueError(
            f"pp_size={stages}: the residual paths exist on the last stage only, which was not worked through; use "
            "tensor parallelism"
        )
    for what, ours, theirs in (
        ("vocabulary", drafter["vocab_size"], target.vocab_size),
        ("hidden size", drafter["target_hidden_size"], target.hidden_size),
        ("hc_mult", drafter["hc_mult"], target.hc_mult),
        ("number of layers", drafter["target_num_hidden_layers"], target.num_hidden_layers),
    ):
        if ours != theirs:
            raise ValueError(
                f"the drafter was made for a target with {what} {ours}, but the target has {theirs}: take "
                f"{drafter['target_name_or_path'] or 'its own target'}, or make another for this target"
            )


def check_fields(drafter: dict) -> None:
    """The drafter's configuration is one that this plug-in knows."""
    for name, known in (("reducer", REDUCERS), ("draft_head", DRAFT_HEADS)):
        if name not in drafter:
            raise ValueError(f"the draft's {NESTED} lacks {name}: {EXPORT_AGAIN}")
        if drafter[name] not in known:
            raise ValueError(f"{name} {drafter[name]!r} is unknown to this plug-in: install a newer one")


check_fingerprint = named()(fingerprint.check_fingerprint)


# -------------------------------------------------------------------------------------------------------- the draft


@named()
def check_draft(config, num_draft_tokens: int, verify_mode: str) -> None:
    """What the draft's configuration and the server's tell. `num_draft_tokens` is SGLang's count, anchor included.

    Raises `ValueError`.
    """
    drafter = getattr(config, NESTED, None)
    if drafter is None:
        raise ValueError(f"the draft's config.json has no {NESTED}: {EXPORT_AGAIN}")
    check_fields(drafter)
    if num_draft_tokens > drafter["block_size"]:
        raise ValueError(
            f"{num_draft_tokens - 1} drafts a round were asked for, but the drafter was trained on blocks of "
            f"{drafter['block_size'] - 1}: give --speculative-dspark-block-size {drafter['block_size'] - 1} or less"
        )
    # SGLang raises the draft's own max_position_embeddings to the target's length when it is told to
    length, most = getattr(config, "context_len", None), drafter["max_position_embeddings"]
    if length is not None and length > most:
        raise ValueError(
            f"the context length is {length}, but the drafter's positions end at {most}: serve with --context-length "
            f"{most} or less"
        )
    if verify_mode != "static":
        raise ValueError(
            f"SGLANG_RAGGED_VERIFY_MODE={verify_mode} cuts blocks by DSpark's confidence head, which a HyperDFlash "
            "drafter does not have: leave it at 'static'"
        )


@named()
def check_target_class(found: type | None, expected: type) -> None:
    """The plug-in's class serves the target. Raises `ValueError`."""
    if found is None or not issubclass(found, expected):
        name = None if found is None else f"{found.__module__}.{found.__qualname__}"
        raise ValueError(
            f"another class than the plug-in's serves the target, {name}: by another plug-in "
            "(SGLANG_PLUGINS=hyperdflash loads this one alone) or SGLANG_EXTERNAL_MODEL_PACKAGE"
        )


@named()
def check_layers(found: list[tuple[int, bool]], drafter: dict) -> None:
    """Each layer slides as it was trained to (`-1`: not at all; SGLang's window leaves out the token itself) and sees
    its whole block (`True`). Raises `RuntimeError`."""
    sliding = [kind == "sliding_attention" for kind in drafter["layer_types"]]
    expected = [(drafter["sliding_window"] - 1 if slides else -1, True) for slides in sliding]
    if found != expected:
        raise RuntimeError(
            f"the draft's layers got (window, sees the whole block) {found} in place of {expected}: {EXPORT_AGAIN}, "
            f"or {USE_READ}"
        )


@named()
def check_width(found: int, expected: int) -> None:
    """The draft gets all paths. Raises `RuntimeError`."""
    if found != expected:
        raise RuntimeError(
            f"the drafter got {found} features a token in place of its {expected} (hc_mult paths): {USE_READ}"
        )


@named()
def check_tensors(found: set[str], expected: set[str]) -> None:
    """The draft's file has every tensor and no other. Raises `ValueError`."""
    for problem, names in (("lack", expected - found), ("have an unknown", found - expected)):
        if names:
            raise ValueError(f"the draft's weights {problem} {', '.join(sorted(names)[:5])}: {EXPORT_AGAIN}")


def warn_of_memory(bytes_per_token: int) -> None:
    """SGLang sizes a V4 server's caches as if a draft had one layer of V4's own kind."""
    logger.warning(
        "The drafter's cache takes %s bytes a token on each GPU in bf16, and SGLang does not set them aside beside "
        "DeepSeek-V4's own: should memory run out at the start, give --max-total-tokens",
        f"{bytes_per_token:,}",
    )
