"""The folder that SGLang serves a drafter from: `hyperdflash export DRAFTER OUT --format sglang`.

The folder for vLLM (`vllm_format.py`) with what SGLang's DSPARK reads instead: another architecture, which the plug-in
in `serving/sglang_plugin` brings, and DSpark's own fields and names of the sequential head.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..configuration_hyperdflash import HyperDFlashConfig
from ..modeling_hyperdflash import HyperDFlashModel
from .vllm_format import CONFIG_FILE, NESTED, WEIGHTS_FILE, served_tensors, vllm_config

ARCHITECTURE = "DSparkHyperDraftModel"

# Prefix here -> prefix there, beyond those of the folder for vLLM
HEAD = {
    "markov_head.markov_w1": "markov_head.markov_w1.weight",
    "markov_head.markov_w2": "markov_head.markov_w2.weight",
    "markov_head.gate.": "markov_head.gate_proj.",
}


def sglang_config(config: HyperDFlashConfig) -> dict:
    """`config.json` of the served folder.

    Raises `ValueError` for a drafter that the plug-in cannot run, which is one that the plug-in for vLLM cannot.
    """
    head = config.draft_head == "markov"
    return {
        **vllm_config(config),
        "architectures": [ARCHITECTURE],
        # DSpark counts the drafts, not the anchor
        "block_size": config.block_size - 1,
        # The anchor's row drafts nothing, so that a block has one query more than drafts
        "sample_from_anchor": False,
        # Without it sliding layers would be causal inside the block
        "is_causal": False,
        # DSPARK wants a sequential head: one that adds zero where the drafter has none
        "markov_rank": config.markov_rank if head else 1,
        "markov_head_type": "gated" if head and config.markov_gate else "vanilla",
    }


def write_sglang(folder: Path, drafter: HyperDFlashModel) -> None:
    """Write the drafter's configuration, weights and a README into an existing folder."""
    config = sglang_config(drafter.config)
    tensors = served_tensors(drafter)
    for name in list(tensors):
        if name.startswith("confidence_head."):
            del tensors[name]
        for ours, theirs in HEAD.items():
            if name.startswith(ours):
                tensors[theirs + name.removeprefix(ours)] = tensors.pop(name)
    gate, V, R = "markov_head.gate_proj.weight", drafter.config.vocab_size, config["markov_rank"]
    if gate in tensors:  # SGLang's gate also sees the previous token's embedding: for ours, times zero
        tensors[gate] = torch.cat([tensors[gate], tensors[gate].new_zeros(R, R)], dim=1)
    if drafter.config.draft_head == "none":
        zeros = torch.zeros(V, R, dtype=drafter.dtype)
        tensors |= {"markov_head.markov_w1.weight": zeros, "markov_head.markov_w2.weight": zeros.clone()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_readme(drafter.config), encoding="utf-8")


def is_served(config: dict) -> bool:
    """Whether a `config.json` belongs to a folder for SGLang."""
    return config.get("architectures") == [ARCHITECTURE] and NESTED in config


def _readme(config: HyperDFlashConfig) -> str:
    target = config.target_name_or_path or "TARGET"
    confidence = "\nThe drafter's confidence head is left out: SGLang verifies all drafts.\n"
    return f"""---
license: apache-2.0
tags: [speculative-decoding, deepseek-v4, dspark, hyperdflash, sglang]
---

# HyperDFlash drafter for {target}, as SGLang loads it

Needs the plug-in `hyperdflash-sglang`, which has never run in an engine. The same drafter for transformers is another
folder: this one was made from it with `hyperdflash export DRAFTER OUT --format sglang`.

```
sglang serve --model-path {target} --speculative-algorithm DSPARK --speculative-draft-model-path THIS_FOLDER \\
  --speculative-draft-kv-cache-dtype bfloat16 --max-total-tokens N
```

SGLang does not set the drafter's cache aside: N, the tokens in all caches, has to leave room for
{cache_bytes(config):,} bytes a token, divided by the number of tensor-parallel ranks (by {config.num_key_value_heads}
at most).
{confidence if config.draft_confidence else ""}"""


def cache_bytes(config: HyperDFlashConfig) -> int:
    """Keys and values of one token in bf16, all layers and heads."""
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


__all__ = ["cache_bytes", "is_served", "sglang_config", "write_sglang"]
