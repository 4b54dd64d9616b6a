"""The rows of data files as they were written, and the conversation that each holds.

Files are JSON lines, read one line at a time, so they may be larger than memory, and may be packed (`.jsonl.gz`);
`.json` files with one list, `.csv`, `.parquet` and `.arrow` files and Hub data sets work too. A row is one of

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4", "reasoning": "..."}]}
    {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}     ShareGPT
    {"instruction": "Add the numbers.", "input": "2 2", "output": "4", "history": [["q", "a"]]}  Alpaca
    {"prompt": "2 + 2?", "completion": "4"}                                                      or without an answer
    {"input_ids": [...], "loss_mask": [...]}                                                     tokens (data.py)

with a `system` column or without. What else changes what a model sees, such as `tools`, is refused by its name.

    .venv/bin/python -m pytest tests/test_data.py
"""

import csv
import glob
import gzip
import hashlib
import io
import json
import os
import random
import re
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from .console import progress_is_hidden

_BOM = b"\xef\xbb\xbf"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?(:[^:]*){0,2}")  # id, revision, configuration, split
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_FORMATS = "input_ids + loss_mask, messages, conversations, instruction + output, or prompt"
_SYSTEM = ("system", "system_prompt", "system_message")
_REASONING = ("reasoning", "reasoning_content", "thinking")
_WEIGHTS = ("weight", "train", "training", "loss")  # of OpenAI, of axolotl, of ms-swift
_TOOL_KEYS = {"tools", "tool_calls", "tool_call_id", "function_call"}
_NOT_ENCODED = {*_TOOL_KEYS, "functions", "documents", "response_format"}
_NOT_ENCODED |= {"image", "images", "video", "videos", "audio", "audios"}
_THINKING_OPTIONS = {"enable_thinking", "thinking"}
_THINK_TAGS = re.compile(r"^\s*<think>\n*|\n*</think>\s*$")


class _JsonLines:
    """A file with one JSON value per line, or such a file in gzip. A row's position is the byte where its line starts,
    counted after unpacking."""

    def __init__(self, path: Path):
        self.path, self.name = path, _display(path)
        self._packed = None  # a gzip file that is kept open: it finds a byte only by reading up to it

    def __getstate__(self) -> dict:  # for the other processes that encode, where the open file cannot go
        return {**self.__dict__, "_packed": None}

    def lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(start in bytes, number from 1, bytes) of every line, blank ones included; never more than one in memory."""
        position = 0
        with _open(self.path) as file, _damage_named(self.name):
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
        total = None if self.path.suffix == ".gz" else self.path.stat().st_size
        hidden = progress_is_hidden()
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
        if self.path.suffix == ".gz":
            self._packed = self._packed or gzip.open(self.path)  # noqa: SIM115  kept open
            yield from _rows_at(self._packed, positions)
            return
        with self.path.open("rb") as file:
            yield from _rows_at(file, positions)


def _rows_at(file: BinaryIO, positions: Iterable[int]) -> Iterator["dict | ValueError"]:
    for position in positions:
        file.seek(position)
        yield _parse(file.readline())


def _open(path: Path) -> BinaryIO:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise OSError(f"{name} is damaged or not gzip: {error}") from error


class _Rows:
    """Rows that are read by index: of a JSON list or a CSV file, in memory; of Parquet, Arrow and the Hub, mapped."""

    def __init__(self, name: str, items: Sequence, digest: str):
        self.name, self.items, self.digest = name, items, digest

    def rows(self) -> Iterator[tuple[int, "dict | ValueError"]]:
        for position in range(len(self.items)):
            yield position + 1, _row(self.items[position])

    def scan(self) -> tuple[array, array, str]:
        return array("q", range(len(self.items))), array("q", range(1, len(self.items) + 1)), self.digest

    def read(self, positions: Iterable[int]) -> Iterator["dict | ValueError"]:
        for position in positions:
            yield _row(self.items[position])


def read_rows(
    files: list[str | Path], max_rows: int | None = None, seed: int = 0
) -> Iterator[tuple[str, "dict | ValueError"]]:
    """Every row of the files, one at a time, as it was written.

    Args:
        files: paths or glob patterns of files (see the top of this file), or names of Hub data sets:
            `"org/name"` is the `train` split, `"org/name@revision:config:split"` chooses; each part may be left out
            (`"org/name::test"`).
        max_rows: how many rows at most, drawn from all files by `seed`; they come in the order of the files.

    Returns:
        An iterator of (source, row). The source is `"file.jsonl:12"`: the line in the file, or the row's number, from
        1. The row is a dict, or the `ValueError` that says why it is not.

    Raises:
        OSError: for a file that is missing or damaged, a pattern without a match, a data set that is not found.
        ValueError: for a kind of file that is not read, and for a file without rows.
    """
    origins = resolve(files)
    if max_rows is not None:
        return _drawn(origins, max_rows, seed)
    return ((f"{origin.name}:{number}", row) for origin in origins for number, row in origin.rows())


def _drawn(origins: list, max_rows: int, seed: int) -> Iterator[tuple[str, "dict | ValueError"]]:
    places = [origin.scan()[:2] for origin in origins]
    total = sum(len(positions) for positions, _ in places)
    chosen, first = sorted(random.Random(seed).sample(range(total), min(max_rows, total))), 0
    for origin, (positions, numbers) in zip(origins, places, strict=True):
        own = [i - first for i in chosen if first <= i < first + len(positions)]
        first += len(positions)
        for i, row in zip(own, origin.read(positions[i] for i in own), strict=True):
            yield f"{origin.name}:{numbers[i]}", row


def resolve(files: str | Path | list[str | Path]) -> list[_JsonLines | _Rows]:
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
        # What `data regenerate` could not answer lies beside its answers
        matches = [match for match in matches if not match.name.endswith(".failed.jsonl")]
        if not matches:
            raise FileNotFoundError(f"no file matches {name}")
        return [_open_file(match) for match in matches]
    is_file_name = name.startswith((".", "/", "~")) or _kind_of(path) in _READERS
    if is_file_name or not _HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"no data file {name}")
    return [_open_hub(name)]


def _kind_of(path: Path) -> str:
    """The ending that says what is in the file: `.jsonl` of `a.jsonl.gz`."""
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix


def _open_file(path: Path) -> _JsonLines | _Rows:
    kind = _kind_of(path)
    if path.suffix == ".gz" and kind in (".parquet", ".arrow"):
        raise ValueError(f"{path} must be unpacked: {_READABLE}")
    if kind in _READERS:
        return _READERS[kind](path)
    with _open(path) as file, _damage_named(_display(path)):
        start = file.read(4096).removeprefix(_BOM).lstrip()
    if start and not start.startswith(b"{"):
        raise ValueError(f"{path} is not a kind of file that can be read: {_READABLE}")
    return _JsonLines(path)


def _open_json(path: Path) -> _JsonLines | _Rows:
    with _open(path) as file, _damage_named(_display(path)):
        start = file.read(4096).removeprefix(_BOM).lstrip()
        if not start.startswith(b"["):
            return _JsonLines(path)  # many .json files hold JSON lines
        file.seek(0)
        content = file.read()
    try:
        items = _loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return _rows_of(path, items, hashlib.sha256(content).hexdigest())


def _open_csv(path: Path) -> _Rows:
    """Cells are text as they stand, where `datasets` would make numbers of some, and would drop a cell of a line that
    has one too many; an empty one is null."""
    with _open(path) as file, _damage_named(_display(path)):
        content = file.read()
    csv.field_size_limit(2**31 - 1)
    try:
        rows = list(csv.DictReader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is not valid CSV: {error}") from error
    items = [
        "a line with more cells than the first" if None in row else {name: cell or None for name, cell in row.items()}
        for row in rows
    ]
    return _rows_of(path, items, hashlib.sha256(content).hexdigest())


def _open_table(path: Path) -> _Rows:
    import datasets

    kind = path.suffix.removeprefix(".")
    try:
        with quiet_datasets():
            items = datasets.load_dataset(kind, data_files=glob.escape(str(path)), split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise OSError(f"{path} cannot be read as {kind.title()}: {' '.join(str(error).split())}") from error
    with path.open("rb") as file:
        return _rows_of(path, items, hashlib.file_digest(file, "sha256").hexdigest())


def _rows_of(path: Path, items: Sequence, digest: str) -> _Rows:
    if not len(items):
        raise ValueError(f"{path} is empty")
    return _Rows(_display(path), items, digest)


_READERS = {
    ".jsonl": _JsonLines,
    ".ndjson": _JsonLines,
    ".json": _open_json,
    ".csv": _open_csv,
    ".parquet": _open_table,
    ".arrow": _open_table,
}
_READABLE = "data files are .jsonl, .ndjson, .json and .csv (each also with .gz), .parquet and .arrow"


def _open_hub(name: str) -> _Rows:
    import datasets

    id_and_revision, config, split = (name.split(":") + ["", ""])[:3]
    repo, _, revision = id_and_revision.partition("@")
    configs = [config] if config else []
    try:
        with quiet_datasets():
            rows = datasets.load_dataset(repo, *configs, split=split or "train", revision=revision or None)
    except (
        OSError,
        ValueError,
        datasets.exceptions.DatasetsError,
    ) as error:  # they list the configurations or the splits that there are
        reason = " ".join(str(error).split())
        raise OSError(
            f"{name} is neither a file here nor a data set that the Hub has: {reason} "
            f"(choose a configuration and a split with {repo}:CONFIG:SPLIT)"
        ) from error
    if not len(rows):
        raise ValueError(f"{name} is empty")
    return _Rows(name, rows, rows._fingerprint)


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """`datasets` draws its bars whether or not there is a terminal; here they follow this package's rule."""
    import datasets

    change = progress_is_hidden() and not datasets.are_progress_bars_disabled()
    if change:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if change:
            datasets.enable_progress_bars()


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
    except ValueError as error:  # of Python, for an integer of more than 4,300 digits
        return ValueError(f"not JSON that can be read: {error}")


def _loads(text: str):
    value = json.loads(text)
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()  # raises for half a surrogate pair, which no tokenizer takes
    return value


def _row(value) -> dict | ValueError:
    return value if isinstance(value, dict) else ValueError(f"a row must be a JSON object, not {_kind(value)}")


def _kind(value) -> str:
    return (
        "null"
        if value is None
        else {"str": "a string", "list": "a list", "dict": "an object"}.get(type(value).__name__, repr(value))
    )


def to_messages(row: dict) -> list[dict]:
    """The conversation of a row as `{"role", "content", "reasoning"?, "weight"?}` messages, from any text format.

    Everything in the row that changes what a model sees or learns is read or refused by its name: a system column is
    the first message, Alpaca's `history` stands before the question. Reasoning is taken from `reasoning`,
    `reasoning_content`, `thinking` or `<think>...</think>` in front of the answer, without the tags, which are the
    encoding's. Null, empty text and `"[]"` are the same as absent. Roles are left for the encoding to check.

    Raises `ValueError` for a row that holds no conversation, or something in it that cannot be encoded.
    """
    turns = row.get("messages") if row.get("messages") is not None else row.get("conversations")
    if turns is None:
        return [*before_question(row), *_question_and_answer(row)]
    if not isinstance(turns, list):
        raise ValueError(f"the messages must be a list, not {_kind(turns)}")
    if not _is_empty(row.get("history")):
        raise ValueError("the row has both messages and 'history': put the history into the messages")
    return _with_system(row, [_message(i, turn) for i, turn in enumerate(turns)])


def before_question(row: dict) -> list[dict]:
    """The messages that columns put before a row's question: its system text, and Alpaca's `history`, a list of
    `["question", "answer"]`. Raises `ValueError` as [`to_messages`] does."""
    if _is_empty(history := row.get("history")):
        return _with_system(row, [])
    pairs = history if isinstance(history, list) else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair) for pair in pairs):
        raise ValueError("'history' must be a list of [question, answer] pairs of strings")
    turns = [(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    return _with_system(row, [_message(i, {"role": role, "content": text}) for i, (role, text) in enumerate(turns)])


def _with_system(row: dict, messages: list[dict]) -> list[dict]:
    _check_columns(row)
    texts = {name: row[name] for name in _SYSTEM if not _is_empty(row.get(name))}
    if messages and messages[0].get("role") == "system" and texts:
        texts["the first message"] = messages[0].get("content")
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"{name!r} must be a string, not {_kind(text)}")
    if len(set(texts.values())) > 1:
        raise ValueError(f"the row has different system texts in {' and '.join(texts)}: keep one")
    if not texts or "the first message" in texts:
        return messages
    return [{"role": "system", "content": next(iter(texts.values()))}, *messages]


def _check_columns(row: dict) -> None:
    """Raises `ValueError` naming a column that changed what a model saw, which the encoding cannot write."""
    options = row.get("chat_template_kwargs")
    if isinstance(options, dict):  # SmolTalk 2: whether to think shows in the answer, all else is in the prompt
        row = row | {f"chat_template_kwargs.{name}": options[name] for name in options.keys() - _THINKING_OPTIONS}
    for name, value in row.items():
        if (name in _NOT_ENCODED or name.startswith("chat_template_kwargs.")) and not _is_empty(value):
            raise ValueError(f"the row defines {name!r}, which is outside this DeepSeek-V4 encoding")


def _is_empty(value) -> bool:
    # Some data sets keep JSON as text in a column, so that an empty list is "[]"
    return value in (None, False, "", [], {}) or isinstance(value, str) and value.strip() in ("", "[]", "{}", "null")


def _message(i: int, turn: dict) -> dict:
    if not isinstance(turn, dict):
        raise ValueError(f"message {i} must be an object, not {_kind(turn)}")
    message = {"role": _first(turn, "role", "from"), "content": _first(turn, "content", "value")}
    message |= {name: turn[name] for name in _TOOL_KEYS if not _is_empty(turn.get(name))}  # the encoding refuses them
    if refused := [name for name in _NOT_ENCODED - _TOOL_KEYS if not _is_empty(turn.get(name))]:
        raise ValueError(f"message {i} has {refused[0]!r}, which is outside this DeepSeek-V4 encoding")
    if isinstance(message["role"], str):
        message["role"] = _SHAREGPT_ROLES.get(message["role"], message["role"])
    if isinstance(message["content"], list):
        message["content"] = "".join(_part_text(i, part) for part in message["content"])
    if message["role"] == "assistant":
        message |= _reasoning(i, turn, message["content"]) | _weight(i, turn)
    return {key: value for key, value in message.items() if value is not None}


def _first(turn: dict, *names: str):
    return next((turn[name] for name in names if turn.get(name) is not None), None)


def _reasoning(i: int, turn: dict, content) -> dict:
    """`content` and `reasoning` of an answer, without think tags."""
    given = {name: turn[name] for name in _REASONING if turn.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str):
            raise ValueError(f"message {i}: {name!r} must be a string, not {_kind(value)}")
    found = {name: _THINK_TAGS.sub("", value) for name, value in given.items()}
    if isinstance(content, str):
        inline, content = _split_inline(i, content)
        found |= {} if inline is None else {"content": inline}
    found = {name: value for name, value in found.items() if value.strip()} or found
    if len({value.strip() for value in found.values()}) > 1:
        raise ValueError(f"message {i} has different reasoning in {' and '.join(map(repr, found))}: keep one")
    return {"content": content, "reasoning": next(iter(found.values()), None)}


def _split_inline(i: int, content: str) -> tuple[str | None, str]:
    """Reasoning and answer of a content that has both. Line breaks beside the tags are other models' template."""
    before, end, after = content.partition("</think>")
    opens = content.lstrip().startswith("<think>")
    if opens and not end:
        raise ValueError(f"message {i} opens <think> and never closes it: its answer is missing")
    # A model whose prompt ended with <think> writes the closing tag only. Without an answer behind it, or with another
    # tag before it, it is a text about tags.
    if not end or not opens and ("<think>" in before or not after.strip()):
        return None, content
    return _THINK_TAGS.sub("", before).strip("\n"), after.lstrip("\n")


def _weight(i: int, turn: dict) -> dict:
    """`{"weight": 0}` for an answer that is context only, under the names that fine-tuning formats have for it."""
    given = {name: turn[name] for name in _WEIGHTS if turn.get(name) is not None}
    for name, value in given.items():
        if value not in (0, 1):
            raise ValueError(f"message {i}: {name!r} must be 0 or 1, not {_kind(value)}")
    return {"weight": 0} if 0 in given.values() else {}


def _part_text(i: int, part) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(part.get("text"), str):
        found = f"a part of type {kind!r}" if kind != "text" else "a text part without text"
        raise ValueError(f'message {i} has {found}; only {{"type": "text", "text": ...}} parts can be encoded')
    return part["text"]


def _question_and_answer(row: dict) -> list[dict]:
    """The messages of an Alpaca row, or of a prompt with or without its answer."""
    question = "instruction" if row.get("instruction") is not None else "prompt"
    answers = ("completion", "response", "output") if question == "prompt" else ("output",)
    answer = next((name for name in answers if row.get(name) is not None), None)
    if row.get(question) is None or question == "instruction" and answer is None:
        raise ValueError(f"the row has none of {_FORMATS}; its keys are {', '.join(map(repr, row)) or 'none at all'}")
    for key in (question, "input", answer):
        if not isinstance(row.get(key), str | None):
            raise ValueError(f"{key!r} must be a string, not {_kind(row[key])}")
    if not _is_empty(row.get("context")):
        raise ValueError(f"the row has 'context' beside {question!r}: put it into {question!r}, or remove it")
    text = row[question] + (f"\n\n{row['input']}" if row.get("input") else "")
    messages = [{"role": "user", "content": text}]
    return messages if answer is None else [*messages, _message(1, {"role": "assistant", "content": row[answer]})]
