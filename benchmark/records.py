"""The records of a benchmark on disk: one line per call, and the settings that all of them share.

A run that was killed leaves whole lines and at most one torn one, which the next run of the same command drops.

    .venv/bin/python -m pytest tests/test_benchmark.py
"""

import json
from pathlib import Path

from ..common.files import write_atomically
from ..common.growing_file import GrowingFile

RECORDS_FILE, SETTINGS_FILE = "records.jsonl", "settings.json"
GROUP = ("method", "checkpoint", "dataset", "mode", "temperature", "seed")  # what a row of the results is about
KEY = (*GROUP, "prompt", "turn")  # what a record is about


class Records(GrowingFile):
    """The calls that have ended, in a file that grows line by line; a context manager that holds it open.

    Args:
        folder: the benchmark's.
        settings: everything that the records depend on; in `"datasets"`, the digest of each set, None for one that
            could not be had; in `"sources"`, the digest of each file of code that measures.

    Attributes:
        done (`dict[tuple, dict]`): by `KEY`, what an earlier run of the same command and this one have written.
        num_resumed (`int`): how many of them are an earlier run's.
        code_changes (`list[dict]`): that `files` of the code that measures changed after so many calls
            (`after_calls`). Other settings are refused when they change; here that would cost days of measuring.
        changed_files (`list[str]`): those that changed since the last call; a change counts from the next call on.
    """

    def __init__(self, folder: Path, settings: dict):
        super().__init__(folder / RECORDS_FILE)
        self.folder, self.settings = folder, json.loads(json.dumps(settings))
        self.done: dict[tuple, dict] = {}
        self.num_resumed = 0
        self.code_changes: list[dict] = []
        self.changed_files: list[str] = []
        self._sources = self.settings.get("sources", {})

    def check(self) -> None:
        """Raises `OSError` for a folder that is not a benchmark's, `ValueError` that names the settings for another
        benchmark's. Writes nothing."""
        if self.folder.exists() and not self.folder.is_dir():
            raise FileExistsError(f"--output {self.folder} is a file: name a folder")
        if not self.folder.is_dir() or not any(self.folder.iterdir()):
            return
        path = self.folder / SETTINGS_FILE
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            sets_before = before["benchmark"]["datasets"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileExistsError(
                f"--output {self.folder} is not empty and does not hold a benchmark: choose another, or remove it "
                "first"
            ) from error
        if names := _differing(before["benchmark"], self.settings):
            short = [_change(name, before["benchmark"].get(name), self.settings.get(name)) for name in names]
            raise ValueError(
                f"--output {self.folder} was started with {', '.join(short)}: use these settings, or choose another"
            )
        for name, digest in sets_before.items():
            self.settings["datasets"][name] = self.settings["datasets"][name] or digest
        self.code_changes = before.get("code_changes", [])
        self.settings["sources"] = before["benchmark"].get("sources", {})
        old = self.settings["sources"] if isinstance(self.settings["sources"], dict) else {}  # a str in early versions
        self.changed_files = [name for name in {**old, **self._sources} if old.get(name) != self._sources.get(name)]

    def __enter__(self) -> "Records":
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / SETTINGS_FILE).exists():
            self._write_settings()  # first: records alone would be nobody's
        super().__enter__()
        self.num_resumed = len(self.done)
        if not self.done:  # nor a call of other code
            self.settings["sources"], self.code_changes, self.changed_files = self._sources, [], []
        self._write_settings()  # again, as only the holder of the lock may change them
        return self

    def _write_settings(self) -> None:
        settings = {"benchmark": self.settings, "code_changes": self.code_changes}
        write_atomically(self.folder / SETTINGS_FILE, (json.dumps(settings, indent=2) + "\n").encode())

    def take(self, row: dict, start: int = 0) -> None:
        self.done[tuple(row[name] for name in KEY)] = row

    def append(self, record: dict) -> None:
        """Keep a call that has ended."""
        if self.changed_files:
            self.code_changes.append({"after_calls": len(self.done), "files": self.changed_files})
            self.settings["sources"], self.changed_files = self._sources, []
            self._write_settings()
        super().append(record)
        self.take(record)


def _differing(before: dict, now: dict) -> list[str]:
    """Names of the settings that differ and must not; a set that could not be had at one time does not."""
    apart = ("datasets", "sources")
    names = [name for name in {**before, **now} if name not in apart and before.get(name) != now.get(name)]
    old, new = before["datasets"], now["datasets"]
    if set(old) != set(new) or any(old[name] and new[name] and old[name] != new[name] for name in new):
        names.append("datasets")
    return names


def _change(name: str, before, now) -> str:
    """What a setting was and what it is; of a table only the entries that differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        differ = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        before, now = ({key: values[key] for key in differ if key in values} for values in (before, now))
    return f"{name} {_short(before)} (now {_short(now)})"


def _short(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else f"{text[:99]}…"
