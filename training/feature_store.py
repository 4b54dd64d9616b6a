"""A features folder: what `hyperdflash features` writes and a run with `features: offline` reads.

    head.safetensors, head.json       the target's embedding, LM head, final norm and hc_head, with their hash
    train/manifest.json               settings, and samples, size and hash of every shard
    train/shard-00000.safetensors     `context` (tokens, m or 1, L * D), `offsets` (samples + 1), and `residual`
                                      (tokens, m, D) where the context is not the residual itself
    eval/...                          the same for `eval_data`

Samples are those of the data set, in its order. Files are written under a temporary name and renamed, so a file that
exists is complete. Which samples a shard holds depends on their lengths alone, so a run that was killed and started
again ends with the same files.

    .venv/bin/python -m pytest tests/test_features.py

Legend: T tokens of a sample, m residual paths, D hidden, L tapped layers.
"""

import errno
import hashlib
import json
import math
import os
import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers.utils import logging

from ..common.files import write_atomically
from ..configuration_hyperdflash import HyperDFlashConfig
from .target import HEAD_CONFIG_FILE, HEAD_FILE, Features, TargetHead

logger = logging.get_logger(__name__)

FORMAT = "hyperdflash-features-1"
MANIFEST = "manifest.json"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHARD_BYTES = 512 * 2**20  # 16k tokens of V4-Flash; a shard is built in memory and lost when the run is killed
RECORDED_ONLY = ("data_files",)  # not compared: `data` has the hash of what the files hold


# ----------------------------------------------------------------------------------------------------------- manifest


def token_shapes(config: HyperDFlashConfig) -> dict[str, list[int]]:
    """What is stored for one token: name -> shape."""
    m, D = config.hc_mult, config.target_hidden_size
    if config.context_source == "pre_hc_head":
        return {"context": [m, D]}
    return {"context": [1, len(config.target_layer_ids) * D], "residual": [m, D]}


@dataclass
class Manifest:
    """What a split's folder holds. `shards` has one dict for every finished shard, in the order of their samples."""

    settings: dict
    token_shapes: dict
    num_samples: int
    num_tokens: int
    shard_bytes: int
    head_sha256: str | None = None
    shards: list[dict] = field(default_factory=list)
    complete: bool = False
    format: str = FORMAT

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Raises `ValueError` for a file that is not a manifest, `FileNotFoundError` where there is none."""
        try:
            facts = json.loads(path.read_text())
            if facts["format"] != FORMAT:
                raise ValueError(f"format {facts['format']!r} instead of {FORMAT!r}")
            # A field too many or too few is a TypeError: the file is of another version
            return cls(**facts)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"no features in {path.parent}: write them with `hyperdflash features RECIPE`"
            ) from None
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a manifest of features: {error}") from error

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_atomically(path, (json.dumps(asdict(self), indent=1) + "\n").encode())

    @property
    def fingerprint(self) -> str:
        """Of everything that two shards under the same name may differ in; stored in every shard."""
        settings = {name: value for name, value in self.settings.items() if name not in RECORDED_ONLY}
        facts = json.dumps([settings, self.token_shapes, self.shard_bytes, self.head_sha256], sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()

    def check_settings(self, settings: dict, folder: Path) -> None:
        """Raise `ValueError` that names every field in which `settings` differ from the recorded ones."""
        # Through JSON, as the recorded ones went: tuples are lists there
        mine = {**dict.fromkeys(self.settings), **json.loads(json.dumps(settings))}
        there = {**dict.fromkeys(mine), **self.settings}
        fields = [name for name in mine if mine[name] != there[name] and name not in RECORDED_ONLY]
        if not fields:
            return
        # A person cannot read the hash, but the files' names may explain it
        if "data" in fields:
            fields += [name for name in RECORDED_ONLY if mine.get(name) != there.get(name)]
        lines = "; ".join(f"{name} is {there[name]!r} there and {mine[name]!r} here" for name in fields)
        raise ValueError(
            f"the features in {folder} were made with other settings: {lines}. Use the settings of that folder, or "
            "another features_dir"
        )


# ------------------------------------------------------------------------------------------------------------- writer


class FeatureWriter:
    """Writes a split's folder, whatever the features come from: `start`, then `add` every sample of `missing`.

    Samples of a shard come in any order; the shard is written when its last one is there. A shard that the manifest
    has, but that is missing or truncated, is written again.

    Args:
        folder: the features folder; its parent must exist.
        settings (`dict`): what `feature_settings` returns, at least `dtype`.
        config (`HyperDFlashConfig`): the drafter's.
        lengths (`Sequence[int]`): tokens of every sample of the data set.
        split (`str`, *optional*, defaults to `"train"`): the sub-folder.

    Attributes:
        missing (`list[range]`): samples still to add, one range per shard.
        num_missing_tokens, num_bytes (`int`): their tokens, and what they will take, `head_bytes` of it for the head.

    Nothing is written before `start`. Raises `ValueError` for a folder with other settings (the fields are named),
    `OSError` for a path that cannot be written or when the disk is too small.
    """

    def __init__(
        self,
        folder: str | Path,
        settings: dict,
        config: HyperDFlashConfig,
        *,
        lengths: Sequence[int],
        split: str = "train",
        shard_bytes: int = SHARD_BYTES,
    ):
        self.root, self.folder = Path(folder).expanduser(), Path(folder).expanduser() / split
        if settings["dtype"] not in DTYPES:
            raise ValueError(f"dtype of features is one of {', '.join(DTYPES)}; got {settings['dtype']!r}")
        _check_writable(self.root, self.folder)
        self.lengths = list(lengths)
        self.dtype = DTYPES[settings["dtype"]]
        self.manifest = self._manifest(settings, config, shard_bytes)
        self.token_bytes = self.dtype.itemsize * sum(map(math.prod, self.manifest.token_shapes.values()))
        # By the manifest's shard size, not the caller's: shards of an earlier run keep their samples
        self.shards = plan_shards(self.lengths, max(1, self.manifest.shard_bytes // self.token_bytes))
        self._firsts = [samples.start for samples in self.shards]  # for bisection
        self._buffers: dict[int, _ShardBuffer] = {}
        self.missing = self._missing()
        self.num_missing_tokens = sum(self.lengths[i] for samples in self.missing for i in samples)
        # Embedding and LM head, in two bytes a number; all splits share one
        has_head = _stored_head(self.root) is not None
        self.head_bytes = 0 if has_head else 2 * config.vocab_size * config.target_hidden_size * 2
        self.num_bytes = self.token_bytes * self.num_missing_tokens + self.head_bytes
        check_space([self])

    def _manifest(self, settings: dict, config: HyperDFlashConfig, shard_bytes: int) -> Manifest:
        new = Manifest(settings, token_shapes(config), len(self.lengths), sum(self.lengths), shard_bytes)
        if not (self.folder / MANIFEST).exists():
            return new
        manifest = Manifest.read(self.folder / MANIFEST)
        manifest.check_settings(settings, self.folder)
        for name in ("token_shapes", "num_samples", "num_tokens"):
            there, here = getattr(manifest, name), getattr(new, name)
            if there != here:
                raise ValueError(f"{self.folder / MANIFEST}: {name} is {there} there and {here} here")
        return manifest

    def _missing(self) -> list[range]:
        """Shards without a whole file, which the manifest forgets."""
        damaged = dict(_damaged(self.folder, self.manifest))
        for name, problem in damaged.items():
            logger.warning(f"{self.folder / name} is {problem}: writing it again")
        self.manifest.shards = [shard for shard in self.manifest.shards if shard["file"] not in damaged]
        done = {shard["first_sample"] for shard in self.manifest.shards}
        missing = [samples for samples in self.shards if samples.start not in done]
        self.manifest.complete = not missing
        return missing

    @property
    def is_complete(self) -> bool:
        """Whether all shards and the target's head are there."""
        return not self.missing and _stored_head(self.root) == self.manifest.head_sha256

    def estimate(self) -> str:
        """One line: how much will be written, and how much space is free."""
        free = shutil.disk_usage(_existing(self.root)).free
        return (
            f"{self.folder}: {self.num_missing_tokens:,} of {self.manifest.num_tokens:,} tokens to write, "
            f"{_size(self.token_bytes)} each: "
            f"{_size(self.num_bytes)} in {len(self.missing):,} shards; {_size(free)} free"
        )

    def start(self, head: TargetHead) -> None:
        """Make the folder and store the target's head in it, once.

        Raises `ValueError` when the folder's features come from another head under the same name.
        """
        sha256 = head.sha256
        # The manifest and the head's own file can disagree after a kill between the two writes
        stored = [self.manifest.head_sha256, _stored_head(self.root)]
        for other in stored:
            if other not in (None, sha256):
                raise ValueError(
                    f"head: {self.root} holds features of a target whose embedding, LM head, norm or hc_head differ "
                    f"(hash {other[:12]}) from this target's ({sha256[:12]}): use another features_dir"
                )
        # Before any shard: the hash is part of the fingerprint that each of them carries
        self.manifest.head_sha256 = sha256
        self.root.mkdir(exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        self.manifest.write(self.folder / MANIFEST)
        if stored[1] is None:
            head.save(self.root)

    def add(self, index: int, context: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Take one sample's features, `(T, m or 1, L * D)` and `(T, m, D)`, on any device and in any dtype.

        Raises `ValueError` for a shape that is not the sample's, and for features that are not finite; `OSError` when
        the shard that it completes cannot be written.
        """
        tensors = {"context": context, "residual": residual}
        # The last shard that starts at or before the sample
        shard = bisect_right(self._firsts, index) - 1
        if shard not in self._buffers:
            self._buffers[shard] = _ShardBuffer(
                self.shards[shard], self.lengths, self.manifest.token_shapes, self.dtype
            )
        buffer = self._buffers[shard]
        buffer.add(index, tensors)
        if not buffer.waiting:
            del self._buffers[shard]
            self._write(shard, buffer)

    def _write(self, index: int, buffer: "_ShardBuffer") -> None:
        # One key only: safetensors does not write several in a fixed order
        content = save(buffer.tensors, {"shard": self.shard_mark(index)})
        write_atomically(self.folder / self.shard_name(index), content)
        self.enter(self.record(index, len(content), hashlib.sha256(content).hexdigest()))

    def shard_name(self, index: int) -> str:
        """The file of a shard."""
        return f"shard-{index:05d}.safetensors"

    def shard_mark(self, index: int) -> str:
        """What a shard's file records about itself: its settings and its place."""
        return _shard_mark(self.manifest, self.shards[index].start)

    def record(self, index: int, num_bytes: int, sha256: str) -> dict:
        """The manifest's entry of a shard whose file is there."""
        samples = self.shards[index]
        return {
            "file": self.shard_name(index),
            "first_sample": samples.start,
            "num_samples": len(samples),
            "num_tokens": sum(self.lengths[i] for i in samples),
            "num_bytes": num_bytes,
            "sha256": sha256,
        }

    def enter(self, record: dict) -> None:
        """Add a shard to the manifest."""
        # Written after its file: a shard that the manifest has is always there
        self.manifest.shards = sorted([*self.manifest.shards, record], key=lambda shard: shard["first_sample"])
        self.manifest.complete = len(self.manifest.shards) == len(self.shards)
        self.missing = [samples for samples in self.missing if samples.start != record["first_sample"]]
        self.manifest.write(self.folder / MANIFEST)


class _ShardBuffer:
    """A shard in memory, filled sample by sample."""

    def __init__(self, samples: range, lengths: list[int], shapes: dict, dtype: torch.dtype):
        self.first, self.waiting = samples.start, set(samples)
        self.offsets = torch.tensor([0, *(lengths[i] for i in samples)]).cumsum(0)  # (samples + 1,), in tokens
        self.shapes = shapes
        self.tensors = {
            name: torch.empty(int(self.offsets[-1]), *shape, dtype=dtype) for name, shape in shapes.items()
        }
        self.tensors["offsets"] = self.offsets

    def add(self, index: int, tensors: dict) -> None:
        start, stop = self.offsets[index - self.first : index - self.first + 2].tolist()
        if index not in self.waiting:
            raise ValueError(f"sample {index} was added before")
        for name, shape in self.shapes.items():
            if tensors[name] is None or list(tensors[name].shape) != [stop - start, *shape]:
                got = None if tensors[name] is None else tuple(tensors[name].shape)
                raise ValueError(f"sample {index}: {name} must be of shape {(stop - start, *shape)}; got {got}")
            # Checked after the cast, in which a large value can become infinite
            part = self.tensors[name][start:stop].copy_(tensors[name])
            if not is_finite(part):
                raise ValueError(
                    f"sample {index}: the target's {name} holds NaN or infinite values; nothing is stored"
                )
        # Last, so that a sample that was refused can be added again
        self.waiting.remove(index)


def plan_shards(lengths: Sequence[int], max_tokens: int) -> list[range]:
    """Consecutive samples, as many as `max_tokens` allow and at least one per shard."""
    shards, first, tokens = [], 0, 0
    for index, length in enumerate(lengths):
        # A sample longer than `max_tokens` is a shard by itself
        if index > first and tokens + length > max_tokens:
            shards.append(range(first, index))
            first, tokens = index, 0
        tokens += length
    return [*shards, range(first, len(lengths))] if lengths else []


def is_finite(x: torch.Tensor) -> bool:
    """Whether all values are; in one pass and without temporaries, 40 times faster than `isfinite().all()` in bf16."""
    # One NaN makes both bounds NaN
    return all(math.isfinite(bound) for bound in torch.aminmax(x))


def check_space(writers: Sequence[FeatureWriter]) -> None:
    """Raises `OSError` where what the splits of a folder still have to write does not fit on its disk."""
    num_bytes = sum(writer.num_bytes - writer.head_bytes for writer in writers) + writers[0].head_bytes
    # The folder may not exist yet: its nearest existing parent is on the same disk
    if num_bytes > shutil.disk_usage(_existing(writers[0].root)).free:
        estimates = "; ".join(writer.estimate() for writer in writers)
        raise OSError(
            errno.ENOSPC,
            f"the features do not fit. {estimates}. Use a larger disk for features_dir, fewer rows, a smaller "
            "max_length, or `features: online`, which needs no disk",
        )


def _check_writable(root: Path, folder: Path) -> None:
    if not root.parent.is_dir():
        raise FileNotFoundError(f"features_dir {root}: {root.parent} is not a folder; make it first")
    for path in (root, folder):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"features_dir {root}: {path} is not a folder")
    if not os.access(_existing(folder), os.W_OK | os.X_OK):
        raise PermissionError(f"features_dir {root}: {_existing(folder)} is not writable")
    if folder.exists() and not (folder / MANIFEST).exists():
        # A writer killed before its first manifest leaves nothing but a .partial
        foreign = [path.name for path in folder.iterdir() if not path.name.endswith(".partial")]
        if foreign:
            raise FileExistsError(f"{folder} holds {foreign[0]} but no {MANIFEST}: use another features_dir")


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())


def _stored_head(root: Path) -> str | None:
    """The hash of the head that a features folder holds, None where it holds none."""
    path = root / HEAD_CONFIG_FILE
    if not (path.exists() and (root / HEAD_FILE).exists()):
        return None
    try:
        return json.loads(path.read_text())["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not record the hash of a target's head: {error}") from error


def _size(num_bytes: float) -> str:
    exponent = min(4, int(math.log(num_bytes, 1024))) if num_bytes >= 1 else 0
    return f"{num_bytes / 1024**exponent:.{1 if exponent else 0}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"


# ------------------------------------------------------------------------------------------------------------- reader


class OfflineFeatures:
    """Features from a folder that `FeatureWriter` completed; used like `OnlineFeatures`, without a target.

    `features[i]` reads one sample, `features(batch)` makes a batch's. It holds no open file, so that it can be handed
    to DataLoader workers, forked or spawned.

    Args:
        folder: the features folder.
        settings (`dict`): `feature_settings` of this run; must be those the folder was written with.
        split (`str`, *optional*, defaults to `"train"`): `"train"` or `"eval"`.

    Raises `FileNotFoundError` where there are no features; `ValueError` for other settings, an incomplete folder, and
    missing or truncated shards, by name.
    """

    def __init__(self, folder: str | Path, settings: dict, split: str = "train"):
        self.root, self.folder = Path(folder).expanduser(), Path(folder).expanduser() / split
        self.manifest = Manifest.read(self.folder / MANIFEST)
        self.manifest.check_settings(settings, self.folder)
        # By size alone, so that a run starts at once; `--verify` reads the content
        damaged = [f"{name} ({problem})" for name, problem in _damaged(self.folder, self.manifest)]
        if damaged:
            raise ValueError(
                f"{self.folder} lacks {', '.join(damaged[:5])}: run `hyperdflash features RECIPE` to write what is "
                "missing"
            )
        if not self.manifest.complete:
            raise ValueError(
                f"{self.folder} is not complete ({len(self.manifest.shards)} shards so far): `hyperdflash features "
                "RECIPE` resumes where it stopped"
            )
        if _stored_head(self.root) != self.manifest.head_sha256:
            raise ValueError(
                f"{self.root} lacks the target's head that {self.folder} was written with: `hyperdflash features "
                "RECIPE` writes it"
            )
        self._firsts = [shard["first_sample"] for shard in self.manifest.shards]
        self._head: TargetHead | None = None

    @property
    def head(self) -> TargetHead:
        """The target's embedding, LM head, norm and hc_head, read at the first use and compared with their hash."""
        if self._head is None:
            self._head = TargetHead.load(self.root)
        return self._head

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_head": None}  # gigabytes that a worker does not use

    def __len__(self) -> int:
        return self.manifest.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """`context` `(T, m or 1, L * D)` and, where it is another tensor, `residual` `(T, m, D)`, as stored.

        Raises `ValueError` that names shard and sample for NaN or infinite values, `IndexError` outside the data set.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        shard = self.manifest.shards[bisect_right(self._firsts, index) - 1]
        with open_shard(self.folder, shard, self.manifest) as file:
            row = index - shard["first_sample"]
            start, stop = file.get_slice("offsets")[row : row + 2].tolist()  # in tokens of the shard
            views = {name: file.get_slice(name)[start:stop] for name in self.manifest.token_shapes}
            for name, view in views.items():
                if not is_finite(view):
                    raise ValueError(f"{self.folder / shard['file']}: {name} of sample {index} is not finite")
            # Copies: a view's storage is the whole mapped shard, all of which would go from a worker to its parent
            return {name: view.clone() for name, view in views.items()}

    def __call__(self, batch: dict) -> Features:
        """Features of a batch whose `context` (and `residual`) a `SampleDataset` read in its DataLoader's workers.

        They come on the device of `input_ids` and in the target's dtype, `(B, T, m or 1, L * D)` and `(B, T, m, D)`.
        """
        if "context" not in batch:
            raise ValueError("the batch has no stored features: pass features= to its SampleDataset")
        like = {"device": batch["input_ids"].device, "dtype": self.head.embedding.dtype}
        context = batch["context"].to(**like)
        return Features(context, batch["residual"].to(**like) if "residual" in batch else context)


def _damaged(folder: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Names of missing and truncated shards, with what is wrong."""
    for shard in manifest.shards:
        path = folder / shard["file"]
        if not path.is_file():
            yield shard["file"], "missing"
        elif path.stat().st_size != shard["num_bytes"]:
            yield shard["file"], f"truncated: {path.stat().st_size:,} bytes instead of {shard['num_bytes']:,}"


def _shard_mark(manifest: Manifest, first_sample: int) -> str:
    return f"{manifest.fingerprint} {first_sample}"


@contextmanager
def open_shard(folder: Path, shard: dict, manifest: Manifest) -> Iterator[safe_open]:
    """The shard as `safe_open` gives it; `ValueError` for one that cannot be read, or is of another run or place."""
    path = folder / shard["file"]
    try:
        with safe_open(path, "pt") as file:
            # A file of the right name and size may come from a folder with other settings
            if (file.metadata() or {}).get("shard") != _shard_mark(manifest, shard["first_sample"]):
                raise ValueError(f"{path} is not the shard that {MANIFEST} says: it comes from other features")
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
