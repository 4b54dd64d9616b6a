"""The conditions of a benchmark: the settings that its records depend on, machine, versions and command."""

import argparse
import ast
import datetime
import functools
import hashlib
import json
import platform
import shlex
from importlib.metadata import version
from pathlib import Path

import torch

from ..common.checkpoint import TargetCheckpoint, read_identity
from ..generation.comparison import accelerators
from ..pairing_hyperdflash import target_fingerprint
from .methods import Method
from .prompt_sets import PromptSet

SOURCES = Path(__file__).resolve().parents[1]


# Besides the closure, the code that figures depend on: the assistants and how calls are timed.
MEASURING = (
    "benchmark/methods.py",
    "benchmark/timing.py",
    "generation/comparison.py",
    "generation/dspark.py",
    "generation/mtp.py",
    "generation/native.py",
)
CPU_INFO = Path("/proc/cpuinfo")


def run_settings(args, methods: list[Method], sets: list[PromptSet], checkpoint: TargetCheckpoint) -> dict:
    """Everything that a record depends on: a run is only resumed with the same."""
    tensors = read_identity(checkpoint)
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    names = ("modes", "effort", "generation", "temperatures", "seeds", "num_prompts", "max_new_tokens")
    dtype = str(checkpoint.config.dtype).removeprefix("torch.") if args.dtype == "auto" else args.dtype
    digests = dict.fromkeys(dataset.partition("@")[0] for dataset in args.datasets)
    return {
        "target": checkpoint.name,
        "target_revision": checkpoint.revision,
        "target_files": _folder_files(checkpoint),
        "target_fingerprint": hashlib.sha256(json.dumps(target_fingerprint(tensors)).encode()).hexdigest(),
        "methods": {method.label: [c.identity for c in method.checkpoints] for method in methods},
        "datasets": digests | {prompts.name: prompts.digest() for prompts in sets},
        **{name: getattr(args, name) for name in (*names, "device_map")},
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "machine": [_device_name(device) for device in devices],
        "versions": _versions(),
        "sources": _measuring_code(),
    }


def _measuring_code() -> dict[str, str]:
    """A digest of each file that figures depend on: loop, model, cache, assistants and clock. Comments, docstrings,
    commands and reports do not count."""
    closure = sorted(SOURCES.glob("*_hyperdflash.py"))
    files = [*closure, SOURCES / "encoding_deepseek_v4.py", *(SOURCES / name for name in MEASURING)]
    return {file.name: _code_digest(file.read_text(encoding="utf-8")) for file in files}


@functools.cache  # parsing ten files takes half a second
def _code_digest(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]


def _folder_files(checkpoint: TargetCheckpoint) -> list | None:
    """Names, sizes and times of a folder's shards: it has no revision, and they are too large to hash every time."""
    if checkpoint.folder is None:
        return None
    stats = ((name, (checkpoint.folder / name).stat()) for name in sorted(set(checkpoint.files.values())))
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def _versions() -> dict[str, str]:
    packages = ("hyperdflash", "torch", "transformers")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def _device_name(device: torch.device) -> str:
    """The model of a GPU, else of the processor if the system reports it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def environment(args: argparse.Namespace, target, settings: dict) -> dict:
    devices = sorted(accelerators(target) or [target.device], key=str)
    return {
        **{name: settings[name] for name in ("target", "target_revision", "target_fingerprint", "sources")},
        "versions": _versions(),
        "device": ", ".join(f"{device.type} ({_device_name(device)})" for device in devices),
        "dtype": str(target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "command": command_text(args),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def command_text(args: argparse.Namespace) -> str:
    """The command line, defaults included."""
    words = ["hyperdflash", "benchmark", args.target]
    for name, value in vars(args).items():
        if name not in ("command", "run", "target") and value not in (None, [], False):
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return shlex.join(words)
