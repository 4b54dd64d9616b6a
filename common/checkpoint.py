"""Checkpoints: found, checked by their configuration, read in part (a few named tensors of a target), and loaded."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from huggingface_hub import HfFileSystem, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, DeepseekV4Config, PreTrainedConfig
from transformers.utils import logging

from ..configuration_hyperdflash import HyperDFlashConfig
from ..modeling_hyperdflash import HyperDFlashModel
from ..pairing_hyperdflash import check_shapes, fingerprint_rows
from .console import UsageError
from .files import read_json

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
        return read_json(file(INDEX_FILE))["weight_map"]
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

    Raises `ValueError` for what is not a DeepSeek-V4 checkpoint, `OSError` when a file is missing.
    """

    def __init__(self, target: str | Path, revision: str | None = None):
        source, revision = resolve_checkpoint(target, revision)
        self.folder = Path(source).resolve() if Path(source).is_dir() else None
        self.name, self.revision = recorded_name(source, revision)
        raw = read_json(self.file("config.json"))
        _check_model_type(raw, self.name)
        self.config = DeepseekV4Config.from_dict(raw)
        self._remote: dict[str, _RemoteTensors] = {}
        self.files = tensor_files(self.file, self.name, self.open)
        if any(name.startswith("mtp.0.main_proj") for name in self.files) or "dspark_block_size" in raw:
            logger.warning(
                f"{self.name} carries DSpark under mtp.* (method dspark), so it lacks the native MTP module (method "
                "mtp), which the preview checkpoint has. It serves as a target all the same"
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
        if name not in self._remote:  # kept, as the header alone can be megabytes
            self._remote[name] = _RemoteTensors(f"{self.name}/{name}", self.revision)
        return self._remote[name]

    def __contains__(self, name: str) -> bool:
        return self._stored_name(name) is not None

    @property
    def has_hc_head(self) -> bool:
        """Whether a drafter's gate can be inherited: a part of it counts, and reading it names what is missing."""
        return any(name in self for name in GATE_TENSORS)

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


def recorded_name(target: str | Path, revision: str | None = None) -> tuple[str, str | None]:
    """What a drafter records of its target: Hub id and commit, also those of a snapshot in the Hub's cache; of another
    folder its own name."""
    folder = Path(target).expanduser()
    if not folder.is_dir():
        return str(target), revision
    folder = folder.resolve()
    repository = folder.parent.parent.name  # models--org--name/snapshots/COMMIT
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/"), folder.name
    return folder.name, revision


def resolve_checkpoint(given: str | Path, revision: str | None = None) -> tuple[str, str | None]:
    """What `from_pretrained` takes: a folder's path and None, or a Hub id and the commit that all files come from.

    Resolving what was resolved before changes nothing, and needs no network once the commit's config is in the cache.

    Args:
        given: a folder, a Hub id, or `id@revision`.
        revision: branch, tag or commit; wins over the one in `given`.

    Raises `UsageError` for a revision of a folder, `OSError` for what is neither a folder nor on the Hub.
    """
    folder = Path(given).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise UsageError(f"revision={revision!r} belongs to a Hub id, but {given} is a folder")
        return str(folder), None
    repo, _, at = str(given).partition("@")
    revision = revision or at or None
    try:
        validate_repo_id(repo)
    except HFValidationError as error:  # a path that leads nowhere: it is not a valid Hub id either
        raise FileNotFoundError(f"no folder {given}") from error
    try:
        path = hf_hub_download(repo, "config.json", revision=revision)
    except OSError as error:
        at = "" if revision is None else f" at revision {revision}"
        reason = " ".join(str(error).split())
        raise OSError(
            f"{repo} is not a folder here, and its config.json{at} could not be downloaded from the Hub: {reason}"
        ) from error
    return repo, Path(path).parent.name  # the cache keeps files in a folder named for the commit


@contextmanager
def _open(path: Path):
    try:
        with safe_open(path, framework="pt") as f:
            yield f
    except SafetensorError as error:
        raise ValueError(
            f"{path.name} is not a readable safetensors file (cut short, or a Git LFS pointer?): {error}"
        ) from error


class _RemoteTensors:
    """A safetensors file of a Hub repository, read by byte ranges through the methods of `safe_open` used here.

    Stays open behind a `with`, for the next tensor: its header is fetched once.
    """

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
        pass

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


def read_identity(checkpoint: TargetCheckpoint) -> dict[str, torch.Tensor]:
    """The tensors that a drafter inherits or is identified by, under their official names."""
    config = checkpoint.config
    m, D = config.hc_mult, config.hidden_size
    shapes = {"hc_head_fn": (m, m * D), "hc_head_base": (m,), "hc_head_scale": (1,), "norm.weight": (D,)}
    tensors = {
        name: checkpoint.read(name, shape)
        for name, shape in shapes.items()
        if checkpoint.has_hc_head or name not in GATE_TENSORS
    }
    tensors["embed.weight"] = checkpoint.read("embed.weight", (config.vocab_size, D), rows=fingerprint_rows)
    return tensors


AUTO_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def check_device_map(device_map: str | None) -> None:
    """Raises `UsageError` for a device that this machine does not have. accelerate reads maps of modules itself."""
    if not isinstance(device_map, str) or device_map in AUTO_DEVICE_MAPS:
        return
    try:
        device = torch.device(device_map)
    except RuntimeError as error:
        known = ", ".join(AUTO_DEVICE_MAPS)
        raise UsageError(
            f"device_map {device_map!r} is not a device, e.g. cpu or cuda:0, nor one of {known}"
        ) from error
    if device.type == "cpu":
        return
    here = torch.accelerator.current_accelerator(check_available=True)
    if here is None or here.type != device.type or (device.index or 0) >= torch.accelerator.device_count():
        found = "no accelerator" if here is None else f"{torch.accelerator.device_count()} of type {here.type}"
        raise UsageError(f"device_map {device_map!r}: torch finds {found} on this machine")


def check_target(name: str, revision: str | None = None) -> DeepseekV4Config:
    """A target's configuration, of which no weights are read. Raises `ValueError` for another model, `OSError`."""
    name, revision = resolve_checkpoint(name, revision)
    raw, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    _check_model_type(raw, name)
    return DeepseekV4Config.from_dict(raw)


def check_drafter(name: str, revision: str | None, target: DeepseekV4Config) -> HyperDFlashConfig:
    """A drafter's configuration, of which no weights are read.

    Raises `ValueError` for another model, or a drafter for a target of other shapes, `OSError` for none at all.
    """
    name, revision = resolve_checkpoint(name, revision)
    check_drafter_type(name, revision)
    config = HyperDFlashConfig.from_pretrained(name, revision=revision)
    check_shapes(config, target)
    return config


def load_target(name: str, revision: str | None, dtype: str = "auto", device_map: str | None = None):
    """Target and tokenizer. Raises `ValueError` for a model that is not DeepSeek-V4."""
    return load_target_model(name, revision, dtype, device_map), load_tokenizer(name, revision)


def load_target_model(name: str, revision: str | None, dtype: str = "auto", device_map: str | None = None):
    """The target alone; errors as in `load_target`."""
    if dtype == "float16":
        raise UsageError("DeepSeek-V4 does not run in float16 in transformers: choose bfloat16, float32 or auto")
    check_device_map(device_map)
    name, revision = resolve_checkpoint(name, revision)
    check_target(name, revision)
    return AutoModelForCausalLM.from_pretrained(name, revision=revision, dtype=dtype, device_map=device_map).eval()


def load_tokenizer(name: str, revision: str | None = None):
    """A checkpoint's tokenizer. Raises `OSError` in one line when there is none."""
    name, revision = resolve_checkpoint(name, revision)
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError) as error:
        raise OSError(f"no tokenizer could be loaded from {name}: {' '.join(str(error).split())}") from error


def load_drafter(name: str, revision: str | None, dtype: str, target) -> HyperDFlashModel:
    """The drafter, by this package's own code, on the target's device. Raises `ValueError` for another model."""
    name, revision = resolve_checkpoint(name, revision)
    check_drafter_type(name, revision)
    return HyperDFlashModel.from_pretrained(name, revision=revision, dtype=dtype).eval().to(target.device)


def check_drafter_type(name: str, revision: str | None = None) -> None:
    """Raises `ValueError` for a model that is not a drafter, `OSError` for none at all."""
    name, revision = resolve_checkpoint(name, revision)
    model_type = PreTrainedConfig.get_config_dict(name, revision=revision)[0].get("model_type")
    if model_type != "hyperdflash":
        raise ValueError(f"{name} is not a HyperDFlash drafter: its model_type is {model_type}")


def encoding_mismatch(config: PreTrainedConfig | None, mode: str, generation: str) -> str | None:
    """How prompts differ from the texts that a drafter was trained on, in one sentence; None where they do not.

    A drafter accepts less in a mode or generation of the chat encoding that it never saw.

    Args:
        config: the drafter's; an assistant without `encoding` in its config (MTP, DSpark) is never told apart.
        mode, generation: of the prompts, as in `encode_with_mask`.
    """
    trained = getattr(config, "encoding", None) or {}
    modes, other_generation = trained.get("modes") or [mode], trained.get("generation") or generation
    parts = []
    if mode not in modes:
        parts.append(f"on {' and '.join(modes)} texts, but the prompts are in {mode} mode")
    if other_generation != generation:
        parts.append(f"for generation {other_generation} of the chat encoding, but the prompts are for {generation}")
    return f"was trained {', and '.join(parts)}" if parts else None
