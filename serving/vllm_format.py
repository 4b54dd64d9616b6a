"""The folder that vLLM serves a drafter from, and the way back: `hyperdflash export DRAFTER OUT --format vllm`.

vLLM's DFlash parser takes the drafter for a Qwen3 model of architecture `DFlashHyperDraftModel`, which the plug-in in
`serving/vllm_plugin` brings. Layers and norms have the names of public DFlash drafters, gate and heads keep their own
(`reducer.`, `markov_head.`, `confidence_head.`); embedding and LM head are the target's. `config.json` also holds the
drafter's whole configuration under `hyperdflash_config`, which the plug-in checks against the target and from
which `read_vllm` rebuilds the drafter.
"""

import json
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file

from ..configuration_hyperdflash import HyperDFlashConfig
from ..modeling_hyperdflash import HyperDFlashModel

ARCHITECTURE = "DFlashHyperDraftModel"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
NESTED = "hyperdflash_config"

# Prefix here -> prefix there, where they differ
PREFIXES = {"context_norm.": "hidden_norm.", "reducer.fc.": "fc."}
# They describe the library and the place that wrote a config, not the drafter
LIBRARY_FIELDS = ("_name_or_path", "architectures", "auto_map", "dtype", "transformers_version")

CONFIDENCE_IS_UNUSED = (
    "The confidence head is in the file for the way back to transformers. vLLM does not use it:\n"
    "`num_speculative_tokens` sets the number of drafts per round."
)

QWEN3_FIELDS = (
    "block_size",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "target_hidden_size",
    "vocab_size",
)


def check_servable(config: HyperDFlashConfig) -> None:
    """Raises `ValueError` for a drafter that the plug-in cannot run."""
    if config.context_source != "pre_hc_head":
        raise ValueError(
            f"context_source {config.context_source!r} is not served in vLLM, where the plug-in passes on the "
            "residual before hc_head: train a drafter with context_source 'pre_hc_head' (any reducer)"
        )
    if config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"hidden_size {config.hidden_size} is not the target's {config.target_hidden_size}: the plug-in has no "
            "code for the two projections of such a drafter; train one of the target's width"
        )
    rope_type = config.rope_parameters.get("rope_type", "default")
    if rope_type != "default" or config.hidden_act != "silu":
        raise ValueError(
            f"rope_type {rope_type!r} with hidden_act {config.hidden_act!r} has not been tested against vLLM's "
            "layers: only 'default' and 'silu' are exported"
        )


def vllm_config(config: HyperDFlashConfig) -> dict:
    """`config.json` of the served folder; raises as `check_servable`."""
    check_servable(config)
    ours = json.loads(config.to_json_string())
    return {
        # Not deepseek_v4, which vLLM would take for the native MTP module
        "model_type": "qwen3",
        "architectures": [ARCHITECTURE],
        "dtype": "bfloat16",
        **{name: ours[name] for name in QWEN3_FIELDS},
        # Older readers look for the base frequency here
        "rope_theta": config.rope_parameters["rope_theta"],
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": "sliding_attention" in config.layer_types,
        "max_window_layers": 0,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            # A count of paths, no choice of layers: it sizes vLLM's buffer (hc_mult at the top level would once more)
            "target_layer_ids": config.target_layer_ids * config.hc_mult,
            # A block attends to all of itself; by default vLLM takes sliding layers for causal ones
            "causal": False,
        },
        NESTED: {name: value for name, value in ours.items() if name not in LIBRARY_FIELDS},
    }


def write_vllm(folder: Path, drafter: HyperDFlashModel) -> None:
    """Write the drafter's configuration, weights (as they are) and a README into an existing folder."""
    config = vllm_config(drafter.config)
    save_file(served_tensors(drafter), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_readme(drafter.config), encoding="utf-8")


def served_tensors(drafter: HyperDFlashModel) -> dict[str, torch.Tensor]:
    """The drafter's tensors under their names in the folder."""
    return {_renamed(name, PREFIXES): tensor.contiguous() for name, tensor in drafter.state_dict().items()}


def read_vllm(folder: str | Path) -> HyperDFlashModel:
    """The drafter that a served folder was made from: the same tensors in fp32, the same configuration.

    Raises `ValueError` for a folder that `write_vllm` did not write or that was edited since, `OSError` when a file is
    missing.
    """
    folder = Path(folder).expanduser()
    stored = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    if not is_served(stored):
        raise ValueError(
            f"{folder} was not written by `hyperdflash export --format vllm`: its config.json has no {NESTED} or "
            f"another architecture than {ARCHITECTURE}"
        )
    config = _nested_config(folder, stored[NESTED])
    stored, expected = _by_field(stored), _by_field(vllm_config(config))
    for name in sorted(stored.keys() | expected.keys()):
        if stored.get(name) != expected.get(name):
            raise ValueError(
                f"{folder / CONFIG_FILE} contradicts itself: {name} is {stored.get(name)!r}, but the drafter in "
                f"{NESTED} has {expected.get(name)!r}. Export the drafter again"
            )
    back = {theirs: ours for ours, theirs in PREFIXES.items()}
    tensors = {_renamed(name, back): tensor.float() for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    drafter = HyperDFlashModel(config)
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS_FILE} does not fit its config: {error}") from error
    return drafter.eval()


def _nested_config(folder: Path, nested: dict) -> HyperDFlashConfig:
    try:
        return HyperDFlashConfig.from_dict(nested)
    except StrictDataclassError as error:
        raise ValueError(f"{folder / CONFIG_FILE}, {NESTED}: {error.__cause__ or error}") from error


def is_served(config: dict) -> bool:
    """Whether a `config.json` belongs to a folder for vLLM."""
    return config.get("architectures") == [ARCHITECTURE] and NESTED in config


def _by_field(config: dict) -> dict:
    """The drafter's own fields one by one."""
    return {**config, NESTED: None, **{f"{NESTED}.{name}": value for name, value in config[NESTED].items()}}


def _renamed(name: str, prefixes: dict[str, str]) -> str:
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
    return prefixes.get(prefix, "") + name.removeprefix(prefix)


def _readme(config: HyperDFlashConfig) -> str:
    target = config.target_name_or_path or "TARGET"
    heads = f"\n{CONFIDENCE_IS_UNUSED}\n" if config.draft_confidence else ""
    return f"""---
license: apache-2.0
tags: [speculative-decoding, deepseek-v4, dflash, hyperdflash, vllm]
---

# HyperDFlash drafter for {target}, as vLLM loads it

Needs the plug-in `hyperdflash-vllm`. The same drafter for transformers is another folder: this one was made from it
with `hyperdflash export DRAFTER OUT --format vllm`.

```
vllm serve {target} --kv-cache-dtype fp8 --block-size 256 --speculative-config '{speculative_config(config)}'
```
{heads}"""


def speculative_config(config: HyperDFlashConfig, folder: str = "THIS_FOLDER") -> str:
    """What `vllm serve --speculative-config` is given, as JSON. The draft's cache dtype is fixed: V4's packed
    one cannot hold its keys and values."""
    return json.dumps(
        {
            "method": "dflash",
            "model": folder,
            "num_speculative_tokens": config.block_size - 1,
            "kv_cache_dtype": "bfloat16",
        }
    )


__all__ = [
    "check_servable",
    "is_served",
    "read_vllm",
    "served_tensors",
    "speculative_config",
    "vllm_config",
    "write_vllm",
]
