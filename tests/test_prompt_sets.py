"""The prompts of a benchmark: read as written, chosen alike in every run, or refused by name."""

import gzip
import json

import datasets
import pytest

from hyperdflash.benchmark.prompt_sets import PUBLIC_SETS, Prompt, check_names, fetch, read_file
from hyperdflash.common.console import UsageError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_may_hold_turns_messages_and_prompts(tmp_path):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
    rows = [{"turns": ["a", "b"]}, {"messages": chat}, {"prompt": "c"}, {"messages": chat[:2]}]
    found = read_file(write(tmp_path / "mine.jsonl", rows))
    assert found.name == "mine"
    assert (
        found.prompts
        == [
            Prompt(0, ("a", "b")),
            Prompt(1, ("2 + 2?",), tuple(chat[:3])),  # the answer that is there is not read
            Prompt(2, ("c",)),
            Prompt(3, ("Hello",), tuple(chat[:1])),
        ]
    )


def test_a_packed_file_names_its_set_as_the_plain_one_does(tmp_path):
    plain = write(tmp_path / "mine.v2.jsonl", [{"prompt": "a"}])
    packed = tmp_path / "mine.v2.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_file(packed) == read_file(plain)
    assert read_file(packed).name == "mine.v2"
    with pytest.raises(UsageError, match="'mine.v2' is given twice"):
        check_names([], [plain, packed])


def test_messages_win_over_a_prompt_and_a_system_column_is_read(tmp_path):
    """UltraChat's rows have their first question as `prompt` beside the messages."""
    chat = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
        {"role": "assistant", "content": "<think>r</think>4"},
    ]
    system = {"role": "system", "content": "S"}
    rows = [
        {"prompt": "1", "messages": chat},
        {"prompt": None, "turns": None, "messages": chat},
        {"turns": 2, "conversations": chat, "messages": None},
        {"prompt": "1", "turns": ["a", "b"], "system": "S", "messages": None},
        {"prompt": "3", "system_prompt": "S", "history": [["1", "2"]], "messages": None},
        {"prompt": None, "turns": None, "instruction": "3", "output": "4", "system": "S"},
    ]
    found = read_file(write(tmp_path / "mine.jsonl", rows)).prompts
    assert found == [
        Prompt(0, ("3",), tuple(chat[:2])),
        Prompt(1, ("3",), tuple(chat[:2])),
        Prompt(2, ("3",), tuple(chat[:2])),
        Prompt(3, ("a", "b"), (system,)),
        Prompt(4, ("3",), (system, *chat[:2])),
        Prompt(5, ("3",), (system,)),
    ]


def test_the_first_prompts_of_a_shuffle_that_is_always_the_same(tmp_path):
    found = read_file(write(tmp_path / "mine.jsonl", [{"prompt": f"p{i}"} for i in range(50)]))
    few, more, everything = found.select(5), found.select(8), found.select(None)
    assert [p.index for p in few.prompts] == [p.index for p in more.prompts[:5]] != [0, 1, 2, 3, 4]
    assert sorted(p.index for p in everything.prompts) == list(range(50))
    assert few.digest() == found.select(5).digest() != more.digest()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, "none of"),
        ({"turns": []}, "must be a list of texts"),
        ({"turns": ["a", 3]}, "must be a list of texts"),
        ({"prompt": " "}, "must be a list of texts"),
        ({"prompt": None, "messages": None}, "none of"),
        ({"prompt": "x", "tools": [{}]}, "the row defines 'tools'"),
        ({"turns": ["x"], "tools": [{}]}, "the row defines 'tools'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user message"),
        ({"messages": [{"role": "user", "content": None}]}, "content"),
        ({"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}]}, "tool"),
        ([1], "JSON object"),
    ],
)
def test_a_row_that_is_not_a_prompt_is_named_by_its_line(tmp_path, row, message):
    path = write(tmp_path / "mine.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(ValueError, match=rf"mine\.jsonl:2 is not a prompt: .*{message}"):
        read_file(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_a_usage_error(tmp_path, content):
    (tmp_path / "mine.jsonl").write_text(content)
    with pytest.raises(UsageError, match=r"mine\.jsonl is empty"):
        read_file(tmp_path / "mine.jsonl")


def test_names_are_known_and_occur_once(tmp_path):
    check_names(["gsm8k", "mt-bench@abc"], [tmp_path / "mine.jsonl"])
    for names, files, message in (
        ([], [], "no prompts"),
        (["gsm9k"], [], "unknown set 'gsm9k'"),
        (["gsm8k", "gsm8k@abc"], [], "'gsm8k' is given twice"),
        (["gsm8k"], [tmp_path / "gsm8k.jsonl"], "'gsm8k' is given twice"),
        ([], [tmp_path / "a" / "x.jsonl", tmp_path / "b" / "x.jsonl"], "'x' is given twice"),
    ):
        with pytest.raises(UsageError, match=message):
            check_names(names, files)


ROWS = {
    "gsm8k": {"question": "QUESTION", "answer": "ANSWER"},
    "math-500": {"problem": "QUESTION", "solution": "ANSWER", "answer": "ANSWER"},
    "aime25": {"problem": "QUESTION", "answer": "ANSWER"},
    "humaneval": {"prompt": "QUESTION", "canonical_solution": "ANSWER"},
    "mbpp": {"prompt": "QUESTION", "code": "ANSWER", "test_list": ["assert f(1)"]},
    "livecodebench": {
        "question_content": "QUESTION",
        "starter_code": "class Solution",
        "private_test_cases": "ANSWER",
    },
    "mt-bench": {"prompt": ["QUESTION", "SECOND"], "reference": ["ANSWER"]},
}


@pytest.mark.parametrize("name", list(PUBLIC_SETS))
def test_a_public_set_asks_its_questions_and_shows_no_answer(name, monkeypatch):
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        return [ROWS[name], ROWS[name]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    found = fetch(name)
    assert (found.name, [prompt.index for prompt in found.prompts]) == (name, [0, 1])
    assert "QUESTION" in found.prompts[0].turns[0]
    assert "ANSWER" not in str(found.prompts)
    assert len(found.prompts[0].turns) == (2 if name == "mt-bench" else 1)
    assert "trust_remote_code" not in calls[0][1]


@pytest.mark.parametrize("name", ["gsm8k", "livecodebench"])
def test_a_revision_reaches_the_hub(name, monkeypatch):
    """https://github.com/huggingface/huggingface-inference-toolkit/pull/137"""
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **kw: calls.append((a, kw)) or [ROWS[name]])
    fetch(f"{name}@abc123")
    assert "abc123" in str(calls)


def test_a_set_that_cannot_be_had_is_named(monkeypatch):
    for error in (ConnectionError("no\nnetwork"), RuntimeError("odd"), KeyError("question")):

        def load_dataset(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(
            OSError, match=r"the set gsm8k \(openai/gsm8k\) could not be downloaded: (no network|odd|'question')"
        ):
            fetch("gsm8k")
