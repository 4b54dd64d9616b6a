"""The target's features, computed once: `hyperdflash features RECIPE.yaml`, which `features: offline` trains from.

    hyperdflash features training/recipes/tiny_headline.yaml features_dir=features             # the same again resumes
    hyperdflash features training/recipes/tiny_headline.yaml features_dir=features --verify    # reads all of it
    hyperdflash features recipe.yaml features=server features_server=http://localhost:8000     # vLLM runs the target

`feature_cache.py` describes the folder, `feature_server.py` the server. Here samples share a forward with others of
similar length; which ones depends on the data set alone, so a resumed run repeats the very forwards of an
uninterrupted one.

Legend: B batch, T sequence.
"""

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig

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
from .data import load_recipe_data
from .feature_cache import CachedFeatures, check_space, checksum, size
from .feature_server import FeatureServer
from .init import drafter_config
from .run_folder import starting_weights
from .target import OnlineFeatures, TargetHead

if TYPE_CHECKING:  # costs a second to import
    import datasets

BATCH_TOKENS = 8192  # of one target forward, padding included
WINDOW_BYTES = 512 * 2**20  # of features, whose samples share forwards: 16k tokens of V4-Flash
CONCURRENT = 32  # requests to servers at the same time


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


def open_features(args: HyperDFlashTrainingArguments, config: HyperDFlashConfig) -> CachedFeatures:
    """What a recipe with `features: offline` or `server` trains from; of the target, its head is read.

    Args:
        config: the drafter's, or `read_drafter_config(args)`.

    Raises `ValueError` for features that vLLM does not hand on.
    """
    head = TargetHead.from_checkpoint(TargetCheckpoint(args.target, args.target_revision), args.target_dtype)
    server = None
    if args.features == "server" and args.on_missing == "generate":
        if config.context_source != "pre_hc_head":
            raise ValueError(
                f"context_source {config.context_source!r}: vLLM hands on only the residual before hc_head; use "
                "features: offline, or online"
            )
        if head.embedding.dtype != torch.bfloat16:
            raise ValueError(
                f"the target is {head.embedding.dtype} and vLLM computes in bf16: set target_dtype: bfloat16"
            )
        server = FeatureServer(args.features_server)
    return CachedFeatures(args.features_dir, head, config, server=server, keep=args.keep_features)


def check_features(features: CachedFeatures, splits: "dict[str, datasets.Dataset]", process: int = 0) -> None:
    """That a run over these samples will have all features, before any work.

    Args:
        process: its number, so that not all of them try the same sample.

    Raises `ValueError` for samples without features where no server makes them; `OSError` for a server that cannot be
    reached, or that writes elsewhere, and for a disk that is too small.
    """
    missing = {split: features.missing(rows) for split, rows in splits.items()}
    if features.server is None:
        for split, indices in missing.items():
            if indices:
                raise ValueError(
                    f"{features.folder} lacks the features of {len(indices):,} of {len(splits[split]):,} samples of "
                    f"{split} data, the first of them {splits[split][indices[0]]['source']}: "
                    "`hyperdflash features RECIPE` writes them"
                )
        return
    rows, indices = next(((splits[split], indices) for split, indices in missing.items() if indices), (None, []))
    if indices:
        features.server.check(features.folder)
        if features.keep:
            check_space(features.root, num_bytes(features, splits, missing))
        # The whole way once: the server runs a sample, and its file appears here
        features.load([rows[indices[process % len(indices)]]["input_ids"]])


def num_bytes(features: CachedFeatures, splits: "dict[str, datasets.Dataset]", missing: dict[str, list[int]]) -> int:
    """What the missing samples' features will take."""
    return features.token_bytes * sum(sum(splits[split][i]["length"] for i in missing[split]) for split in splits)


# ----------------------------------------------------------------------------------------------------------- filling


def extract(
    online: OnlineFeatures,
    rows: "datasets.Dataset",
    features: CachedFeatures,
    *,
    batch_tokens: int = BATCH_TOKENS,
    window_bytes: int = WINDOW_BYTES,
) -> None:
    """Run the target over the rows whose features are missing, and store them.

    Args:
        rows (`datasets.Dataset`): with `input_ids`, `length` and `source`.
        batch_tokens: tokens of one forward, padding included; a longer sample is a batch by itself.
        window_bytes: a forward's samples come from a stretch of the data set with so many bytes of features.
    """
    missing, lengths = set(features.missing(rows)), list(rows["length"])
    total, hidden = sum(lengths[i] for i in missing), progress_is_hidden()
    with tqdm(total=total, unit="tok", unit_scale=True, desc="features", disable=hidden) as bar:
        for window in make_windows(lengths, max(1, window_bytes // features.token_bytes)):
            for batch in make_batches(window, lengths, batch_tokens):
                # A batch that was partly done is run whole: its samples' neighbours decide their last bits
                if missing.isdisjoint(batch):
                    continue
                ids = [torch.tensor(row) for row in rows[batch]["input_ids"]]
                output = online({"input_ids": pad_sequence(ids, batch_first=True)})
                for row, index in enumerate(batch):
                    if index not in missing:
                        continue
                    parts = (tensor[row, : len(ids[row])] for tensor in output)  # without the padding
                    try:
                        features.write(ids[row].tolist(), *parts)
                    except ValueError as error:
                        raise ValueError(f"{rows[index]['source']}: {error}") from error
                    bar.update(lengths[index])


def make_windows(lengths: Sequence[int], max_tokens: int) -> list[range]:
    """Consecutive samples, as many as `max_tokens` allow and at least one per window."""
    windows, first, tokens = [], 0, 0
    for index, length in enumerate(lengths):
        if index > first and tokens + length > max_tokens:
            windows.append(range(first, index))
            first, tokens = index, 0
        tokens += length
    return [*windows, range(first, len(lengths))] if lengths else []


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


def ask_server(rows: "datasets.Dataset", features: CachedFeatures) -> None:
    """Have a server write the features of the rows that are missing. Errors name the row."""
    missing = features.missing(rows)

    def ask(index: int) -> int:
        row = rows[index]
        try:
            features.load([row["input_ids"]])
        except ValueError as error:
            raise ValueError(f"{row['source']}: {error}") from error
        return row["length"]

    total, hidden = sum(rows[i]["length"] for i in missing), progress_is_hidden()
    threads = ThreadPoolExecutor(CONCURRENT)
    try:
        with tqdm(total=total, unit="tok", unit_scale=True, desc="features", disable=hidden) as bar:
            for answered in as_completed([threads.submit(ask, index) for index in missing]):
                bar.update(answered.result())
    finally:
        threads.shutdown(cancel_futures=True)


def verify(features: CachedFeatures, rows: "datasets.Dataset") -> None:
    """Read everything: shapes, ids, finiteness and checksums of the files of all rows.

    Raises `ValueError` that names the files that are missing, or not as they were written.
    """
    problems, ids = [], (row["input_ids"] for row in rows)
    for sample in tqdm(ids, total=len(rows), unit="file", desc="verify", disable=progress_is_hidden()):
        path = features.path(sample)
        try:
            stored = features.read(path, sample)
            with safe_open(path, "pt") as file:
                if (file.metadata() or {}).get("crc32") != str(checksum(stored)):
                    raise ValueError(f"{path} is damaged (its content is not what its checksum says)")
        except FileNotFoundError:
            problems.append(f"{path} is missing")
        except ValueError as error:
            # Goes on, so that one pass over the disk names every bad file
            problems.append(str(error))
    if problems:
        raise ValueError(
            f"{len(problems):,} of {len(rows):,} samples have no good features: {'; '.join(problems[:10])}. Remove "
            "damaged files; `hyperdflash features RECIPE` writes what is missing"
        )


# ---------------------------------------------------------------------------------------------------- the command line


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Raises `RecipeError` for a recipe that cannot be run as it is."""
    recipe = load_recipe(args.recipe, args.overrides)
    if not recipe.features_dir:
        raise RecipeError(
            "features_dir, the folder for the features, is missing: add it to the recipe, or features_dir=..."
        )
    if recipe.features == "server" and recipe.on_missing == "error":
        raise RecipeError("on_missing: error has nothing written: leave it out, or on_missing=generate")
    recipe.keep_features = True  # what is asked for here is there to stay
    # First: everything read from here on is of this one commit
    recipe.target, recipe.target_revision = resolve_checkpoint(recipe.target, recipe.target_revision)
    tokenizer = load_tokenizer(recipe.target, recipe.target_revision)
    features = open_features(recipe, read_drafter_config(recipe))
    files = {"train": recipe.train_data, "eval": recipe.eval_data}
    splits = {split: load_recipe_data(recipe, files[split], tokenizer)[0] for split in files if files[split]}
    if args.verify:
        for split, rows in splits.items():
            verify(features, rows)
            print(f"{features.folder}: the features of {len(rows):,} samples of {split} data are as they were written")
    else:
        fill(recipe, features, splits)
    return 0


def fill(
    recipe: HyperDFlashTrainingArguments, features: CachedFeatures, splits: "dict[str, datasets.Dataset]"
) -> None:
    """Write what the folder lacks, after every check that needs no target."""
    missing = {split: features.missing(rows) for split, rows in splits.items()}
    total = num_bytes(features, splits, missing)
    check_space(features.root, total)
    for split, indices in missing.items():
        print(f"{features.folder}: {len(indices):,} of {len(splits[split]):,} samples of {split} data to write")
    # The same command again must not load a target of hundreds of gigabytes for nothing
    if total:
        print(f"{total // features.token_bytes:,} tokens of {size(features.token_bytes)}: {size(total)}")
        if features.server is not None:
            check_features(features, splits)
            for rows in splits.values():
                ask_server(rows, features)
        else:
            # On several devices, a target that none of them holds alone is spread over all
            device_map = "auto" if torch.accelerator.is_available() else None
            target = load_target_model(recipe.target, recipe.target_revision, recipe.target_dtype, device_map)
            features.folder.mkdir(parents=True, exist_ok=True)
            features.sweep()
            for rows in splits.values():
                extract(OnlineFeatures(target, features.config), rows, features)
    print(f"{features.folder} is complete")
