"""The rows of data files as they were written, and the conversation that each holds.

Files are JSON lines, read one line at a time, so they may be larger than memory; `.json` files with one list and Hub
data sets work too. A row is one of

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4", "reasoning": "..."}]}
    {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}     ShareGPT
    {"instruction": "Add the numbers.", "input": "2 2", "output": "4"}                           Alpaca
    {"input_ids": [...], "loss_mask": [...]}                                                     tokens (data.py)

    .venv/bin/python -m pytest tests/test_data.py
"""

import glob
import hashlib
import json
import os
import re
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

from tqdm import tqdm

from .console import progress_is_hidden

_BOM = b"\xef\xbb\xbf"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_FORMATS = "input_ids + loss_mask, messages, conversations, or instruction + output"


class _JsonLines:
    """A file with one JSON value a line. A row's position is the byte where its line starts."""

    def __init__(self, path: Path):
        self.path, self.name = path, _display(path)

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(start in bytes, number from 1, bytes) of every line, blank ones included; never more than one in memory."""
        position = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                skipped = len(_BOM) if number == 1 and line.startswith(_BOM) else 0
                yield position + skipped, number, line[skipped:]
                position += len(line)

    def rows(self) -> Iterator[tuple[int, "dict | ValueError"]]:
        found = False
        for _, number, line in self.lines():
            if line.strip():
                found = True
                yield number, _parse(line)
        if not found:
            raise ValueError(f"{self.name} is empty")

    def scan(self) -> tuple[array, array, str]:
        """Positions and line numbers of the rows (16 bytes a row), and a hash of the content."""
        positions, numbers, digest = array("q"), array("q"), hashlib.sha256()
        total, hidden = self.path.stat().st_size, progress_is_hidden()
        with tqdm(total=total, unit="B", unit_scale=True, desc=f"Scanning {self.path.name}", disable=hidden) as bar:
            for position, number, line in self.lines():
                digest.update(line)
                bar.update(len(line))
                if line.strip():
                    positions.append(position)
                    numbers.append(number)
        if not positions:
            raise ValueError(f"{self.name} is empty")
        return positions, numbers, digest.hexdigest()

    def read(self, positions: Iterable[int]) -> Iterator["dict | ValueError"]:
        with self.path.open("rb") as file:
            for position in positions:
                file.seek(position)
                yield _parse(file.readline())


class _Rows:
    """Rows that can be had by index: a JSON list, or a data set of the Hub (memory-mapped)."""

    def __init__(self, name: str, items, digest: str):
        self.name, self.items, self.digest = name, items, digest

    def rows(self) -> Iterator[tuple[int, "dict | ValueError"]]:
        for position in range(len(self.items)):
            yield position + 1, _row(self.items[position])

    def scan(self) -> tuple[array, array, str]:
        return array("q", range(len(self.items))), array("q", range(1, len(self.items) + 1)), self.digest

    def read(self, positions: Iterable[int]) -> Iterator["dict | ValueError"]:
        for position in positions:
            yield _row(self.items[position])


def read_rows(files: list[str | Path]) -> Iterator[tuple[str, "dict | ValueError"]]:
    """Every row of the files, one at a time, as it was written.

    Args:
        files: paths or glob patterns of `.jsonl` files (or `.json` files with one list, which is read whole), or ids
            of Hub data sets (their `train` split; `"id@revision"` pins one).

    Returns:
        An iterator of (source, row). The source is `"file.jsonl:12"`: the line in the file, or the place in the list,
        from 1. The row is a dict, or the `ValueError` that says why it is none.

    Raises:
        OSError: for a file that is missing, a pattern without a match, a data set that cannot be had.
        ValueError: for a name that is neither, and for a file without rows.
    """
    origins = resolve(files)
    return ((f"{origin.name}:{number}", row) for origin in origins for number, row in origin.rows())


def resolve(files) -> list[_JsonLines | _Rows]:
    """What the names of [`read_rows`] stand for; opens nothing that is larger than memory."""
    if isinstance(files, (str, Path)):
        files = [files]
    if not files:
        raise ValueError("no data files were given")
    return [origin for name in map(str, files) for origin in _resolve_one(name)]


def _resolve_one(name: str) -> list[_JsonLines | _Rows]:
    path = Path(name).expanduser()
    if path.is_dir():
        raise ValueError(f"{name} is a folder: name its files, for example {path / '*.jsonl'}")
    if path.exists():
        return [_open_file(path)]
    if any(wildcard in name for wildcard in "*?["):
        found = glob.glob(str(path), recursive=True)  # noqa: PTH207, as Path.glob finds hidden files too
        matches = [Path(match) for match in sorted(found) if Path(match).is_file()]
        if not matches:
            raise FileNotFoundError(f"no file matches {name}")
        return [_open_file(match) for match in matches]
    if name.startswith((".", "/", "~")) or path.suffix in (".json", ".jsonl") or not _HUB_ID.fullmatch(name):
        raise FileNotFoundError(f"no data file {name}")
    return [_open_hub(name)]


def _open_file(path: Path) -> _JsonLines | _Rows:
    if path.suffix != ".json":
        return _JsonLines(path)
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(_BOM).lstrip()
        if not start.startswith(b"["):
            return _JsonLines(path)  # many .json files hold JSON lines
        file.seek(0)
        content = file.read()
    try:
        items = _loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not items:
        raise ValueError(f"{path} is empty")
    return _Rows(_display(path), items, hashlib.sha256(content).hexdigest())


def _open_hub(name: str) -> _Rows:
    import datasets

    repo, _, revision = name.partition("@")
    try:
        rows = datasets.load_dataset(repo, split="train", revision=revision or None)
    except (OSError, ValueError) as error:
        raise OSError(f"{name} is no file here, and no such data set can be had from the Hub: {error}") from error
    if not len(rows):
        raise ValueError(f"{name} is empty")
    return _Rows(name, rows, rows._fingerprint)


def _display(path: Path) -> str:
    """The path as text that Arrow takes: under an ASCII locale, Python's own holds other names as surrogates."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _parse(line: bytes) -> dict | ValueError:
    try:
        return _row(_loads(line.rstrip().decode("utf-8")))
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8: {error.reason} at byte {error.start} of the line")
    except UnicodeEncodeError:
        return ValueError("not text: a \\u escape is half of a surrogate pair")
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1} of the line")
    except RecursionError:
        return ValueError("not JSON that can be read: nested too deeply")


def _loads(text: str):
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises for half a surrogate pair, which no tokenizer takes
    return value


def _row(value) -> dict | ValueError:
    return value if isinstance(value, dict) else ValueError(f"a row must be a JSON object, not {_kind(value)}")


def _kind(value) -> str:
    return "null" if value is None else {"str": "a string", "list": "a list"}.get(type(value).__name__, repr(value))


def to_messages(row: dict) -> list[dict]:
    """The conversation of a row as `{"role", "content"}` messages, from any of the three text formats.

    Lists of text parts are joined, `reasoning_content` becomes `reasoning`, other keys stay as they are; roles and
    types are left for the encoding to check. Raises `ValueError` for a row that holds no conversation.
    """
    if row.get("tools"):
        raise ValueError("the row defines 'tools': tool calls are outside this DeepSeek-V4 encoding")
    turns = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    if turns is None:
        return _alpaca_messages(row)
    if not isinstance(turns, list):
        raise ValueError(f"the messages must be a list, not {_kind(turns)}")
    return [_message(i, turn) for i, turn in enumerate(turns)]


def _message(i: int, turn: dict) -> dict:
    if not isinstance(turn, dict):
        raise ValueError(f"message {i} must be an object, not {_kind(turn)}")
    renamed = {"from": "role", "value": "content", "reasoning_content": "reasoning"}
    message = {}
    for key, value in turn.items():
        if value is not None and not (key in renamed and turn.get(renamed[key]) is not None):
            message[renamed.get(key, key)] = value
    if isinstance(message.get("role"), str):
        message["role"] = _SHAREGPT_ROLES.get(message["role"], message["role"])
    if isinstance(message.get("content"), list):
        message["content"] = "".join(_part_text(i, part) for part in message["content"])
    return message


def _part_text(i: int, part) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        found = f"a part of type {kind!r}" if kind != "text" else "a text part without text"
        raise ValueError(f'message {i} has {found}; only {{"type": "text", "text": ...}} parts can be encoded')
    return part["text"]


def _alpaca_messages(row: dict) -> list[dict]:
    if row.get("instruction") is None or row.get("output") is None:
        raise ValueError(f"the row has none of {_FORMATS}; its keys are {', '.join(map(repr, row)) or 'none at all'}")
    for key in ("instruction", "input", "output"):
        if not isinstance(row.get(key) or "", str):
            raise ValueError(f"{key!r} must be a string, not {_kind(row[key])}")
    question = row["instruction"] + (f"\n\n{row['input']}" if row.get("input") else "")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
