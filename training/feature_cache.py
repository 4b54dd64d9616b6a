"""The target's features in a folder: one file per sample, named by the target's head and the sample's token ids.

    FOLDER/TARGET/PROMPT.safetensors     `context` (T, m or 1, L * D) and, where the context is not the residual,
                                         `residual` (T, m, D), in bf16; `input_ids` (T,); the metadata has a `crc32`

TARGET and PROMPT are hashes of contents, so a folder serves any data set, order, subset or stage, wherever target and
folder lie. `hyperdflash features` fills it, and so does a vLLM server with the plug-in (`hyperdflash_vllm/capture.py`
has the same names). Files are renamed when they are complete: any number of processes may write at the same time, and
a kill loses only what was being written.

    .venv/bin/python -m pytest tests/test_features.py

Legend: T tokens of a sample, m residual paths, D hidden, L tapped layers.
"""

import errno
import hashlib
import math
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..common.files import write_atomically
from ..configuration_hyperdflash import HyperDFlashConfig
from .feature_server import TRIES, FeatureServer
from .target import Features, TargetHead

if TYPE_CHECKING:  # costs a second to import
    import datasets

HASHED = ("hc_head_base", "hc_head_fn", "hc_head_scale", "norm.weight")
STALE = 3600  # seconds after which a temporary file is one of a killed process


# -------------------------------------------------------------------------------------------------------------- names


def target_name(head: TargetHead, config: HyperDFlashConfig) -> str:
    """The sub-folder of a target's features: a hash of hc_head and final norm, with what else decides their values.

    Targets that differ in their layers alone have the same name: give each a folder of its own.
    """
    tensors, digest = head.identity(), hashlib.sha256()
    for name in HASHED:
        # The norm in bf16, as vLLM holds it; hc_head is fp32 everywhere
        tensor = tensors[name].bfloat16() if name == "norm.weight" else tensors[name]
        digest.update(tensor.float().cpu().contiguous().numpy().astype("<f4").tobytes())
    name = digest.hexdigest()[:16]
    if config.context_source != "pre_hc_head":
        name += "-layers-" + "-".join(map(str, config.target_layer_ids))
    dtype = str(head.embedding.dtype).removeprefix("torch.")
    return name if dtype == "bfloat16" else f"{name}-{dtype}"  # what the target computes in


def prompt_name(input_ids: Sequence[int]) -> str:
    """Of a sample, by its token ids."""
    return hashlib.sha256(np.asarray(input_ids, "<i4").tobytes()).hexdigest()[:32]


def prompt_names(rows: "datasets.Dataset") -> list[str]:
    """Of all samples of a data set, in their order."""
    names = []
    for table in rows.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=1000):
        names += [prompt_name(ids.values.to_numpy()) for ids in table["input_ids"]]
    return names


def token_shapes(config: HyperDFlashConfig) -> dict[str, list[int]]:
    """What is stored for one token: name -> shape."""
    m, D = config.hc_mult, config.target_hidden_size
    if config.context_source == "pre_hc_head":
        return {"context": [m, D]}
    return {"context": [1, len(config.target_layer_ids) * D], "residual": [m, D]}


# -------------------------------------------------------------------------------------------------------------- cache


class CachedFeatures:
    """Features from a folder, and from a vLLM server where the folder lacks them; used like `OnlineFeatures`, without
    a target.

    `SampleDataset` calls `load` in the DataLoader's workers, `features(batch)` makes a batch's. It holds no open file
    and no head when it is pickled, so that it can be handed to workers, forked or spawned.

    Args:
        folder: the features folder (`features_dir`).
        head (`TargetHead`): the target's, which names the sub-folder.
        config (`HyperDFlashConfig`): the drafter's.
        server (`FeatureServer`, *optional*): asked for samples that the folder lacks.
        keep (`bool`, *optional*, defaults to `True`): whether what was asked for stays in the folder.

    Raises `NotADirectoryError` for a folder that is a file.
    """

    def __init__(
        self,
        folder: str | Path,
        head: TargetHead,
        config: HyperDFlashConfig,
        *,
        server: FeatureServer | None = None,
        keep: bool = True,
    ):
        self.root = Path(folder).expanduser()
        if self.root.exists() and not self.root.is_dir():
            raise NotADirectoryError(f"features_dir {self.root} is not a folder")
        self.folder = self.root / target_name(head, config)
        self.head, self.config, self.server, self.keep = head, config, server, keep
        self.shapes = token_shapes(config)
        self.token_bytes = 2 * sum(map(math.prod, self.shapes.values()))

    def __getstate__(self) -> dict:
        return {**self.__dict__, "head": None}  # gigabytes that a worker does not use

    def path(self, input_ids: Sequence[int]) -> Path:
        """The file of a sample, whether it exists or not."""
        return self.folder / f"{prompt_name(input_ids)}.safetensors"

    # ------------------------------------------------------------------------------------------------------- reading

    def load(self, samples: list[list[int]]) -> list[dict[str, torch.Tensor]]:
        """Of each sample's ids: `context` `(T, m or 1, L * D)` and, where it is another tensor, `residual`.

        Raises `ValueError` for a file that is missing or damaged, by name, and what the server refuses; `OSError`
        where no server answers.
        """
        if self.server is None:
            return [self._load(ids) for ids in samples]
        # Together, so that the server runs them in one forward; equal ones once
        different = {tuple(ids): ids for ids in samples}
        with ThreadPoolExecutor(len(different) or 1) as threads:
            loaded = dict(zip(different, threads.map(self._load, different.values()), strict=True))
        return [loaded[tuple(ids)] for ids in samples]

    def _load(self, input_ids: list[int]) -> dict[str, torch.Tensor]:
        path, was_asked = self.path(input_ids), False
        for _ in range(TRIES):
            try:
                sample = self.read(path, input_ids)
            except FileNotFoundError:
                if self.server is None:
                    raise ValueError(
                        f"{path} is missing: `hyperdflash features RECIPE` writes what {self.root} lacks"
                    ) from None
                # Again where another process, which asked for it too, was the first to read and remove it
                self.server.write(input_ids, path)
                was_asked = True
                continue
            if was_asked and not self.keep:
                path.unlink(missing_ok=True)
            return sample
        raise ValueError(f"{path} vanished {TRIES} times after {self.server} had written it")

    def read(self, path: Path, input_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """One file's features. Raises `FileNotFoundError`, and `ValueError` for one that is not the sample's."""
        try:
            with safe_open(path, "pt") as file:
                stored = {name: file.get_slice(name) for name in self.shapes}
                for name, part in stored.items():
                    shape, expected = part.get_shape(), [len(input_ids), *self.shapes[name]]
                    if shape != expected or part.get_dtype() != "BF16":
                        raise ValueError(
                            f"{name} is {part.get_dtype()} of shape {shape} instead of BF16 of {expected}"
                        )
                if file.get_tensor("input_ids").tolist() != list(input_ids):
                    raise ValueError("it has the ids of another sample")
                # Copies: a view's storage is the mapped file, which may be gone, or change, while it is used
                sample = {name: file.get_tensor(name).clone() for name in stored}
            if broken := [name for name, tensor in sample.items() if not is_finite(tensor)]:
                raise ValueError(f"{broken[0]} is not finite")
        except (SafetensorError, ValueError) as error:
            raise ValueError(f"{path} is damaged ({error}): remove it, and it is written again") from error
        return sample

    def filler(self) -> dict[str, torch.Tensor]:
        """Features of one token that is none, with the shapes and dtypes of all others."""
        return {name: torch.zeros(1, *shape, dtype=torch.bfloat16) for name, shape in self.shapes.items()}

    def __call__(self, batch: dict) -> Features:
        """Features of a batch whose `context` (and `residual`) a `SampleDataset` read in its DataLoader's workers.

        They come on the device of `input_ids` and in the target's dtype, `(B, T, m or 1, L * D)` and `(B, T, m, D)`.
        """
        if "context" not in batch:
            raise ValueError("the batch has no stored features: pass features= to its SampleDataset")
        like = {"device": batch["input_ids"].device, "dtype": self.head.embedding.dtype}
        context = batch["context"].to(**like)
        return Features(context, batch["residual"].to(**like) if "residual" in batch else context)

    # ------------------------------------------------------------------------------------------------------- writing

    def write(self, input_ids: Sequence[int], context: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Store one sample's features, `(T, m or 1, L * D)` and `(T, m, D)`, on any device and in any dtype.

        Raises `ValueError` for a shape that is not the sample's, and for features that are not finite; `OSError` when
        the file cannot be written.
        """
        tensors = {}
        for name, tensor in {"context": context, "residual": residual}.items():
            if name not in self.shapes:
                continue
            expected = (len(input_ids), *self.shapes[name])
            if tensor is None or tensor.shape != expected:
                got = None if tensor is None else tuple(tensor.shape)
                raise ValueError(f"{name} must be of shape {expected}; got {got}")
            # Checked after the cast, in which a large value can become infinite
            tensors[name] = tensor.to("cpu", torch.bfloat16).contiguous()
            if not is_finite(tensors[name]):
                raise ValueError(f"the target's {name} holds NaN or infinite values; nothing is stored")
        metadata = {"crc32": str(checksum(tensors))}  # one key: safetensors does not write several in a fixed order
        ids = torch.tensor(list(input_ids), dtype=torch.int32)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path(input_ids), save({**tensors, "input_ids": ids}, metadata), is_shared=True)

    def missing(self, rows: "datasets.Dataset") -> list[int]:
        """The samples of a data set that the folder has no file of, of equal ones the first; names alone are read."""
        try:
            with os.scandir(self.folder) as entries:
                there = {entry.name for entry in entries}
        except FileNotFoundError:
            there = set()
        first = {}
        for index, name in enumerate(prompt_names(rows)):
            if f"{name}.safetensors" not in there:
                first.setdefault(name, index)
        return list(first.values())

    def sweep(self) -> None:
        """Remove what killed processes left behind: temporary files that have not been touched for an hour."""
        for partial in self.folder.glob(".*.partial"):
            if time.time() - partial.stat().st_mtime > STALE:
                partial.unlink(missing_ok=True)


def is_finite(x: torch.Tensor) -> bool:
    """Whether all values are; in one pass and without temporaries, 40 times faster than `isfinite().all()` in bf16."""
    # One NaN makes both bounds NaN
    return all(math.isfinite(bound) for bound in torch.aminmax(x))


def checksum(tensors: dict[str, torch.Tensor]) -> int:
    """CRC-32 over the bytes of all tensors, in the order of their names."""
    crc32 = 0
    for name in sorted(tensors):
        crc32 = zlib.crc32(tensors[name].view(torch.uint8).numpy().data, crc32)
    return crc32


def check_space(folder: Path, num_bytes: int) -> None:
    """Raises `OSError` for a folder that cannot be made or written, or whose disk is too small."""
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"features_dir {folder}: {folder.parent} is not a folder; make it first")
    existing = folder if folder.exists() else folder.parent
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"features_dir {folder}: {existing} is not writable")
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise OSError(
            errno.ENOSPC,
            f"the features do not fit in features_dir {folder}: {size(num_bytes)} to write, {size(free)} free. Use a "
            "larger disk, fewer rows, a smaller max_length, or a server with `keep_features: false`",
        )


def size(num_bytes: float) -> str:
    """As text: 32.0 KiB."""
    exponent = min(4, int(math.log(num_bytes, 1024))) if num_bytes >= 1 else 0
    return f"{num_bytes / 1024**exponent:.{1 if exponent else 0}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[exponent]}"
