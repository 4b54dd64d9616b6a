"""The prompts of a benchmark: seven public sets from the Hub, and your own files.

    sets = [read_file(Path("mine.jsonl")), fetch("gsm8k")]
    for prompt in sets[0].select(20):       # the first 20 after a seeded shuffle
        prompt.history, prompt.turns

A file is JSON lines (also packed, `.jsonl.gz`), `.json`, `.csv`, `.parquet` or `.arrow`, and the set is named after
it, without the suffix. A row is one of

    {"turns": ["Write a poem.", "Now shorter."]}                     every turn is answered, one after the other
    {"messages": [{"role": "user", "content": "2 + 2?"}]}            the last user message is answered
    {"prompt": "2 + 2?"}

A `system` column is the first message of any of them; `common/data_files.py` has the other formats.

The public sets are those of the paper, with the usual template of each in our own words. Reference answers are not
read, as only acceptance and speed are measured.
"""

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..common.console import UsageError
from ..common.data_files import before_question, read_rows, to_messages
from ..encoding_deepseek_v4 import encode_messages

BOXED = "{problem}\n\nReason step by step and put the final answer in \\boxed{{}}."


@dataclass(frozen=True)
class Prompt:
    """One row of a set.

    Attributes:
        index (`int`): its position in the set, from 0.
        turns (`tuple[str]`): the user's messages, each of which is answered.
        history (`tuple[dict]`): messages before the first turn.
    """

    index: int
    turns: tuple[str, ...]
    history: tuple[dict, ...] = ()


@dataclass
class PromptSet:
    """A named list of prompts."""

    name: str
    prompts: list[Prompt] = field(repr=False)

    def select(self, num_prompts: int | None) -> "PromptSet":
        """The first `num_prompts` (None: all) after a shuffle with a fixed seed."""
        prompts = list(self.prompts)
        random.Random(0).shuffle(prompts)
        return PromptSet(self.name, prompts[:num_prompts])

    def digest(self) -> str:
        """A hash of the prompts in their order."""
        text = json.dumps([(prompt.index, prompt.history, prompt.turns) for prompt in self.prompts])
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class PublicSet:
    """Where a public set is on the Hub, and how its rows become turns."""

    repo: str
    split: str
    turns: Callable[[dict], list[str]]
    config: str | None = None
    data_files: str | None = None  # for a repository with a loading script, which `datasets` no longer runs


def _mbpp(row: dict) -> list[str]:
    tests = "\n".join(row["test_list"])
    return [f"{row['prompt']}\n\nAnswer with a Python function that passes these tests:\n\n```python\n{tests}\n```"]


def _humaneval(row: dict) -> list[str]:
    return [f"Complete this Python function so that it does what its docstring says:\n\n```python\n{row['prompt']}```"]


def _livecodebench(row: dict) -> list[str]:
    text = f"Solve this programming problem in Python.\n\n{row['question_content']}\n\n"
    if row["starter_code"]:
        return [f"{text}Begin with this code:\n\n```python\n{row['starter_code']}\n```"]
    return [f"{text}Read the input from stdin and print the answer to stdout."]


PUBLIC_SETS = {
    "gsm8k": PublicSet("openai/gsm8k", "test", lambda row: [BOXED.format(problem=row["question"])], config="main"),
    "math-500": PublicSet("HuggingFaceH4/MATH-500", "test", lambda row: [BOXED.format(problem=row["problem"])]),
    "aime25": PublicSet("math-ai/aime25", "test", lambda row: [BOXED.format(problem=row["problem"])]),
    "humaneval": PublicSet("openai/openai_humaneval", "test", _humaneval),
    "mbpp": PublicSet("google-research-datasets/mbpp", "test", _mbpp, config="sanitized"),
    # Only the newest of the six files, which has the 175 problems that the last release added
    "livecodebench": PublicSet(
        "livecodebench/code_generation_lite", "train", _livecodebench, data_files="test6.jsonl"
    ),
    "mt-bench": PublicSet("HuggingFaceH4/mt_bench_prompts", "train", lambda row: list(row["prompt"])),
}


def check_names(datasets: list[str], files: list[Path]) -> None:
    """Raises `UsageError` without any set, for an unknown public set, and for a name that occurs twice."""
    if not datasets and not files:
        raise UsageError("no prompts: give --datasets, --prompts or both")
    names = [dataset.partition("@")[0] for dataset in datasets]
    for name in names:
        if name not in PUBLIC_SETS:
            raise UsageError(f"unknown set {name!r}; --datasets has {', '.join(PUBLIC_SETS)}; use --prompts for files")
    names += map(set_name, files)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the set {name!r} is given twice: a set is named after its file, without the suffix")


def set_name(path: Path) -> str:
    """The name of a file's set: `mine` of `mine.jsonl` and of `mine.jsonl.gz`."""
    return Path(path.name.removesuffix(".gz")).stem


def read_file(path: Path) -> PromptSet:
    """The prompts of a data file, in any format of `common/data_files.py`.

    Raises `UsageError` for an empty file, `ValueError` that names the line for a row that holds no prompt, `OSError`
    for no file.
    """
    if path.is_file() and not path.read_bytes().strip():
        raise UsageError(f"--prompts {path} is empty")
    prompts = []
    for index, (source, row) in enumerate(read_rows([path])):
        try:
            if isinstance(row, ValueError):
                raise row
            history, turns, _ = history_and_turns(row)
            for turn in turns:
                encode_messages([*history, {"role": "user", "content": turn}])
        except ValueError as error:
            raise ValueError(f"{source} is not a prompt: {error}") from error
        prompts.append(Prompt(index, tuple(turns), tuple(history)))
    return PromptSet(set_name(path), prompts)


def history_and_turns(row: dict) -> tuple[list[dict], list[str], list[dict]]:
    """Messages before the first turn, the turns to answer, and the messages that the row has as its last answer."""
    given = {
        name for name in ("messages", "conversations", "instruction", "turns", "prompt") if row.get(name) is not None
    }
    if not given:
        raise ValueError(f'it has none of "turns", "messages" and "prompt"; its keys are {", ".join(row) or "none"}')
    # Messages come first: beside them, UltraChat repeats its first question as "prompt", and others count "turns".
    if given <= {"turns", "prompt"}:
        turns = row["turns"] if "turns" in given else [row["prompt"]]
        if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
            raise ValueError('"turns" must be a list of texts, and "prompt" a text')
        if "turns" in given:
            return before_question(row), turns, []
    messages = to_messages(row)
    end = len(messages)
    while end and messages[end - 1].get("role") == "assistant":
        end -= 1
    if not end or messages[end - 1].get("role") != "user":
        raise ValueError("its messages have no user message at the end, or before a last answer")
    return messages[: end - 1], [messages[end - 1].get("content")], messages[end:]


def fetch(dataset: str) -> PromptSet:
    """A public set from the Hub or its cache; `name@revision` pins one.

    Raises `OSError` for whatever went wrong.
    """
    import datasets

    name, _, revision = dataset.partition("@")
    public = PUBLIC_SETS[name]
    try:
        if public.data_files is None:
            rows = datasets.load_dataset(public.repo, public.config, split=public.split, revision=revision or None)
        else:
            at = f"{public.repo}@{revision}" if revision else public.repo
            url = f"hf://datasets/{at}/{public.data_files}"
            rows = datasets.load_dataset("json", data_files=url, split=public.split)
        prompts = [Prompt(index, tuple(public.turns(row))) for index, row in enumerate(rows)]
        if not prompts:
            raise ValueError("it has no rows")
    except Exception as error:  # of the Hub, HTTP or Arrow: the benchmark goes on with the other sets
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OSError(f"the set {name} ({public.repo}) could not be downloaded: {reason}") from error
    return PromptSet(name, prompts)
