"""What a benchmark compares: `name:N[=CHECKPOINT[,CHECKPOINT...]]`, and the assistants behind the names.

    target-only                          plain decoding, always measured
    prompt-lookup:6                      transformers' own, drafting from the prompt
    mtp:3  mtp:6=FOLDER                  DeepSeek-V4's native MTP module, the target's own or another one
    dspark:5  dspark:5=FOLDER            DeepSeek's DSpark module, which newer checkpoints have instead
    hyperdflash:6=A,B,C  dflash:6=D      a drafter; A, B and C are the same method trained with several seeds
    hyperdflash+markov:6=A               one with heads: also mean+markov, dspark-like (tapped layers)
    hyperdflash+markov+confidence:6=A    the same with its confidence head, which the line above does not use

N is the number of drafts per round. A checkpoint is a folder or Hub id; `id@revision` pins one.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..common.checkpoint import TargetCheckpoint, check_drafter_type, load_drafter, resolve_checkpoint
from ..common.console import UsageError
from ..configuration_hyperdflash import HyperDFlashConfig
from ..generation.native import DSPARK, MTP, module_folder, module_shards
from ..generation.own_drafter import check_native, find_own_drafter, load_native
from ..pairing_hyperdflash import check_shapes

CONFIDENCE = "+confidence"  # in a method's name; without it, a confidence head is not used
# What a drafter's configuration says when it is of the method.
_HIDDEN, _PATHS = {"context_source": "hidden_layers"}, {"context_source": "pre_hc_head"}
_MARKOV = {"draft_head": "markov"}
DRAFTERS = {
    "dflash": {**_HIDDEN, "draft_head": "none"},
    "mean": {**_PATHS, "reducer": "mean", "draft_head": "none"},
    "fc": {**_PATHS, "reducer": "fc", "draft_head": "none"},
    "hyperdflash": {**_PATHS, "reducer": "hc_gate", "draft_head": "none"},
    "dspark-like": {**_HIDDEN, **_MARKOV},
    "mean+markov": {**_PATHS, "reducer": "mean", **_MARKOV},
    "hyperdflash+markov": {**_PATHS, "reducer": "hc_gate", **_MARKOV},
    "hyperdflash+markov+confidence": {**_PATHS, "reducer": "hc_gate", **_MARKOV, "draft_confidence": True},
}
TARGET_ONLY, PROMPT_LOOKUP = "target-only", "prompt-lookup"
NATIVE = (MTP, DSPARK)  # of the target's own checkpoint, or of another
NAMES = (TARGET_ONLY, PROMPT_LOOKUP, *NATIVE, *DRAFTERS)
_SYNTAX = re.compile(r"(?P<name>[^:=]+)(:(?P<number>[^=]*))?(=(?P<checkpoints>.*))?")


@dataclass(frozen=True)
class Method:
    """One line of a table.

    Attributes:
        label (`str`): `name:N`, with its checkpoints in brackets if the same `name:N` is given more than once.
        name (`str`), num_drafts (`int`): the parts of `name:N`; 0 drafts for plain decoding.
        checkpoints (`tuple[str]`): as typed; none for plain decoding, prompt lookup and the target's own module.
            `find_checkpoints` puts a `Checkpoint` in the place of each, and of the target's own module.
    """

    label: str
    name: str
    num_drafts: int = 0
    checkpoints: tuple = ()


@dataclass
class Variant:
    """One thing measured: a method with one of its checkpoints.

    Attributes:
        method, checkpoint (`str`): labels in the results; the checkpoint's is None for methods without one.
        options (`dict`): keyword arguments of `generate`.
    """

    method: str
    checkpoint: str | None
    options: dict

    @property
    def assistant(self) -> torch.nn.Module | None:
        return self.options.get("assistant_model")

    @property
    def key(self) -> tuple[str, str | None]:
        return self.method, self.checkpoint


# ------------------------------------------------------------------------------------------------------------- parsing


def parse_methods(texts: list[str]) -> list[Method]:
    """The methods in order, always with plain decoding first.

    Raises `UsageError` that names a method that cannot be parsed, is unknown, lacks a checkpoint, or is given twice.
    """
    parsed = [_parse(text) for text in texts]
    places = [(name, number, tuple(map(_resolved, checkpoints))) for name, number, checkpoints in parsed]
    for (name, number, checkpoints), found in zip(parsed, places, strict=True):
        if places.count(found) > 1 or len(set(found[2])) < len(checkpoints):
            raise UsageError(f"--methods lists {_text(name, number, checkpoints)} or one of its checkpoints twice")
    labels = checkpoint_labels([checkpoint for *_, checkpoints in parsed for checkpoint in checkpoints])
    methods = []
    for name, number, checkpoints in parsed:
        label = _text(name, number)
        if name != TARGET_ONLY and sum((name, number) == other[:2] for other in parsed) > 1:
            names = ", ".join(labels[c] for c in checkpoints)
            label += f" ({names})" if names else " (the target's own)"
        methods.append(Method(label, name, number or 0, checkpoints))
    plain = [method for method in methods if method.name == TARGET_ONLY] or [Method(TARGET_ONLY, TARGET_ONLY)]
    return plain + [method for method in methods if method.name != TARGET_ONLY]


def _text(name: str, number: int | None, checkpoints: tuple[str, ...] = ()) -> str:
    return name + (f":{number}" if number else "") + (f"={','.join(checkpoints)}" if checkpoints else "")


def _parse(text: str) -> tuple[str, int | None, tuple[str, ...]]:
    match = _SYNTAX.fullmatch(text)
    name = match["name"] if match else text
    if name not in NAMES:
        raise UsageError(f"unknown method {name!r} in --methods; there are {', '.join(NAMES)}")
    number, listed = match["number"], match["checkpoints"]
    checkpoints = tuple(listed.split(",")) if listed is not None else ()
    if name == TARGET_ONLY:
        if number is not None or listed is not None:
            raise UsageError(f"--methods {text}: {TARGET_ONLY} takes neither a number nor a checkpoint")
        return name, None, ()
    if number is None or not number.isdecimal() or int(number) < 1:
        raise UsageError(f"--methods {text}: give the number of drafts per round, as in {name}:6")
    if not all(checkpoints):
        raise UsageError(f"--methods {text}: a checkpoint after '=' or ',' is empty")
    if name in DRAFTERS and not checkpoints:
        raise UsageError(f"--methods {text}: {name} needs a drafter, as in {name}:{number}=FOLDER")
    if name == PROMPT_LOOKUP and checkpoints:
        raise UsageError(f"--methods {text}: {PROMPT_LOOKUP} takes no checkpoint")
    return name, int(number), checkpoints


def _resolved(checkpoint: str) -> str:
    """The absolute path of a folder, so that two spellings are recognised; a Hub id unchanged."""
    folder = Path(checkpoint).expanduser()
    return str(folder.resolve()) if folder.is_dir() else checkpoint


def checkpoint_labels(checkpoints: list[str]) -> dict[str, str]:
    """A short name for each: as many of the last parts of its path as are needed to tell them apart."""
    parts = {c: Path(_resolved(c)).parts for c in checkpoints}
    depth = 1  # of the end of the path; runs/a/final and runs/b/final need two parts
    while depth < max(map(len, parts.values()), default=1):
        if len({p[-depth:] for p in parts.values()}) == len(set(parts.values())):
            break
        depth += 1
    return {c: "/".join(p[-depth:]) for c, p in parts.items()}


# ------------------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of `--methods`, found once; its weights are loaded later.

    Attributes:
        label (`str`, *optional*): what the results call it; None for the target's own MTP or DSpark module.
        name (`str`), revision (`str`, *optional*): a folder and None, or a Hub id and its commit.
        config (`HyperDFlashConfig`, *optional*): a drafter's; None for an MTP or DSpark module.
        folder (`Path`, *optional*): with the files of a local drafter, or those of any MTP or DSpark module.
        files (`tuple[Path]`): what the results of a local one depend on.
    """

    label: str | None
    name: str
    revision: str | None
    config: HyperDFlashConfig | None = None
    folder: Path | None = None
    files: tuple[Path, ...] = ()

    @property
    def identity(self) -> str:
        """The commit, or a hash of the files' content."""
        return self.revision or content_hash(self.files)


def find_checkpoints(methods: list[Method], target: TargetCheckpoint) -> list[Method]:
    """The methods with a `Checkpoint` for each name: configurations and names of tensors are read, no weights.

    Raises `ValueError` for a drafter of another method, with fewer drafts per round, or made for a target of other
    shapes, and where there is no such module; `OSError` where there is no checkpoint at all.
    """
    labels = checkpoint_labels([name for method in methods for name in method.checkpoints])
    found = []
    for method in methods:
        checkpoints = tuple(_find(method, name, labels[name], target) for name in method.checkpoints)
        if method.name in NATIVE and not checkpoints:
            checkpoints = (_own(method, target),)
        found.append(replace(method, checkpoints=checkpoints))
    return found


def _find(method: Method, typed: str, label: str, target: TargetCheckpoint) -> Checkpoint:
    folder, name, revision = Path(typed).expanduser(), typed, None
    if folder.is_dir():
        name, files = str(folder), (folder / "config.json", *folder.glob("*.safetensors"))
    else:
        # Of a branch, the commit: configuration and weights are read at different times
        name, revision = resolve_checkpoint(typed)
        folder, files = None, ()
    if method.name in NATIVE:
        folder = module_folder(method.name, name if folder is None else typed, revision)
        check_native(method.name, folder, target.config, method.num_drafts, typed)
        return Checkpoint(label, name, revision, folder=folder, files=files)
    check_drafter_type(name, revision)
    config = HyperDFlashConfig.from_pretrained(name, revision=revision)
    _check_drafter(method, typed, config)
    check_shapes(config, target.config)
    return Checkpoint(label, name, revision, config, folder, files)


def _own(method: Method, target: TargetCheckpoint) -> Checkpoint:
    folder = find_own_drafter(method.name, target, method.num_drafts)
    files = () if target.folder is None else tuple(folder / shard for shard in module_shards(target))
    return Checkpoint(None, target.name, target.revision, folder=folder, files=files)


def _check_drafter(method: Method, checkpoint: str, config: HyperDFlashConfig) -> None:
    names = ("context_source", "reducer", "draft_head", "draft_confidence")
    found = {name: getattr(config, name) for name in names}
    wanted = DRAFTERS[method.name]
    if any(found[name] != value for name, value in wanted.items()):
        kinds = [name for name, values in DRAFTERS.items() if all(found[n] == v for n, v in values.items())]
        raise ValueError(
            f"{checkpoint} is not a drafter of method {method.name} ({_values(wanted)}): its configuration has "
            f"{_values(found)}, which is {'method ' if kinds else ''}{' or '.join(kinds) or 'not compared here'}"
        )
    if method.num_drafts > config.block_size - 1:
        raise ValueError(
            f"{method.label}: {checkpoint} drafts at most {config.block_size - 1} tokens per round (block_size "
            f"{config.block_size}, anchor included)"
        )


def _values(values: dict) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in values.items())


def content_hash(files: Iterable[Path]) -> str:
    """A hash of the files that exist, and of their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def load_variants(methods: list[Method], target: torch.nn.Module, dtype: str) -> list[Variant]:
    """What is measured, in order, with the methods of `find_checkpoints`. What several of them name is loaded once.

    Raises `ValueError` and `OSError` as `load_drafter`, `load_mtp` and `load_dspark` do.
    """
    # One MTP module serves several `mtp:N`: it is loaded with the most drafts that any of them needs
    most = max((method.num_drafts for method in methods if method.name == MTP), default=0)
    loaded, variants = {}, []
    for method in methods:
        for checkpoint in method.checkpoints:
            key = _key(method, checkpoint)
            if method.name in NATIVE and key not in loaded:
                loaded[key] = load_native(method.name, checkpoint.folder, target.config, most).to(target.device)
            elif key not in loaded:
                loaded[key] = load_drafter(checkpoint.name, checkpoint.revision, dtype, target)
                if not method.name.endswith(CONFIDENCE):
                    loaded[key].confidence_head = None
            variants.append(Variant(method.label, checkpoint.label, _options(method, loaded[key])))
        if not method.checkpoints:
            variants.append(Variant(method.label, None, _options(method, None)))
    return variants


def _key(method: Method, checkpoint: Checkpoint) -> tuple:
    """The same where the same model is to be loaded."""
    kind = method.name if method.name in NATIVE else method.name.endswith(CONFIDENCE)
    return kind, _resolved(checkpoint.name), checkpoint.revision


def _options(method: Method, assistant: torch.nn.Module | None) -> dict:
    if method.name == TARGET_ONLY:
        return {}
    if method.name == PROMPT_LOOKUP:
        return {"prompt_lookup_num_tokens": method.num_drafts}
    return {"assistant_model": assistant, "num_assistant_tokens": method.num_drafts}
