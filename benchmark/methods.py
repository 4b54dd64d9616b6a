"""What a benchmark compares: `name:N[=CHECKPOINT[,CHECKPOINT...]]`, and the assistants behind the names.

    target-only                          plain decoding, always measured
    prompt-lookup:6                      transformers' own, drafting from the prompt
    mtp:3  mtp:6=FOLDER                  DeepSeek-V4's native module, the target's own or another one
    hyperdflash:6=A,B,C  dflash:6=D      a drafter; A, B and C are the same method trained with several seeds
    hyperdflash+markov:6=A               one with heads: also mean+markov, dspark-like (tapped layers)
    hyperdflash+markov+confidence:6=A    the same with its confidence head, which the line above leaves out

N is the number of drafts a round. A checkpoint is a folder or Hub id; `id@revision` pins one.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ..common.checkpoint import (
    TargetCheckpoint,
    check_drafter_type,
    check_folder,
    file_in,
    load_drafter,
    resolve_revision,
    tensor_files,
)
from ..common.console import UsageError
from ..configuration_hyperdflash import HyperDFlashConfig
from ..generation.mtp import PREFIX, check_mtp_names, load_mtp
from ..pairing_hyperdflash import check_shapes

CONFIDENCE = "+confidence"  # without it, a confidence head is left out
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
TARGET_ONLY, PROMPT_LOOKUP, MTP = "target-only", "prompt-lookup", "mtp"
NAMES = (TARGET_ONLY, PROMPT_LOOKUP, MTP, *DRAFTERS)
_SYNTAX = re.compile(r"(?P<name>[^:=]+)(:(?P<number>[^=]*))?(=(?P<checkpoints>.*))?")


@dataclass(frozen=True)
class Method:
    """One line of a table.

    Attributes:
        label (`str`): `name:N`; with its checkpoints in brackets where the same `name:N` was asked for more than once.
        name (`str`), num_drafts (`int`): the two parts of it; 0 drafts for plain decoding.
        checkpoints (`tuple[str]`): as typed; none for plain decoding, prompt lookup and the target's own MTP module.
    """

    label: str
    name: str
    num_drafts: int = 0
    checkpoints: tuple[str, ...] = ()


@dataclass
class Arm:
    """One thing measured: a method with one of its checkpoints.

    Attributes:
        method, checkpoint (`str`): labels in the results; the checkpoint's is None where there is none to choose.
        options (`dict`): what `generate` is given.
    """

    method: str
    checkpoint: str | None
    options: dict

    @property
    def assistant(self):
        return self.options.get("assistant_model")

    @property
    def key(self) -> tuple[str, str | None]:
        return self.method, self.checkpoint


# ------------------------------------------------------------------------------------------------------------- parsing


def parse_methods(texts: list[str]) -> list[Method]:
    """The methods in order, plain decoding first whether it was named or not.

    Raises `UsageError` that names what cannot be parsed, is unknown, lacks a checkpoint, or is given twice.
    """
    parsed = [_parse(text) for text in texts]
    places = [(name, number, tuple(map(_resolved, checkpoints))) for name, number, checkpoints in parsed]
    for (name, number, checkpoints), found in zip(parsed, places, strict=True):
        if places.count(found) > 1 or len(set(found[2])) < len(checkpoints):
            raise UsageError(f"--methods has {_text(name, number, checkpoints)} or one of its checkpoints twice")
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
        raise UsageError(f"--methods {text}: say how many drafts a round, as in {name}:6")
    if not all(checkpoints):
        raise UsageError(f"--methods {text}: a checkpoint behind '=' or ',' is empty")
    if name in DRAFTERS and not checkpoints:
        raise UsageError(f"--methods {text}: {name} needs a drafter, as in {name}:{number}=FOLDER")
    if name == PROMPT_LOOKUP and checkpoints:
        raise UsageError(f"--methods {text}: {PROMPT_LOOKUP} takes no checkpoint")
    return name, int(number), checkpoints


def _resolved(checkpoint: str) -> str:
    """The same for a folder however it was typed; a Hub id as it is."""
    folder = Path(checkpoint).expanduser()
    return str(folder.resolve()) if folder.is_dir() else checkpoint


def checkpoint_labels(checkpoints: list[str]) -> dict[str, str]:
    """A short name for each: the last parts of its path, as many as tell all of them apart."""
    parts = {c: Path(_resolved(c)).parts for c in checkpoints}
    depth = 1
    while depth < max(map(len, parts.values()), default=1):
        if len({p[-depth:] for p in parts.values()}) == len(set(parts.values())):
            break
        depth += 1
    return {c: "/".join(p[-depth:]) for c, p in parts.items()}


# ------------------------------------------------------------------------------------------------------------- loading


def place(target: TargetCheckpoint) -> tuple[str, str | None]:
    """Folder, or Hub id and commit."""
    return (target.name, target.revision) if target.folder is None else (str(target.folder), None)


def split_revision(checkpoint: str) -> tuple[str, str | None]:
    """Hub id and revision of `id@revision`; a folder is a folder."""
    if Path(checkpoint).expanduser().is_dir():
        return str(Path(checkpoint).expanduser()), None
    name, _, revision = checkpoint.partition("@")
    return name, revision or None


def check_methods(methods: list[Method], target: TargetCheckpoint) -> None:
    """Read every drafter's configuration, and which tensors an MTP checkpoint has; no weights.

    Raises `ValueError` for a drafter that is of another method, drafts fewer tokens a round, or was made for a target
    of other shapes, and for no MTP module; `OSError` for no checkpoint at all.
    """
    for method in methods:
        if method.name == MTP and not method.checkpoints:
            find_mtp(*place(target))
        for checkpoint in method.checkpoints:
            name, revision = split_revision(checkpoint)
            check_folder(name)
            if method.name == MTP:
                find_mtp(name, revision)
                continue
            check_drafter_type(name, revision)
            config = HyperDFlashConfig.from_pretrained(name, revision=revision)
            _check_drafter(method, checkpoint, config)
            check_shapes(config, target.config)


def _check_drafter(method: Method, checkpoint: str, config: HyperDFlashConfig) -> None:
    names = ("context_source", "reducer", "draft_head", "draft_confidence")
    found = {name: getattr(config, name) for name in names}
    wanted = DRAFTERS[method.name]
    if any(found[name] != value for name, value in wanted.items()):
        kinds = [name for name, values in DRAFTERS.items() if all(found[n] == v for n, v in values.items())]
        raise ValueError(
            f"{checkpoint} is no drafter of method {method.name} ({_values(wanted)}): its configuration has "
            f"{_values(found)}, which is method {' or '.join(kinds) or 'nothing that is compared here'}"
        )
    if method.num_drafts > config.block_size - 1:
        raise ValueError(
            f"{method.label}: {checkpoint} drafts at most {config.block_size - 1} tokens a round (block_size "
            f"{config.block_size}, anchor included)"
        )


def _values(values: dict) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in values.items())


def find_mtp(checkpoint: str, revision: str | None = None) -> Path:
    """The folder with the files that hold `mtp.0.*`; of a Hub id these files alone are fetched.

    Raises `ValueError` as `check_mtp_names` does, before any weight is read.
    """
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        names, repository = tensor_files(partial(file_in, folder), checkpoint), None
    else:
        repository = TargetCheckpoint(checkpoint, revision)
        names = repository.files
    check_mtp_names(names, checkpoint)
    if repository is None:
        return folder
    shards = sorted({file for name, file in names.items() if name.startswith(PREFIX)})
    return [repository.file(shard) for shard in shards][0].parent


def identify(method: Method, target: TargetCheckpoint) -> list[str]:
    """What the results of a method depend on besides its label: the content of folders, the commit of Hub ids."""
    if method.name == MTP and not method.checkpoints:
        shards = {file for name, file in target.files.items() if name.startswith(PREFIX)}
        return [target.revision or content_hash(target.folder / shard for shard in shards)]
    identities = []
    for checkpoint in method.checkpoints:
        name, revision = split_revision(checkpoint)
        weights = Path(name).glob("*.safetensors")
        identities.append(resolve_revision(name, revision) or content_hash([Path(name) / "config.json", *weights]))
    return identities


def content_hash(files: Iterable[Path]) -> str:
    """Of the files that there are, with their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.is_file()):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def load_arms(methods: list[Method], target, checkpoint: TargetCheckpoint, dtype: str) -> list[Arm]:
    """All arms in order, for the `target` loaded from `checkpoint`. What several methods name is loaded once.

    Raises `ValueError` and `OSError` as `load_drafter` and `load_mtp` do.
    """
    most = max((method.num_drafts for method in methods if method.name == MTP), default=0)
    labels = checkpoint_labels([name for method in methods for name in method.checkpoints])
    loaded, arms = {}, []
    for method in methods:
        for name in method.checkpoints or (None,):
            key = (method.name == MTP, method.name.endswith(CONFIDENCE), name and _resolved(name))
            if method.name == MTP and key not in loaded:
                folder = find_mtp(*(place(checkpoint) if name is None else split_revision(name)))
                loaded[key] = load_mtp(folder, target.config, most).to(target.device)
            elif method.name in DRAFTERS and key not in loaded:
                loaded[key] = load_drafter(*split_revision(name), dtype, target)
                if not method.name.endswith(CONFIDENCE):
                    loaded[key].confidence_head = None
            arms.append(Arm(method.label, labels.get(name), _options(method, loaded.get(key))))
    return arms


def _options(method: Method, assistant) -> dict:
    if method.name == TARGET_ONLY:
        return {}
    if method.name == PROMPT_LOOKUP:
        return {"prompt_lookup_num_tokens": method.num_drafts}
    return {"assistant_model": assistant, "num_assistant_tokens": method.num_drafts}
