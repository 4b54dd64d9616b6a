"""Features whose forwards run in vLLM: `hyperdflash features RECIPE --vllm`, before and after.

The first call stores the target's head, read from the checkpoint without loading the model, and writes a plan of the
missing shards: their files and marks, and the token ids of their samples. `python -m hyperdflash_vllm.features` in
vLLM's environment writes the shards. The second call checks each and adds it to the manifest; what is still
missing is planned again.

    .venv/bin/python -m pytest tests/test_vllm_features.py
"""

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..common.checkpoint import TargetCheckpoint
from ..common.files import write_atomically
from ..configuration_hyperdflash import HyperDFlashConfig
from ..pairing_hyperdflash import target_fingerprint
from .feature_store import FeatureWriter, is_finite, open_shard
from .target import TargetHead

if TYPE_CHECKING:  # costs a second to import
    import datasets

PLAN, FORMAT = "vllm-plan.jsonl", "hyperdflash-vllm-plan-1"  # as in hyperdflash_vllm/features.py


def read_head(checkpoint: TargetCheckpoint, dtype: str = "auto") -> TargetHead:
    """The target's embedding, LM head, norm and hc_head as `load_target` would give them, and nothing else."""
    config = checkpoint.config
    m, V, D = config.hc_mult, config.vocab_size, config.hidden_size
    shapes = {
        "embed_tokens.weight": ("embed.weight", (V, D)),
        "norm.weight": ("norm.weight", (D,)),
        "hc_head.hc_fn": ("hc_head_fn", (m, m * D)),
        "hc_head.hc_base": ("hc_head_base", (m,)),
        "hc_head.hc_scale": ("hc_head_scale", (1,)),
        "lm_head.weight": ("head.weight", (V, D)),
    }
    if config.tie_word_embeddings:  # stored once, as the embedding
        del shapes["lm_head.weight"]
    tensors = {name: checkpoint.read(stored, shape) for name, (stored, shape) in shapes.items()}
    if dtype != "auto":
        # transformers keeps hc_head in fp32 whatever the dtype
        tensors = {n: t if n.startswith("hc_head.") else t.to(getattr(torch, dtype)) for n, t in tensors.items()}
    return TargetHead(config, tensors)


def check_source(config: HyperDFlashConfig) -> None:
    """Raises `ValueError` for features that vLLM's buffer does not hold."""
    if config.context_source != "pre_hc_head":
        raise ValueError(
            f"context_source {config.context_source!r}: vLLM passes on only the residual before hc_head; leave out "
            "--vllm"
        )


def write_plan(writer: FeatureWriter, rows: "datasets.Dataset", head: TargetHead, target: str) -> Path:
    """Write down what vLLM is to compute, and return the file; `writer.start` was called.

    Args:
        rows (`datasets.Dataset`): with `input_ids`, the ones whose lengths the writer has.
        target: its name, for messages.
    """
    config = head.config
    facts = {
        "format": FORMAT,
        "vocab_size": config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "hc_mult": config.hc_mult,
        "target_num_hidden_layers": config.num_hidden_layers,
        "target_name_or_path": target,
        "target_fingerprint": target_fingerprint(head.identity()),
    }
    lines = [facts]
    for samples in writer.missing:
        index = writer.shards.index(samples)
        ids = rows[samples.start : samples.stop]["input_ids"]
        # vLLM's side copies the mark into the file: `open_shard` refuses one without it
        lines.append({"file": writer.shard_name(index), "mark": writer.shard_mark(index), "input_ids": ids})
    file = writer.folder / PLAN
    write_atomically(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return file


def adopt_shards(writer: FeatureWriter) -> int:
    """Add the shards that vLLM wrote to the manifest; returns how many. `writer.start` was called.

    Raises `ValueError` naming a shard that is not the planned one; those before it are added.
    """
    adopted = 0
    for samples in list(writer.missing):
        index = writer.shards.index(samples)
        path = writer.folder / writer.shard_name(index)
        if not path.exists():
            continue
        with path.open("rb") as file:
            # vLLM's side records no hash: from here on the manifest vouches for what is there now
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        record = writer.record(index, path.stat().st_size, digest)
        try:
            _check_shard(writer, record, samples)
        except ValueError as error:
            raise ValueError(f"{error}. Remove it, and vLLM writes it again") from error
        writer.enter(record)
        adopted += 1
    return adopted


def _check_shard(writer: FeatureWriter, record: dict, samples: range) -> None:
    path = writer.folder / record["file"]
    with open_shard(writer.folder, record, writer.manifest) as file:
        want = torch.tensor([0, *(writer.lengths[i] for i in samples)]).cumsum(0).tolist()  # samples + 1, in tokens
        shape = [want[-1], *writer.manifest.token_shapes["context"]]
        context = file.get_slice("context")
        if file.get_tensor("offsets").tolist() != want or context.get_shape() != shape:
            raise ValueError(f"{path} does not hold the {len(samples)} samples that were planned")
        if context.get_dtype() != "BF16":
            raise ValueError(f"{path} holds {context.get_dtype()} instead of BF16")
        # Sample by sample: a shard has half a gigabyte
        for start, stop in zip(want[:-1], want[1:], strict=True):
            if not is_finite(context[start:stop]):
                raise ValueError(f"{path} holds NaN or infinite values")
