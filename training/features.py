"""The target's features, computed once: `hyperdflash features RECIPE.yaml`, which `features: offline` trains from.

    hyperdflash features training/recipes/tiny_headline.yaml features_dir=features             # the same again resumes
    hyperdflash features training/recipes/tiny_headline.yaml features_dir=features --verify    # reads all of it
    hyperdflash features recipe.yaml --vllm                     # vLLM runs the target: see vllm_features.py

`feature_store.py` describes the folder. Samples share a forward with others of their shard and of similar
length, so a resumed run repeats the very forwards of an uninterrupted one.

Legend: B batch, T sequence.
"""

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedTokenizerBase

from ..common.checkpoint import (
    TargetCheckpoint,
    load_target_model,
    load_tokenizer,
    recorded_name,
    resolve_checkpoint,
)
from ..common.console import progress_is_hidden
from ..configuration_hyperdflash import HyperDFlashConfig
from .arguments import HyperDFlashTrainingArguments, RecipeError, load_recipe
from .data import hash_data, hash_tokenizer, load_recipe_data
from .feature_store import FeatureWriter, OfflineFeatures, check_space, open_shard
from .init import drafter_config
from .run_folder import starting_weights
from .target import OnlineFeatures
from .vllm_features import adopt_shards, check_source, read_head, write_plan

if TYPE_CHECKING:  # costs a second to import
    import datasets

BATCH_TOKENS = 8192  # of one target forward, padding included


def feature_settings(
    args: HyperDFlashTrainingArguments,
    rows: "datasets.Dataset",
    tokenizer: PreTrainedTokenizerBase,
    config: HyperDFlashConfig,
    split: str = "train",
) -> dict:
    """Everything the features of a run depend on, as the flat dict that a features folder records.

    Args:
        rows (`datasets.Dataset`): the split's.
        config: the drafter's, or `read_drafter_config(args)`.
        split (`str`, *optional*, defaults to `"train"`): `"train"` or `"eval"`.
    """
    # A folder by its full path: the settings must not depend on where the command runs
    folder = Path(args.target).expanduser()
    return {
        "target": str(folder.resolve()) if folder.is_dir() else args.target,
        "target_revision": args.target_revision,  # a commit: a branch would move
        "target_dtype": args.target_dtype,
        "tokenizer": hash_tokenizer(tokenizer),
        **{name: getattr(args, name) for name in ("mode", "effort", "generation", "max_length")},
        "dtype": "bfloat16",  # what V4 computes in; fp32 would take twice the disk
        "context_source": config.context_source,
        "target_layer_ids": list(config.target_layer_ids),
        "data": hash_data(rows),
        "data_files": list(args.train_data if split == "train" else args.eval_data),
    }


def read_drafter_config(
    args: HyperDFlashTrainingArguments, init_from: tuple[str, str | None] | None = None
) -> HyperDFlashConfig:
    """The configuration of the run's drafter, which decides what is read from the target; no weights are opened.

    Args:
        init_from: what `resolve_checkpoint` made of `args.init_from`, where that is done already.

    Raises `ValueError` for `drafter` options that contradict each other or the target.
    """
    if args.init_from:
        name, revision = init_from or resolve_checkpoint(starting_weights(args.init_from))
        config = HyperDFlashConfig.from_pretrained(name, revision=revision)
    else:
        target = AutoConfig.from_pretrained(args.target, revision=args.target_revision)
        if target.model_type != "deepseek_v4":
            raise ValueError(f"{args.target} is a {target.model_type} model; HyperDFlash drafts for deepseek_v4")
        # The seed decides weights, not what is read from the target
        config = drafter_config(target, **{name: value for name, value in args.drafter.items() if name != "seed"})
    config.target_name_or_path, config.target_revision = recorded_name(args.target, args.target_revision)
    return config


def extract(
    features: OnlineFeatures, rows: "datasets.Dataset", writer: FeatureWriter, *, batch_tokens: int = BATCH_TOKENS
) -> None:
    """Run the target over the rows that the writer misses; `writer.start` was called.

    Args:
        rows (`datasets.Dataset`): with `input_ids`, the ones whose lengths the writer has.
        batch_tokens: tokens of one forward, padding included; a longer sample is a batch by itself.
    """
    desc, hidden = f"features {writer.folder.name}", progress_is_hidden()
    with tqdm(total=writer.num_missing_tokens, unit="tok", unit_scale=True, desc=desc, disable=hidden) as bar:
        for samples in writer.missing:
            for batch in make_batches(samples, writer.lengths, batch_tokens):
                ids = [torch.tensor(row) for row in rows[batch]["input_ids"]]
                output = features({"input_ids": pad_sequence(ids, batch_first=True)})
                for row, index in enumerate(batch):
                    stop = len(ids[row])  # without the padding
                    try:
                        writer.add(index, output.context_hidden_states[row, :stop], output.residual[row, :stop])
                    except ValueError as error:
                        # The writer knows samples by number only, the user by file and line
                        raise ValueError(f"{rows[index]['source']}: {error}") from error
                bar.update(sum(map(len, ids)))


def make_batches(samples: range, lengths: list[int], batch_tokens: int) -> Iterator[list[int]]:
    """The samples in batches of similar length, of at most `batch_tokens` with their padding."""
    batch: list[int] = []
    # Shortest first: the next sample is the longest of its batch, and its length decides the padding
    for index in sorted(samples, key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def verify(features: OfflineFeatures) -> None:
    """Read everything: hashes, shapes and finiteness of all shards, and the head.

    Raises `ValueError` that names every shard that is not as it was written.
    """
    manifest, problems = features.manifest, []
    total = sum(shard["num_bytes"] for shard in manifest.shards)
    with tqdm(
        total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="verify", disable=progress_is_hidden()
    ) as bar:
        for shard in manifest.shards:
            try:
                _verify_shard(features, shard)
            except ValueError as error:
                # Goes on, so that one pass over the disk names every bad shard
                problems.append(str(error))
            bar.update(shard["num_bytes"])
    if problems:
        raise ValueError(
            f"{len(problems)} of {len(manifest.shards)} shards were changed: {'; '.join(problems[:10])}. Remove "
            "them, and `hyperdflash features RECIPE` writes them again"
        )
    # Reading it compares its hash
    _ = features.head


def _verify_shard(features: OfflineFeatures, shard: dict) -> None:
    path, shapes = features.folder / shard["file"], features.manifest.token_shapes
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != shard["sha256"]:
            raise ValueError(f"{path}: its content is not what its hash says")
    # The hash says that the file is the one written, not that its writer (vLLM's, for one) was right
    with open_shard(features.folder, shard, features.manifest) as file:
        offsets = file.get_tensor("offsets").tolist()
        if (
            len(offsets) != shard["num_samples"] + 1
            or offsets != sorted(offsets)
            or offsets[-1] != shard["num_tokens"]
        ):
            raise ValueError(f"{path}: its offsets are not those of {shard['num_samples']} samples")
        for name, shape in shapes.items():
            if file.get_slice(name).get_shape() != [offsets[-1], *shape]:
                raise ValueError(f"{path}: {name} has shape {file.get_slice(name).get_shape()}")
    # Reading a sample checks that its values are finite
    for index in range(shard["first_sample"], shard["first_sample"] + shard["num_samples"]):
        _ = features[index]


# ---------------------------------------------------------------------------------------------------- the command line


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Raises `RecipeError` for a recipe that cannot be run as it is."""
    recipe = load_recipe(args.recipe, args.overrides)
    if not recipe.features_dir:
        raise RecipeError(
            "features_dir, the folder for the features, is missing: add it to the recipe, or features_dir=..."
        )
    # First: everything read from here on, and the recorded settings, are of this one commit
    recipe.target, recipe.target_revision = resolve_checkpoint(recipe.target, recipe.target_revision)
    tokenizer = load_tokenizer(recipe.target, recipe.target_revision)
    config, splits = read_drafter_config(recipe), {}
    for split, files in (("train", recipe.train_data), ("eval", recipe.eval_data)):
        if files:
            rows, _ = load_recipe_data(recipe, files, tokenizer)
            splits[split] = rows, feature_settings(recipe, rows, tokenizer, config, split)
    if args.verify:
        _verify_all(recipe, splits)
    elif args.vllm:
        _plan_all(recipe, config, splits)
    else:
        _write_all(recipe, config, splits)
    return 0


def _make_writers(
    recipe: HyperDFlashTrainingArguments, config: HyperDFlashConfig, splits: dict
) -> dict[str, FeatureWriter]:
    """A writer for each split. Raises `OSError` where they do not fit on the disk together."""
    writers = {
        split: FeatureWriter(recipe.features_dir, settings, config, lengths=rows["length"], split=split)
        for split, (rows, settings) in splits.items()
    }
    check_space([*writers.values()])
    return writers


def _write_all(recipe: HyperDFlashTrainingArguments, config: HyperDFlashConfig, splits: dict) -> None:
    folder = recipe.features_dir
    # For every split before the target is loaded, so that a refusal comes in seconds
    writers = _make_writers(recipe, config, splits)
    for writer in writers.values():
        print(writer.estimate())
    # The same command again must not load a target of hundreds of gigabytes for nothing
    if not all(writer.is_complete for writer in writers.values()):
        # On several devices, a target that none of them holds alone is spread over all
        device_map = "auto" if torch.accelerator.is_available() else None
        target = load_target_model(recipe.target, recipe.target_revision, recipe.target_dtype, device_map)
        features = OnlineFeatures(target, config)
        for split, writer in writers.items():
            writer.start(features.head)
            extract(features, splits[split][0], writer)
    print(f"{folder} is complete")


def _plan_all(recipe: HyperDFlashTrainingArguments, config: HyperDFlashConfig, splits: dict) -> None:
    check_source(config)
    checkpoint = TargetCheckpoint(recipe.target, recipe.target_revision)
    folder, head, missing = recipe.features_dir, read_head(checkpoint, recipe.target_dtype), 0
    for split, writer in _make_writers(recipe, config, splits).items():
        writer.start(head)
        # What vLLM wrote since the last call comes before the plan, which has only the rest
        adopted = adopt_shards(writer)
        file = write_plan(writer, splits[split][0], head, checkpoint.name)
        print(f"{file}: {adopted} shards added, {len(writer.missing)} of {len(writer.shards)} still to write")
        missing += len(writer.missing)
    if missing:
        print(f"In vLLM's environment: python -m hyperdflash_vllm.features {folder} --model {recipe.target}")
    else:
        print(f"{folder} is complete")


def _verify_all(recipe: HyperDFlashTrainingArguments, splits: dict) -> None:
    for split, (_, settings) in splits.items():
        features = OfflineFeatures(recipe.features_dir, settings, split)
        verify(features)
        print(f"{features.folder}: {len(features.manifest.shards):,} shards are unchanged")
