"""Checkpoints: a target's read in part (a few named tensors, from a folder or the Hub), models loaded."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from huggingface_hub import HfFileSystem, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV4Config, PreTrainedConfig
from transformers.utils import logging

from ..modeling_hyperdflash import HyperDFlashModel
from ..pairing_hyperdflash import fingerprint_rows

logger = logging.get_logger(__name__)

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"


PLAIN_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


# Official name -> the names that `save_pretrained` of the causal model and of the bare model write.
TENSOR_NAMES = {
    "hc_head_fn": ("model.hc_head.hc_fn", "hc_head.hc_fn"),
    "hc_head_base": ("model.hc_head.hc_base", "hc_head.hc_base"),
    "hc_head_scale": ("model.hc_head.hc_scale", "hc_head.hc_scale"),
    "norm.weight": ("model.norm.weight",),
    "embed.weight": ("model.embed_tokens.weight", "embed_tokens.weight"),
    "head.weight": ("lm_head.weight",),
}


GATE_TENSORS = ("hc_head_fn", "hc_head_base", "hc_head_scale")


def file_in(folder: Path, name: str) -> Path:
    """The path of a folder's file; raises `FileNotFoundError` when it has none of that name."""
    if not (folder / name).is_file():
        raise FileNotFoundError(f"{folder.name} has no {name}")
    return folder / name


def tensor_files(
    file: Callable[[str], Path],
    checkpoint: str | Path,
    open_tensors: Callable[[str], AbstractContextManager] | None = None,
) -> dict[str, str]:
    """The name of every tensor of a checkpoint, and the file it is in; `OSError` for one without safetensors.

    Args:
        file: from the name of one of its files to its path.
        checkpoint: what an error calls it.
        open_tensors: from the name of a safetensors file to the open file, by default the one at its path.
    """
    open_tensors = open_tensors or (lambda name: _open(file(name)))
    try:
        return json.loads(file(INDEX_FILE).read_text())["weight_map"]
    except (EntryNotFoundError, FileNotFoundError):
        pass
    try:
        with open_tensors(SINGLE_FILE) as f:
            return dict.fromkeys(f.keys(), SINGLE_FILE)
    except (EntryNotFoundError, FileNotFoundError) as error:
        raise FileNotFoundError(
            f"{checkpoint} has neither {INDEX_FILE} nor {SINGLE_FILE}; weights are read as safetensors: {error}"
        ) from error


class TargetCheckpoint:
    """The parts of a V4 checkpoint that a drafter inherits; opens nothing else.

    Attributes:
        name (`str`): the Hub id, or a local folder's own name.
        revision (`str`, *optional*): the commit that every file comes from; None for a folder.
        config (`DeepseekV4Config`): the target's configuration.

    Raises `ValueError` for what is no DeepSeek-V4 checkpoint, `OSError` when a file is missing.
    """

    def __init__(self, target: str | Path, revision: str | None = None):
        folder = Path(target).expanduser()
        self.folder = folder.resolve() if folder.is_dir() else None
        self.name = target_name(target)
        self.revision = resolve_revision(target, revision)
        raw = json.loads(self.file("config.json").read_text())
        _check_model_type(raw, self.name)
        self.config = DeepseekV4Config.from_dict(raw)
        self.files = tensor_files(self.file, self.name, self.open)
        if any(name.startswith("mtp.0.main_proj") for name in self.files) or "dspark_block_size" in raw:
            logger.warning(
                f"{self.name} carries DSpark under mtp.0..2, so it lacks the native MTP module (method mtp, which the "
                "preview checkpoint has). It serves as a target all the same: mtp.* is not read"
            )

    def file(self, name: str) -> Path:
        """The path of one file of the checkpoint, fetched if need be."""
        if self.folder is not None:
            return file_in(self.folder, name)
        return Path(hf_hub_download(self.name, name, revision=self.revision))

    def open(self, name: str) -> AbstractContextManager:
        """One of its safetensors files, to be read in part; of a Hub id nothing else is fetched, nor kept."""
        if self.folder is not None or isinstance(try_to_load_from_cache(self.name, name, revision=self.revision), str):
            return _open(self.file(name))
        return _RemoteTensors(f"{self.name}/{name}", self.revision)

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) is not None

    def _stored_name(self, name: str) -> str | None:
        return next((n for n in (name, *TENSOR_NAMES[name]) if n in self.files), None)

    def read(self, name: str, shape: tuple[int, ...], rows=None) -> torch.Tensor:
        """Read one tensor, or some rows of it, in the dtype it is stored in.

        Args:
            name: an official name of `TENSOR_NAMES`.
            shape: what its shape must be.
            rows: a function of the number of rows, which picks the rows to be read.
        """
        stored = self._stored_name(name)
        if stored is None:
            raise ValueError(f"{self.name} has no tensor {name} (looked for {', '.join((name, *TENSOR_NAMES[name]))})")
        with self.open(self.files[stored]) as f:
            part = f.get_slice(stored)
            found, dtype = tuple(part.get_shape()), part.get_dtype()
            if found != shape:
                raise ValueError(f"{self.name}: {stored} has shape {found}, but its config says {shape}")
            if dtype not in PLAIN_DTYPES:
                raise ValueError(
                    f"{self.name}: {stored} is stored as {dtype}, but a drafter inherits plain floating-point tensors "
                    f"({', '.join(PLAIN_DTYPES)}): take a checkpoint with hc_head, norm and embedding unquantised"
                )
            if rows is None:
                return f.get_tensor(stored)
            return torch.cat([part[int(i) : int(i) + 1] for i in rows(found[0])])


def target_name(target: str | Path) -> str:
    """The Hub id, or a folder's own name."""
    folder = Path(target).expanduser()
    return folder.resolve().name if folder.is_dir() else str(target)


def resolve_revision(target: str | Path, revision: str | None) -> str | None:
    """The commit that a revision of a Hub id stands for, None for a folder. All files are taken from this one."""
    repo = str(target)
    if Path(repo).expanduser().is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r} belongs to a Hub id, but {target} is a folder")
        return None
    try:
        path = hf_hub_download(repo, "config.json", revision=revision)
    except (OSError, HFValidationError) as error:
        at = "" if revision is None else f" at revision {revision}"
        raise OSError(
            f"{repo} is no folder here, and its config.json{at} cannot be had from the Hub: {error}"
        ) from error
    return Path(path).parent.name  # the cache keeps files in a folder named for the commit


@contextmanager
def _open(path: Path):
    try:
        with safe_open(path, framework="pt") as f:
            yield f
    except SafetensorError as error:
        raise ValueError(
            f"{path.name} is no readable safetensors file (cut short, or a Git LFS pointer?): {error}"
        ) from error


class _RemoteTensors:
    """A safetensors file of a Hub repository, read by byte ranges through the methods of `safe_open` used here."""

    def __init__(self, path: str, revision: str | None):
        # Without a cache, which would fetch megabytes around every read
        self.file = HfFileSystem().open(path, "rb", revision=revision, cache_type="none")
        self.start = 8 + int.from_bytes(self.fetch(0, 8), "little")
        try:
            self.header = json.loads(self.fetch(8, self.start))
        except ValueError as error:
            raise ValueError(f"{path} is not a readable safetensors file: {error}") from error

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.file.close()

    def fetch(self, start: int, stop: int) -> bytes:
        self.file.seek(start)
        return self.file.read(stop - start)

    def keys(self) -> list[str]:
        return [name for name in self.header if name != "__metadata__"]

    def get_slice(self, name: str) -> "_RemoteSlice":
        return _RemoteSlice(self, self.header[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.get_slice(name)[:]


class _RemoteSlice:
    """One tensor of a `_RemoteTensors`; `[start:stop]` fetches these rows."""

    def __init__(self, tensors: _RemoteTensors, entry: dict):
        self.tensors, self.entry = tensors, entry

    def get_shape(self) -> list[int]:
        return self.entry["shape"]

    def get_dtype(self) -> str:
        return self.entry["dtype"]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        first, last = self.entry["data_offsets"]
        num_rows, *rest = self.entry["shape"]
        start, stop, _ = rows.indices(num_rows)
        row_bytes = (last - first) // num_rows
        offset = self.tensors.start + first
        data = self.tensors.fetch(offset + start * row_bytes, offset + stop * row_bytes)
        return torch.frombuffer(bytearray(data), dtype=PLAIN_DTYPES[self.get_dtype()]).view(-1, *rest)


def _check_model_type(raw: dict, name: str) -> None:
    model_type = raw.get("model_type")
    if model_type == "deepseek_v4":
        return
    if str(model_type).startswith("deepseek_v41"):
        raise ValueError(
            f"{name} is DeepSeek-V4.1 (model_type {model_type!r}): its checkpoint has no learned hc_head to inherit, "
            "and transformers 5.24 has no model class for it. HyperDFlash needs DeepSeek-V4 (model_type 'deepseek_v4')"
        )
    raise ValueError(f"{name} has model_type {model_type!r}, but a HyperDFlash target has model_type 'deepseek_v4'")


def read_identity(checkpoint: TargetCheckpoint, has_hc_head: bool = True) -> dict[str, torch.Tensor]:
    """The tensors that a drafter inherits or is identified by, under their official names."""
    config = checkpoint.config
    m, D = config.hc_mult, config.hidden_size
    shapes = {"hc_head_fn": (m, m * D), "hc_head_base": (m,), "hc_head_scale": (1,), "norm.weight": (D,)}
    tensors = {
        name: checkpoint.read(name, shape) for name, shape in shapes.items() if has_hc_head or name not in GATE_TENSORS
    }
    tensors["embed.weight"] = checkpoint.read("embed.weight", (config.vocab_size, D), rows=fingerprint_rows)
    return tensors


DTYPES = ("auto", "float32", "bfloat16", "float16")


def check_folder(name: str) -> None:
    """Raises `OSError` where a path was meant and is no folder; what else a name may be is the Hub's to say."""
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise OSError(f"no folder {name}")


def load_target(name: str, revision: str | None, dtype: str = "auto", device_map: str | None = None):
    """Target and tokenizer. Raises `ValueError` for a model that is no DeepSeek-V4."""
    check_folder(name)
    model_type = PreTrainedConfig.get_config_dict(name, revision=revision)[0].get("model_type")
    if model_type != "deepseek_v4":
        raise ValueError(f"{name} is a {model_type} model; HyperDFlash drafts for deepseek_v4")
    target = AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=dtype, device_map=device_map)
    return target.eval(), AutoTokenizer.from_pretrained(name, revision=revision)


def load_drafter(name: str, revision: str | None, dtype: str, target) -> HyperDFlashModel:
    """The drafter, by this package's own code, on the target's device. Raises `ValueError` for another model."""
    check_drafter_type(name, revision)
    return HyperDFlashModel.from_pretrained(name, revision=revision, dtype=dtype).eval().to(target.device)


def check_drafter_type(name: str, revision: str | None = None) -> None:
    """Raises `ValueError` for a model that is no drafter, `OSError` for none at all."""
    model_type = PreTrainedConfig.get_config_dict(name, revision=revision)[0].get("model_type")
    if model_type != "hyperdflash":
        raise ValueError(f"{name} is no HyperDFlash drafter: its model_type is {model_type}")
