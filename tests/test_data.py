"""Training data: every row read, encoded, masked or left out with a reason; masks written by hand.

.venv/bin/python -m pytest tests/test_data.py
"""

import gzip
import importlib
import json
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from test_encoding import ASSISTANT, BOS, CLOSE, EOS, OPEN, USER, by_hand, make_tokenizer, say
from transformers import AutoTokenizer, TrainingArguments

from hyperdflash.common.data_files import read_rows
from hyperdflash.training import data
from hyperdflash.training.data import hash_data, hash_tokenizer, load_data, load_data_with_report
from hyperdflash.training.dataset import SampleDataset
from hyperdflash.training.trainer import EpochTrainer

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Nothing comes from an earlier test, and nothing goes to the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def chat(question="Hi", answer="Hello", **extra):
    return {"messages": say(("u", question), ("a", answer)), **extra}


def write(path, *rows, end="\n", encoding="utf-8"):
    """Rows as lines; a string is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("".join(line + end for line in lines).encode(encoding))
    return path


def rows_of(path, tokenizer, **kwargs):
    """(ids, mask) of all rows that are kept."""
    return [(row["input_ids"], row["loss_mask"]) for row in load_data([path], tokenizer, **kwargs)]


def only(path, tokenizer, **kwargs):
    (row,) = rows_of(path, tokenizer, **kwargs)
    return row


HI = (((BOS, USER), 0), ("Hi", 0), ((ASSISTANT, CLOSE), 0), ("Hello", 1), ((EOS,), 1))  # chat(), token by token


# --------------------------------------------------------------------------------------------------------- row formats


@pytest.mark.parametrize(
    "row",
    [
        chat(),
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Hello"}]},
        {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "input": None, "output": "Hello", "messages": None, "mode": None, "effort": None},
    ],
)
def test_every_text_format_gives_the_same_tokens(row, tokenizer, tmp_path):
    assert only(write(tmp_path / "a.jsonl", row), tokenizer) == by_hand(tokenizer, *HI)


def test_alpaca_input_follows_the_instruction(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"instruction": "Add.", "input": "2 2", "output": "4"})
    asked = by_hand(tokenizer, ((BOS, USER), 0), ("Add.\n\n2 2", 0), ((ASSISTANT, CLOSE), 0), ("4", 1), ((EOS,), 1))
    assert only(path, tokenizer) == asked


def test_a_system_turn_of_sharegpt_is_the_system_text(tokenizer, tmp_path):
    turns = [{"from": who, "value": text} for who, text in (("system", "Be kind."), ("human", "Hi"), ("gpt", "Yo"))]
    path = write(tmp_path / "a.jsonl", {"conversations": turns})
    parts = ((BOS,), 0), ("Be kind.", 0), ((USER,), 0), ("Hi", 0), ((ASSISTANT, CLOSE), 0), ("Yo", 1), ((EOS,), 1)
    assert only(path, tokenizer) == by_hand(tokenizer, *parts)


def test_given_tokens_win_over_the_text_of_the_row(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", chat(input_ids=[5, 6, 7, 8], loss_mask=[0, 0, 1, 1], mode="thinking"))
    (row,) = load_data([path], tokenizer)
    expected = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "length": 4, "mode": "thinking"}
    assert row == expected | {"source": f"{path}:1"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "input_ids has 3 entries but loss_mask has 2"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1, 1]}, "input_ids has 3 entries but loss_mask has 4"),
        (
            {"input_ids": [1, 262, 3], "loss_mask": [0, 1, 1]},
            "input_ids holds 262, outside the tokenizer's 262 tokens",
        ),
        ({"input_ids": [1, -1, 3], "loss_mask": [0, 1, 1]}, "input_ids holds -1, outside"),
        ({"input_ids": [1, 10**30, 3], "loss_mask": [0, 1, 1]}, "input_ids holds 10{30}, outside"),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, "loss_mask holds 2; it must be 0 or 1"),
        ({"input_ids": [1, 2.0, 3], "loss_mask": [0, 1, 1]}, "input_ids must be a list of integers"),
        ({"input_ids": [], "loss_mask": []}, "input_ids must be a list of integers, and not empty"),
        ({"input_ids": "abc", "loss_mask": [0, 1, 1]}, "input_ids must be a list of integers"),
        ({"input_ids": [1, 2, 3]}, "the row has input_ids but no loss_mask"),
    ],
)
def test_a_given_mask_that_does_not_fit_is_refused_by_line(given, message, tokenizer, tmp_path):
    """https://github.com/hiyouga/LlamaFactory/pull/9630"""
    path = write(tmp_path / "a.jsonl", chat(), given)
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: {message}"):
        load_data([path], tokenizer)


def test_mode_and_effort_of_a_row_win(tokenizer, tmp_path):
    messages = say(("u", "Hi"), ("a", "Hello", "hm"))
    path = write(tmp_path / "a.jsonl", {"messages": messages, "mode": "thinking", "effort": "max"}, chat())
    first, second = load_data([path], tokenizer, effort="high")
    effort = data.encoding.EFFORT_INSTRUCTIONS["preview"]["max"]
    head = ((BOS,), 0), (effort, 0), ((USER,), 0), ("Hi", 0), ((ASSISTANT, OPEN), 0)
    ids, mask = by_hand(tokenizer, *head, ("hm", 1), ((CLOSE,), 1), ("Hello", 1), ((EOS,), 1))
    assert (first["input_ids"], first["loss_mask"], first["mode"]) == (ids, mask, "thinking")
    assert (second["input_ids"], second["mode"]) == (by_hand(tokenizer, *HI)[0], "non-thinking")


def test_a_row_written_for_another_generation_of_the_encoding_is_refused(tokenizer, tmp_path):
    """Public data sets use the key for text, which is no generation."""
    path = write(tmp_path / "a.jsonl", {**chat(), "generation": "0731"})
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the row was written for generation '0731'.*not 'preview'"):
        load_data([path], tokenizer)
    assert len(load_data([path], tokenizer, generation="0731")) == 1
    rows = [{**chat(), "generation": other} for other in ("a text", ["a", "list"], {"an": "object"}, 3)]
    assert len(load_data([write(tmp_path / "b.jsonl", *rows)], tokenizer)) == 4


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_is_learned_in_thinking_mode_under_either_name(key, tokenizer, tmp_path):
    answer = {"role": "assistant", "content": "Hello", key: "hm"}
    path = write(tmp_path / "a.jsonl", {"messages": [*say(("u", "Hi")), answer]})
    head = ((BOS, USER), 0), ("Hi", 0), ((ASSISTANT, OPEN), 0)
    expected = by_hand(tokenizer, *head, ("hm", 1), ((CLOSE,), 1), ("Hello", 1), ((EOS,), 1))
    assert only(path, tokenizer, mode="thinking") == expected
    assert only(path, tokenizer) == by_hand(tokenizer, *HI)


# ------------------------------------------------------------------------------------- reasoning, system text, weights


def thought(tokenizer, *parts):
    """A thinking answer to "Hi", token by token."""
    return by_hand(tokenizer, ((BOS, USER), 0), ("Hi", 0), ((ASSISTANT, OPEN), 0), *parts, ((EOS,), 1))


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "<think>r</think>a"},
        {"content": "<think>\nr\n</think>\n\na"},
        {"content": "r</think>a"},  # the prompt had the opening tag
        {"content": "a", "thinking": "r"},
        {"content": "a", "reasoning_content": "<think>r</think>"},
        {"content": "a", "reasoning": "<think>\nr"},
        {"content": "a", "thinking": "r\n</think>\n"},
        {"content": "<think>r</think>a", "reasoning_content": "r"},
        {"content": "<think>r</think>a", "reasoning_content": ""},
        {"content": [{"type": "text", "text": "<think>r</think>"}, {"type": "text", "text": "a"}]},
    ],
    ids=str,
)
def test_reasoning_is_found_wherever_a_data_set_has_it(answer, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", {"messages": [*say(("u", "Hi")), {"role": "assistant", **answer}]})
    expected = thought(tokenizer, ("r", 1), ((CLOSE,), 1), ("a", 1))
    assert only(path, tokenizer, mode="thinking") == expected
    ids, mask = only(path, tokenizer)  # without thinking, the answer alone
    assert (ids, mask) == by_hand(
        tokenizer, ((BOS, USER), 0), ("Hi", 0), ((ASSISTANT, CLOSE), 0), ("a", 1), ((EOS,), 1)
    )


@pytest.mark.parametrize("text", ["use <think> and </think>", "a</think>", "<script>", f"{ASSISTANT}{CLOSE}"])
def test_an_answer_about_tags_is_no_reasoning(text, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", chat(answer=text))
    assert only(path, tokenizer, mode="thinking") == thought(tokenizer, ((CLOSE,), 1), (text, 1))


def test_an_empty_thought_is_an_answer_without_reasoning(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", chat(answer="<think>\n\n</think>\n\na"))
    assert only(path, tokenizer, mode="thinking") == thought(tokenizer, ((CLOSE,), 1), ("a", 1))


def test_a_thinking_answer_of_alpaca_and_of_a_prompt_is_read_alike(tokenizer, tmp_path):
    for row in ({"instruction": "Hi", "output": "<think>r</think>a"}, {"prompt": "Hi", "completion": "r</think>a"}):
        expected = thought(tokenizer, ("r", 1), ((CLOSE,), 1), ("a", 1))
        assert only(write(tmp_path / "a.jsonl", row), tokenizer, mode="thinking") == expected


SYSTEM = ((BOS,), 0), ("Be kind.", 0), ((USER,), 0), ("Hi", 0), ((ASSISTANT, CLOSE), 0), ("Hello", 1), ((EOS,), 1)


@pytest.mark.parametrize(
    "row",
    [
        chat(system="Be kind."),
        chat(system_prompt="Be kind.", system=None),
        chat(system_message="Be kind.", system=""),
        {"messages": say(("s", "Be kind."), *(("u", "Hi"), ("a", "Hello"))), "system": "Be kind."},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "system": "Be kind."},
        {"instruction": "Hi", "output": "Hello", "system": "Be kind.", "history": []},
        {"prompt": "Hi", "response": "Hello", "system_prompt": "Be kind."},
    ],
)
def test_a_system_column_is_what_the_model_saw_first(row, tokenizer, tmp_path):
    assert only(write(tmp_path / "a.jsonl", row), tokenizer) == by_hand(tokenizer, *SYSTEM)


def test_alpacas_history_stands_before_the_question(tokenizer, tmp_path):
    row = {"instruction": "Hi", "output": "Hello", "history": [["1", "2"], ["3", "4"]], "system": "S"}
    told = say(("s", "S"), ("u", "1"), ("a", "2"), ("u", "3"), ("a", "4"), ("u", "Hi"), ("a", "Hello"))
    first, second = rows_of(write(tmp_path / "a.jsonl", row, {"messages": told}), tokenizer)
    assert first == second


def test_no_column_that_a_model_saw_is_passed_over(tokenizer, tmp_path):
    for row, named in (
        (chat(system="Be kind.", system_prompt="Be rude."), "different system texts in system and system_prompt"),
        ({"messages": say(("s", "S"), ("u", "Hi"), ("a", "x")), "system": "T"}, "system and the first message"),
        (chat(system=["Be kind."]), "'system' must be a string, not a list"),
        (chat(history=[["1", "2"]]), "both messages and 'history'"),
        ({"instruction": "Hi", "output": "Hello", "history": ["1"]}, "'history' must be a list of"),
        ({"instruction": "Hi", "output": "Hello", "context": "a text"}, "'context' beside 'instruction'"),
        ({"instruction": 0, "output": "Hello"}, "'instruction' must be a string, not 0"),
        ({"instruction": "Hi", "input": 0, "output": "Hello"}, "'input' must be a string, not 0"),
        (chat(functions="[{}]"), "the row defines 'functions'"),
        (chat(documents=[{"text": "x"}]), "the row defines 'documents'"),
        (chat(images=["x.png"]), "the row defines 'images'"),
        (chat(chat_template_kwargs={"custom_instructions": "x"}), "'chat_template_kwargs.custom_instructions'"),
        ({"messages": [{"role": "user", "content": "Hi", "images": ["x"]}]}, "message 0 has 'images'"),
        (chat(answer="<think>r"), "message 1 opens <think> and never closes it"),
        ({"messages": [{"role": "assistant", "content": "<think>r</think>a", "thinking": "s"}]}, "message 0 has diff"),
        ({"messages": [{"role": "assistant", "content": "a", "thinking": True}]}, "'thinking' must be a string"),
        ({"messages": [{"role": "assistant", "content": "a", "weight": 2}]}, "'weight' must be 0 or 1, not 2"),
        ({"prompt": ["Hi"]}, "'prompt' must be a string, not a list"),
    ):
        path = write(tmp_path / "a.jsonl", chat(), row)
        with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{named}"):
            load_data([path], tokenizer)


@pytest.mark.parametrize("nothing", ["[]", "", " ", [], {}, None, "null", False])
def test_an_empty_column_is_an_absent_one(nothing, tokenizer, tmp_path):
    names = ("tools", "functions", "documents", "images", "system", "history", "context", "chat_template_kwargs")
    row = chat(**dict.fromkeys(names, nothing))
    row["messages"] = [{**message, "tool_calls": nothing, "function_call": nothing} for message in row["messages"]]
    path = write(
        tmp_path / "a.jsonl", row, chat(chat_template_kwargs={"enable_thinking": False, "xml_tools": nothing})
    )
    assert rows_of(path, tokenizer) == [by_hand(tokenizer, *HI)] * 2


@pytest.mark.parametrize("zero", [{"weight": 0}, {"train": False}, {"training": False}, {"loss": False}], ids=str)
def test_an_answer_of_weight_0_is_context(zero, tokenizer, tmp_path):
    messages = say(("u", "1"), ("a", "2"), ("u", "3"), ("a", "4"))
    plain, weighted = rows_of(
        write(
            tmp_path / "a.jsonl",
            {"messages": messages},
            {"messages": [messages[0], {**messages[1], **zero}, messages[2], {**messages[3], "weight": 1}]},
        ),
        tokenizer,
    )
    assert plain[0] == weighted[0]
    assert (sum(plain[1]), weighted[1][-2:], sum(weighted[1])) == (4, [1, 1], 2)


# ----------------------------------------------------------------------------------------------------------- bad lines

BROKEN = {
    "cut in half": ('{"messages": [{"role": "us', "not JSON: Unterminated string starting at character"),
    "a string": ('"text"', "a row must be a JSON object, not a string"),
    "a list": ("[]", "a row must be a JSON object, not a list"),
    "null": ("null", "a row must be a JSON object, not null"),
    "a number": ("3", "a row must be a JSON object, not 3"),
    "no known key": ('{"text": "abc"}', "has none of input_ids .* instruction .* keys are 'text'"),
    "no messages": ('{"messages": []}', "the list of messages is empty"),
    "messages in a string": ('{"messages": "[]"}', "the messages must be a list, not a string"),
    "a message in a string": ('{"messages": ["Hi"]}', "message 0 must be an object, not a string"),
    "no content": ('{"messages": [{"role": "user"}]}', "message 0 .* 'content' must be a string"),
    "unknown role": ('{"messages": [{"role": "bot", "content": ""}]}', "unknown role 'bot'"),
    "unknown mode": ('{"messages": [{"role": "user", "content": ""}], "mode": "chat"}', "unknown mode 'chat'"),
    "tools": ('{"messages": [{"role": "user", "content": ""}], "tools": [{}]}', "row defines 'tools'"),
    "nested a thousand deep": ("[" * 100_000, "nested too deeply"),
    "an integer of 5,000 digits": ('{"id": ' + "1" * 5000 + "}", "not JSON that can be read: Exceeds the limit"),
    "a list as effort": ('{"prompt": "a", "completion": "b", "effort": ["max"]}', r"unknown effort \['max'\]"),
    "a list as mode": ('{"prompt": "a", "completion": "b", "mode": ["thinking"]}', r"unknown mode \['thinking'\]"),
    "half a surrogate pair": (r'{"instruction": "\ud83d", "output": "a"}', "half of a surrogate pair"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_line_stops_with_file_and_line_or_is_counted(kind, tokenizer, tmp_path):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/1694 and
    https://github.com/madiabio/agentic-theorem-prover/issues/125"""
    line, message = BROKEN[kind]
    path = write(tmp_path / "a.jsonl", chat(), chat(), line, chat(), chat())
    with pytest.raises(ValueError, match=rf"a\.jsonl:3: .*{message}.*skip_bad_rows"):
        load_data([path], tokenizer)
    dataset, report = load_data_with_report([path], tokenizer, skip_bad_rows=True)
    assert dataset["source"][:] == [f"{path}:{i}" for i in (1, 2, 4, 5)]
    assert (report.num_rows, report.num_kept, report.counts) == (5, 4, {"bad row": 1})
    assert f"{path}:3: " in report.examples["bad row"][0]
    assert "1 left out: bad row" in report.lines()[1]


def test_bad_rows_that_were_skipped_before_still_stop_a_strict_run(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", chat(), "{")
    load_data([path], tokenizer, skip_bad_rows=True)
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON"):
        load_data([path], tokenizer)


def test_blank_lines_and_line_ends_change_nothing_but_the_line_numbers(tokenizer, tmp_path):
    """https://github.com/microsoft/graphrag/issues/2424"""
    path = write(tmp_path / "a.jsonl", "", chat("a"), "  \t", "", chat("b"), end="\r\n")
    path.write_bytes(path.read_bytes() + json.dumps(chat("c")).encode())  # no line end after the last
    dataset, report = load_data_with_report([path], tokenizer)
    assert dataset["source"][:] == [f"{path}:{i}" for i in (2, 5, 6)]
    assert report.counts == {}
    plain = load_data([write(tmp_path / "b.jsonl", chat("a"), chat("b"), chat("c"))], tokenizer)
    assert dataset["input_ids"][:] == plain["input_ids"][:]


@pytest.mark.parametrize("content", [b"", b"\n \r\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_file_without_rows_is_an_error(content, name, tokenizer, tmp_path):
    """https://github.com/microsoft/graphrag/issues/2424"""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} is empty"):
        load_data([write(tmp_path / "good.jsonl", chat()), tmp_path / name], tokenizer)
    with pytest.raises(ValueError, match=f"{name} is empty"):
        list(read_rows([tmp_path / name]))


def test_line_separators_of_unicode_inside_a_text_end_no_line(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", chat("a\u2028b\u0085c"), chat())
    assert [source for source, _ in read_rows([path])] == [f"{path}:1", f"{path}:2"]
    assert len(load_data([path], tokenizer)) == 2


def test_the_tiny_corpus_reads_such_lines_whole(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "tiny" / "make")
    corpus, prompts = importlib.import_module("corpus"), importlib.import_module("prompts")
    words = " ".join(f"w{i}" for i in range(corpus.NGRAM_WORDS - 1))
    path = write(tmp_path / "a.jsonl", {"turns": [f"{words}\u2028end"], "messages": say(("u", "\u2028"), ("a", "b"))})
    assert len(corpus.benchmark_ngrams(tmp_path)) == 1
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny" / "target")
    assert list(prompts.cut_all(path, tokenizer, np.random.default_rng(0))) == [say(("u", "\u2028"), ("a", "b"))]


def test_a_byte_order_mark_changes_no_token(tokenizer, tmp_path):
    """https://github.com/bozdemir/claude-usage-widget/pull/3 and
    https://github.com/WangRongsheng/MedQA-ChatGLM/issues/2"""
    rows = chat("你好，世界", "早上好 ö"), chat()
    plain = load_data([write(tmp_path / "a.jsonl", *rows)], tokenizer)
    marked = load_data([write(tmp_path / "b.jsonl", *rows, encoding="utf-8-sig")], tokenizer)
    assert (tmp_path / "b.jsonl").read_bytes().startswith(b"\xef\xbb\xbf")
    assert hash_data(plain) == hash_data(marked)
    parts = ((BOS, USER), 0), ("你好，世界", 0), ((ASSISTANT, CLOSE), 0), ("早上好 ö", 1), ((EOS,), 1)
    assert (marked[0]["input_ids"], marked[0]["loss_mask"]) == by_hand(tokenizer, *parts)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_another_encoding_than_utf8_is_named(encoding, tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", chat("ö"), encoding=encoding)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: not UTF-8"):
        load_data([path], tokenizer)


@pytest.mark.slow
def test_the_platform_encoding_does_not_matter(tmp_path):
    """https://github.com/bozdemir/claude-usage-widget/pull/3"""
    path = write(tmp_path / "ä.jsonl", chat("你好", "早上好"), encoding="utf-8-sig")
    script = (
        "import sys; from transformers import AutoTokenizer; from hyperdflash.training.data import *\n"
        "tokenizer = AutoTokenizer.from_pretrained('examples/tiny/target')\n"
        "dataset = load_data([sys.argv[1]], tokenizer)\n"
        "print(hash_data(dataset), ascii(dataset['source'][0].rpartition('/')[2]))"
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", script, path]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True, text=True)
    here = load_data([path], AutoTokenizer.from_pretrained(ROOT / "examples" / "tiny" / "target"))
    assert run.stdout == f"{hash_data(here)} {ascii('ä.jsonl:1')}\n"


# ------------------------------------------------------------------------------------------------------- mixed schemas


def test_types_may_differ_from_row_to_row(tokenizer, tmp_path):
    """https://github.com/huggingface/datasets/issues/7322 and https://github.com/huggingface/datasets/issues/7222"""
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    listed = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]}
    quiet = {"messages": [{**message, "tool_calls": None, "name": None} for message in chat()["messages"]]}
    named = {"messages": [{**message, "name": "bob"} for message in chat()["messages"]]}
    path = write(tmp_path / "a.jsonl", *[quiet] * 2000, chat(id=1), chat(id="x", tags=["y"]), listed, named)
    assert set(map(str, rows_of(path, tokenizer))) == {str(by_hand(tokenizer, *HI))}
    assert len(load_data([path], tokenizer)) == 2004


@pytest.mark.slow
def test_a_field_that_is_null_for_5000_rows_may_hold_a_value_then(tokenizer, tmp_path):
    """https://github.com/huggingface/datasets/issues/7222"""
    quiet = json.dumps({"messages": [{**message, "tool_calls": None} for message in chat()["messages"]]})
    calling = {"messages": say(("u", "Hi")) + [{"role": "assistant", "content": "", "tool_calls": [{"id": 1}]}]}
    path = write(tmp_path / "a.jsonl", *[quiet] * 5000, chat(), calling)
    dataset, report = load_data_with_report([path], tokenizer, skip_bad_rows=True)
    assert len(dataset) == 5001
    assert "a.jsonl:5002: message 1 has key 'tool_calls'" in report.examples["bad row"][0]


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "a part of type 'image_url'"),
        ({"type": "text"}, "a text part without text"),
        ({"text": "x"}, "a part of type None"),
        ("x", "a part of type None"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_line(part, found, tokenizer, tmp_path):
    """https://github.com/huggingface/datasets/issues/7322"""
    path = write(tmp_path / "a.jsonl", chat(), {"messages": [{"role": "user", "content": [part]}]})
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: message 0 has {found}"):
        load_data([path], tokenizer)


# --------------------------------------------------------------------------------------------------------------- masks


def test_rows_without_an_answer_are_counted_and_nothing_but_such_rows_is_an_error(tokenizer, tmp_path):
    """https://github.com/Liquid4All/liquid-finetune/pull/37"""
    silent = {"messages": say(("u", "Hi"))}
    dataset, report = load_data_with_report([write(tmp_path / "a.jsonl", chat(), silent, chat())], tokenizer)
    assert (len(dataset), report.counts) == (2, {data.UNSUPERVISED: 1})
    assert report.examples == {data.UNSUPERVISED: [f"{tmp_path / 'a.jsonl'}:2"]}
    with pytest.raises(ValueError, match="no row is left to train on: .* 2 left out: no supervised token"):
        load_data([write(tmp_path / "b.jsonl", silent, silent)], tokenizer)


def test_no_chat_template_is_needed_or_used(tokenizer, tmp_path, monkeypatch):
    """https://github.com/modelscope/evalscope/issues/1548"""
    assert tokenizer.chat_template is None
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", lambda *_, **__: pytest.fail("template used"))
    assert only(write(tmp_path / "a.jsonl", chat()), tokenizer) == by_hand(tokenizer, *HI)


def test_a_tokenizer_without_the_control_tokens_is_one_error(tmp_path):
    """https://github.com/modelscope/evalscope/issues/1548"""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    foreign = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(ValueError, match="^the tokenizer lacks control tokens .*<｜User｜>"):
        load_data([write(tmp_path / "a.jsonl", chat())], foreign, skip_bad_rows=True)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_there_is_one_bos_whatever_the_tokenizer_adds(adds_bos, tmp_path):
    """https://github.com/OpenRLHF/OpenRLHF/issues/393"""
    tokenizer = make_tokenizer()
    if not adds_bos:
        tokenizer.backend_tokenizer.post_processor = None
    bos = tokenizer.bos_token_id
    assert (tokenizer("Hi").input_ids[0] == bos) is adds_bos
    ids, _ = only(write(tmp_path / "a.jsonl", chat()), tokenizer)
    assert ids[0] == bos
    assert ids.count(bos) == 1


def test_the_kept_part_of_a_cut_answer_is_learned_and_gets_no_eos(tokenizer, tmp_path):
    """https://github.com/huggingface/transformers/issues/34494 and
    https://github.com/meta-pytorch/torchtune/pull/2967"""
    path = write(tmp_path / "a.jsonl", chat())
    ids, mask = by_hand(tokenizer, *HI)  # BOS User H i Assistant </think> H e l l o EOS
    assert only(path, tokenizer, max_length=9) == (ids[:9], [0, 0, 0, 0, 0, 0, 1, 1, 1])
    assert only(path, tokenizer, max_length=11) == (ids[:11], mask[:11])
    assert tokenizer.eos_token_id not in ids[:11]
    assert only(path, tokenizer, max_length=12) == (ids, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    assert ids[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(("max_length", "reason"), [(6, data.CUT_OFF), (7, data.NO_ANCHOR), (8, None)])
def test_a_row_cut_before_two_tokens_of_its_answer_is_counted(max_length, reason, tokenizer, tmp_path):
    """https://github.com/huggingface/transformers/issues/34494"""
    short = {"messages": say(("a", "Hi"))}  # BOS H i EOS
    path = write(tmp_path / "a.jsonl", chat(), short)
    dataset, report = load_data_with_report([path], tokenizer, max_length=max_length)
    assert report.counts == ({reason: 1} if reason else {})
    assert len(dataset) == (1 if reason else 2)


@pytest.mark.parametrize(
    ("mask", "usable"), [([0, 1, 1], True), ([1, 1, 0], False), ([0, 1, 0, 1], False), ([1, 0, 0, 1, 1], True)]
)
def test_a_row_needs_an_anchor_with_context_and_a_token_to_predict(mask, usable, tokenizer, tmp_path):
    given = {"input_ids": [7] * len(mask), "loss_mask": mask}
    _, report = load_data_with_report([write(tmp_path / "a.jsonl", given, chat())], tokenizer)
    assert report.counts == ({} if usable else {data.NO_ANCHOR: 1})


CONVERSATIONS = {
    "assistant first": (
        say(("a", "Yo"), ("u", "Hi"), ("a", "Hey")),
        (
            ((BOS,), 0),
            ("Yo", 1),
            ((EOS,), 1),
            ((USER,), 0),
            ("Hi", 0),
            ((ASSISTANT, CLOSE), 0),
            ("Hey", 1),
            ((EOS,), 1),
        ),
    ),
    "answers that end in white space": (
        say(("u", "Hi"), ("a", "Yo \n\n"), ("u", " x"), ("a", "  ")),
        (
            *(((BOS, USER), 0), ("Hi", 0), ((ASSISTANT, CLOSE), 0), ("Yo \n\n", 1), ((EOS,), 1)),
            *(((USER,), 0), (" x", 0), ((ASSISTANT, CLOSE), 0), ("  ", 1), ((EOS,), 1)),
        ),
    ),
    "an empty answer": (
        say(("u", "Hi"), ("a", ""), ("u", "x"), ("a", "Yo")),
        (
            *(((BOS, USER), 0), ("Hi", 0), ((ASSISTANT, CLOSE), 0), ((EOS,), 1)),
            *(((USER,), 0), ("x", 0), ((ASSISTANT, CLOSE), 0), ("Yo", 1), ((EOS,), 1)),
        ),
    ),
    "two answers in a row": (
        say(("u", "Hi"), ("a", "A"), ("a", "B"), ("u", "x")),
        (
            *(((BOS, USER), 0), ("Hi", 0), ((ASSISTANT, CLOSE), 0), ("A", 1), ((EOS,), 1)),
            *(("B", 1), ((EOS,), 1), ((USER,), 0), ("x", 0)),
        ),
    ),
}


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_the_mask_does_not_spill_into_the_next_turn(kind, tokenizer, tmp_path):
    """https://github.com/huggingface/transformers/issues/47325"""
    messages, parts = CONVERSATIONS[kind]
    assert only(write(tmp_path / "a.jsonl", {"messages": messages}), tokenizer) == by_hand(tokenizer, *parts)


def test_the_header_is_no_target_and_an_answer_that_repeats_it_is(tokenizer, tmp_path):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3739"""
    path = write(tmp_path / "a.jsonl", chat(answer=ASSISTANT + CLOSE))
    ids, mask = only(path, tokenizer)
    parts = ((BOS, USER), 0), ("Hi", 0), ((ASSISTANT, CLOSE), 0), (ASSISTANT + CLOSE, 1), ((EOS,), 1)
    assert (ids, mask) == by_hand(tokenizer, *parts)
    assert ids.count(tokenizer.convert_tokens_to_ids(ASSISTANT)) == 1


@pytest.mark.parametrize(("max_length", "num_cut"), [(8, 2), (12, 1), (13, 0)])
def test_rows_that_are_cut_are_counted_and_said(max_length, num_cut, tokenizer, tmp_path):
    """https://github.com/huggingface/transformers/issues/34494"""
    rows = chat(), chat(answer="Hello!"), chat("x" * 20), {"messages": say(("u", "Hi"))}
    path = write(tmp_path / "a.jsonl", *rows)
    for _ in range(2):  # the second from the cache
        _, report = load_data_with_report([path], tokenizer, max_length=max_length)
        assert (report.num_kept, report.num_cut) == (2, num_cut)  # the row that is cut before its answer is left out
        said = [line.split()[0] for line in report.lines() if "longer than max_length" in line]
        assert said == ([str(num_cut)] if num_cut else [])


def test_prompts_alone_are_told_the_way_to_answers(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="no row is left to train on: .*`hyperdflash data regenerate`"):
        load_data([write(tmp_path / "a.jsonl", {"prompt": "Hi"}, {"messages": say(("u", "Hi"))})], tokenizer)


def test_when_no_row_is_left_the_error_counts_the_reasons(tokenizer, tmp_path):
    """https://github.com/inclusionAI/AReno/pull/90 and https://github.com/fw-ai/cookbook/pull/335"""
    rows = [chat("long question" * 5)] * 4 + [{"messages": say(("u", "Hi"))}] + ["{"]
    with pytest.raises(ValueError, match="no row is left") as caught:
        load_data([write(tmp_path / "a.jsonl", *rows)], tokenizer, max_length=20, skip_bad_rows=True)
    message = str(caught.value)
    assert "0 of 6 rows kept" in message
    assert f"4 left out: {data.CUT_OFF} ({tmp_path / 'a.jsonl'}:1; " in message
    assert f"1 left out: {data.UNSUPERVISED}" in message
    assert "1 left out: bad row" in message
    assert "\n" not in message


# --------------------------------------------------------------------------------------------------------------- files


def test_a_pattern_leaves_out_what_regenerate_could_not_answer(tokenizer, tmp_path):
    for name in ("a.jsonl", "a.failed.jsonl"):
        (tmp_path / name).write_text(json.dumps(chat()) + "\n")
    assert len(load_data(str(tmp_path / "*.jsonl"), tokenizer)) == 1
    assert len(load_data(str(tmp_path / "a.failed.jsonl"), tokenizer)) == 1


def test_globs_are_sorted_and_files_keep_their_order(tokenizer, tmp_path):
    for name in ("c", "b", "a"):
        write(tmp_path / f"{name}.jsonl", chat(name))
    write(tmp_path / ".b.jsonl.partial-1", "{")
    names = [tmp_path / "c.jsonl", tmp_path / "[ab].json*"]
    assert [Path(s).name for s in load_data(names, tokenizer)["source"]] == ["c.jsonl:1", "a.jsonl:1", "b.jsonl:1"]


@pytest.mark.parametrize("kind", ["list", "indented list", "lines"])
def test_a_json_file_may_hold_a_list_or_lines(kind, tokenizer, tmp_path):
    path, rows = tmp_path / "a.json", [chat("a"), chat("b")]
    if kind == "lines":
        write(path, *rows)
    else:
        path.write_text("\ufeff" + json.dumps(rows, indent=2 if kind == "indented list" else None), encoding="utf-8")
    assert load_data([path], tokenizer)["source"][:] == [f"{path}:1", f"{path}:2"]
    path.write_text(json.dumps([*rows, 3]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.json:3: a row must be a JSON object, not 3"):
        load_data([path], tokenizer)


def test_a_broken_json_list_names_its_file(tokenizer, tmp_path):
    (tmp_path / "a.json").write_text('[{"messages": ')
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON: Expecting value"):
        load_data([tmp_path / "a.json"], tokenizer)


def save(path: Path, rows: list[dict]) -> Path:
    """Rows in the kind of file that the name asks for."""
    table = datasets.Dataset.from_list(rows)
    if path.suffix == ".gz":
        text = json.dumps(rows) if ".json." in path.name else "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
    elif path.suffix == ".parquet":
        table.to_parquet(path)
    elif path.suffix == ".csv":
        table.to_csv(path)
    else:
        table.save_to_disk(path.parent / "saved")
        (path.parent / "saved" / "data-00000-of-00001.arrow").rename(path)
    return path


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.ndjson.gz", "a.json.gz", "a.parquet", "a.arrow"])
def test_packed_files_and_tables_give_the_tokens_of_the_lines(name, tokenizer, tmp_path):
    rows = [chat(mode=None), chat("\u2028", "x", mode="thinking"), {**chat("b"), "mode": None}, chat("4", "5")] * 150
    path = save(tmp_path / name, rows)
    plain, found = load_data([write(tmp_path / "a.jsonl", *rows)], tokenizer), load_data([path], tokenizer)
    assert hash_data(found) == hash_data(plain)
    assert found["source"][:] == [f"{path}:{i}" for i in range(1, 601)]
    assert [source for source, _ in read_rows([path])] == found["source"][:]


def test_cells_of_csv_are_text(tokenizer, tmp_path):
    rows = [
        {"instruction": "Hi", "output": "Hello", "mode": None},
        {"instruction": "1,\n2", "output": "3", "mode": ""},
    ]
    first, second = rows_of(save(tmp_path / "a.csv", rows), tokenizer)
    assert first == by_hand(tokenizer, *HI)
    parts = ((BOS, USER), 0), ("1,\n2", 0), ((ASSISTANT, CLOSE), 0), ("3", 1), ((EOS,), 1)
    assert second == by_hand(tokenizer, *parts)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    assert rows_of(tmp_path / "a.csv.gz", tokenizer) == [first, second]
    (tmp_path / "b.csv").write_text("instruction,output\na,b\na,b,c\n")
    with pytest.raises(ValueError, match=r"b\.csv:2: a row must be"):
        load_data([tmp_path / "b.csv"], tokenizer)


@pytest.mark.parametrize("name", ["a.txt", "a.zst", "a.tsv", "a", "a.zip", "a.parquet.gz"])
def test_a_kind_of_file_that_is_not_read_names_those_that_are(name, tokenizer, tmp_path):
    (tmp_path / name).write_bytes(b"(\xb5/\xfd")
    with pytest.raises(ValueError, match=rf"{name} .*: data files are \.jsonl, .*\.gz\), \.parquet and \.arrow"):
        load_data([tmp_path / name], tokenizer)
    if name == "a.txt":
        assert len(load_data([write(tmp_path / name, chat())], tokenizer)) == 1  # lines of JSON by another name


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.gz", "a.parquet", "a.arrow", "a.csv"])
def test_a_damaged_file_is_named(name, tokenizer, tmp_path):
    content = gzip.compress(json.dumps(chat()).encode()) if name.endswith("gz") else b"\xff\xfeP\x00A"
    whole = save(tmp_path / name, [chat(str(i)) for i in range(2000)]).read_bytes()
    half = whole[: len(whole) // 2]
    for damaged in (content[:-9] or content, b"\xff" + content, *[half] * (not name.endswith(".csv"))):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises((OSError, ValueError), match=rf"{name} (is damaged|is not valid|cannot be read)") as caught:
            load_data([tmp_path / name], tokenizer)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "absent.jsonl",
        "absent.parquet",
        "absent.jsonl.gz",
        "absent-*.jsonl",
        "./absent",
        "sub/absent.json",
        "a b?",
        "a/b/c",
    ],
)
def test_a_missing_file_is_an_error(name, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", chat())
    with pytest.raises(FileNotFoundError, match="no data file|no file matches"):
        load_data(["a.jsonl", name], tokenizer)
    with pytest.raises(FileNotFoundError):
        read_rows([name])  # at the call, before any row is asked for


def test_a_folder_and_no_files_at_all_are_errors(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"is a folder: name its files, for example .*\*\.jsonl"):
        load_data([tmp_path], tokenizer)
    with pytest.raises(ValueError, match="no data files were given"):
        load_data([], tokenizer)


@pytest.mark.parametrize(
    ("name", "args", "revision"),
    [
        ("org/chats", ["train"], None),
        ("org/chats@v1.0", ["train"], "v1.0"),
        ("org/chats:math", ["math", "train"], None),
        ("org/chats:math v2:train_sft", ["math v2", "train_sft"], None),
        ("org/chats::test", ["test"], None),
        ("chats@refs/pr/1:main:test", ["main", "test"], "refs/pr/1"),
    ],
)
def test_a_hub_data_set_is_read_at_its_revision_configuration_and_split(
    name, args, revision, tokenizer, tmp_path, monkeypatch
):
    calls = []

    def load_dataset(*given, split, revision):
        calls.append((*given, split, revision))
        return datasets.Dataset.from_list([chat(), {"messages": say(("u", "Hi"))}, chat()])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    dataset, report = load_data_with_report([write(tmp_path / "a.jsonl", chat("x")), name], tokenizer)
    assert calls == [(name.partition(":")[0].partition("@")[0], *args, revision)]
    assert dataset["source"][1:] == [f"{name}:1", f"{name}:3"]
    assert report.examples == {data.UNSUPERVISED: [f"{name}:2"]}
    assert (dataset[1]["input_ids"], dataset[1]["loss_mask"]) == by_hand(tokenizer, *HI)


def test_a_hub_data_set_that_cannot_be_had_is_an_error(tokenizer, monkeypatch):
    def load_dataset(repo, **_):
        raise ConnectionError("no way out")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(OSError, match="org/chats is neither a file here nor .*no way out .*org/chats:CONFIG:SPLIT"):
        load_data(["org/chats"], tokenizer)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"mode": "loud"}, "unknown mode 'loud'"),
        ({"effort": "low"}, "unknown effort 'low'"),
        ({"generation": "v9"}, "unknown generation 'v9'"),
        ({"max_length": 2}, "max_length must be at least 3, got 2"),
    ],
)
def test_settings_are_checked_before_any_file_is_opened(option, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        load_data(["absent.jsonl"], tokenizer, **option)


# ----------------------------------------------------------------------------------------------- the cache, the result


def count_encoded(monkeypatch):
    """A list that grows by one with every row that is really encoded."""
    encoded, original = [], data.encode_row
    monkeypatch.setattr(data, "encode_row", lambda row, *args: encoded.append(row) or original(row, *args))
    return encoded


def test_a_second_load_comes_from_the_cache_with_its_counts(tokenizer, tmp_path, monkeypatch):
    encoded = count_encoded(monkeypatch)
    path = write(tmp_path / "a.jsonl", chat(), {"messages": say(("u", "Hi"))}, "{")
    first = load_data_with_report([path], tokenizer, skip_bad_rows=True)
    assert len(encoded) == 2
    second = load_data_with_report([path], make_tokenizer(), skip_bad_rows=True)
    assert len(encoded) == 2
    assert second[1] == first[1]
    assert hash_data(second[0]) == hash_data(first[0])
    assert second[1].counts == {data.UNSUPERVISED: 1, "bad row": 1}


@pytest.mark.parametrize("change", ["content of the same size", "mode", "max_length", "tokenizer"])
def test_a_change_of_file_settings_or_tokenizer_is_seen(change, tokenizer, tmp_path, monkeypatch):
    path, options = write(tmp_path / "a.jsonl", chat()), {}
    before = hash_data(load_data([path], tokenizer))
    if change == "content of the same size":
        stat = path.stat()
        write(path, chat(answer="Jello"))
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif change == "tokenizer":
        tokenizer = make_tokenizer()
        tokenizer.add_tokens("ell")  # one token more, cut up again in plain text: same ids, another tokenizer
    else:
        options = {"mode": "thinking"} if change == "mode" else {"max_length": 9}
    encoded = count_encoded(monkeypatch)
    after = hash_data(load_data([path], tokenizer, **options))
    assert len(encoded) == 1
    assert (after == before) is (change == "tokenizer")


def test_a_failed_load_leaves_nothing_behind(tokenizer, tmp_path):
    path = write(tmp_path / "a.jsonl", *[chat()] * 600, "{")
    with pytest.raises(ValueError, match=":601: not JSON"):
        load_data([path], tokenizer)
    assert [f for f in (tmp_path / "cache").rglob("*") if f.is_file() and f.suffix != ".lock"] == []


@pytest.fixture
def full_disk():
    """Files end after 4 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_cache_that_cannot_be_written_is_named(tokenizer, tmp_path, request):
    path = write(tmp_path / "a.jsonl", *[chat()] * 600)
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError, match="the data cache .*cache/hyperdflash cannot .*HF_DATASETS_CACHE") as caught:
        load_data([path], tokenizer)
    assert "\n" not in str(caught.value)
    assert [f for f in (tmp_path / "cache").rglob("*") if f.is_file() and f.suffix != ".lock"] == []


def test_a_token_that_the_target_does_not_have_is_one_line(tokenizer, tmp_path):
    rows = chat(), {"input_ids": [5, 6, 260], "loss_mask": [0, 1, 1]}
    dataset = load_data([write(tmp_path / "a.jsonl", *rows)], tokenizer)
    data.check_vocabulary(dataset, 262)
    with pytest.raises(ValueError, match=r"a\.jsonl:2 has the token id 260, but the target has 260 tokens"):
        data.check_vocabulary(dataset.select([1]), 260)


def test_a_run_does_not_start_with_tokens_that_its_target_lacks(tmp_path):
    """Its tokenizer may have been given more."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "examples/tiny/target")
    tokenizer.add_tokens("zorkmid")
    args = SimpleNamespace(
        target=ROOT / "examples/tiny/target", target_revision=None, **asdict(data.EncodingSettings())
    )
    args.skip_bad_rows, args.train_data, args.dataset_num_proc = False, [], None
    row = {"input_ids": [4, 5, len(tokenizer) - 1, 7], "loss_mask": [0, 1, 1, 1]}
    with pytest.raises(ValueError, match=r"a\.jsonl:1 has the token id 4096, but the target has 4096 tokens"):
        data.load_recipe_data(args, [write(tmp_path / "a.jsonl", row)], tokenizer)


# ------------------------------------------------------------------------------------------------------- a part of it


def recipe_args(**options) -> SimpleNamespace:
    """What `load_recipe_data` reads of a run's arguments."""
    settings = {**asdict(data.EncodingSettings()), "skip_bad_rows": False, "dataset_num_proc": None}
    settings |= {"max_samples": None, "train_weights": [], "seed": 42, "data_seed": None, "train_data": []}
    return SimpleNamespace(**settings | {"target": ROOT / "examples/tiny/target", "target_revision": None} | options)


def drawn(tokenizer, **options) -> list[str]:
    args = recipe_args(**options)
    rows, report = data.load_recipe_data(args, args.train_data, tokenizer)
    assert sum(report.parts.values()) == len(rows)
    return [source.rpartition("/")[2] for source in rows["source"][:]]


def test_a_part_of_the_rows_is_drawn_by_the_seed_alone(tokenizer, tmp_path):
    """As many as asked for, of those that can be trained on, in their order; evaluation takes all of its rows."""
    path = write(tmp_path / "a.jsonl", *[chat(str(i)) for i in range(40)], {"messages": say(("u", "Hi"))})
    first = drawn(tokenizer, train_data=[path], max_samples=30)
    assert len(first) == len(set(first)) == 30
    assert first == sorted(first, key=lambda source: int(source.rpartition(":")[2]))
    assert first == drawn(tokenizer, train_data=[path], max_samples=30)
    assert first != drawn(tokenizer, train_data=[path], max_samples=30, seed=1)
    assert first == drawn(tokenizer, train_data=[path], max_samples=30, seed=1, data_seed=42)
    assert len(drawn(tokenizer, train_data=[path], max_samples=1000)) == 40
    rows, report = data.load_recipe_data(recipe_args(train_data=[path], max_samples=30), [path], tokenizer)
    assert len(rows) == 40
    assert report.parts == {}


def test_what_is_made_of_a_part_does_not_end_up_among_the_rows(tokenizer, tmp_path):
    """`datasets` caches what it derives from a part in the folder of the whole."""
    path = write(tmp_path / "a.jsonl", *[chat(str(i)) for i in range(9)])
    args = recipe_args(train_data=[path], max_samples=5)
    data.load_recipe_data(args, args.train_data, tokenizer)[0].flatten_indices()
    rows, report = data.load_recipe_data(args, [path], tokenizer)
    assert (len(rows), report.num_rows) == (9, 9)


def test_a_file_that_two_entries_of_a_mixture_name_is_refused(tokenizer, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(chat()) + "\n")
    args = recipe_args(train_data=[str(path), str(tmp_path / "*.jsonl")], train_weights=[1, 1])
    with pytest.raises(ValueError, match="a.jsonl twice"):
        data.load_recipe_data(args, args.train_data, tokenizer)


@pytest.mark.parametrize(
    ("weights", "max_samples", "counts"),
    [([2, 1], None, (40, 20)), ([2, 1], 30, (20, 10)), ([1, 1], None, (30, 30)), ([1, 7], None, (4, 30))],
)
def test_a_mixture_has_its_shares_and_repeats_no_row(tokenizer, tmp_path, weights, max_samples, counts):
    write(tmp_path / "a1.jsonl", *[chat(f"a{i}") for i in range(25)])
    write(tmp_path / "a2.jsonl", *[chat(f"b{i}") for i in range(15)])
    write(tmp_path / "c.jsonl", *[chat(f"c{i}") for i in range(30)])
    entries = [str(tmp_path / "a*.jsonl"), str(tmp_path / "c.jsonl")]
    sources = drawn(tokenizer, train_data=entries, train_weights=weights, max_samples=max_samples)
    assert len(set(sources)) == len(sources)
    assert (sum(s[0] == "a" for s in sources), sum(s[0] == "c" for s in sources)) == counts


def test_a_mixture_that_would_leave_an_entry_out_is_refused_by_its_name(tokenizer, tmp_path):
    files = [write(tmp_path / f"{name}.jsonl", *[chat(f"{name}{i}") for i in range(9)]) for name in "ab"]
    with pytest.raises(
        ValueError, match=r"max_samples 3 leaves no row of .*b\.jsonl: raise it, or the entry's weight"
    ):
        drawn(tokenizer, train_data=files, train_weights=[20, 1], max_samples=3)


def test_the_report_says_how_many_rows_of_what_are_used(tokenizer, tmp_path):
    files = [write(tmp_path / f"{name}.jsonl", *[chat(f"{name}{i}") for i in range(9)]) for name in "ab"]
    args = recipe_args(train_data=files, train_weights=[2, 1], max_samples=6)
    _, report = data.load_recipe_data(args, args.train_data, tokenizer)
    assert report.lines()[-1] == f"  6 of the rows kept are used: 4 of {files[0]}, 2 of {files[1]}"
    assert [Path(file["file"]).name for file in report.files] == ["a.jsonl", "b.jsonl"]


# ----------------------------------------------------------------------------------------------------- many processes


def test_lengths_are_read_as_one_column(tokenizer, tmp_path, monkeypatch):
    """Also of a part of the rows: not one access for each of them, in every process."""
    rows = load_data([write(tmp_path / "a.jsonl", *[chat("x" * i) for i in range(300)])], tokenizer)
    rows = rows.select(range(7, 290))
    expected, reads, original = rows["length"][:], [], datasets.Dataset._getitem
    monkeypatch.setattr(datasets.Dataset, "_getitem", lambda self, *a, **k: reads.append(a) or original(self, *a, **k))
    sampler = EpochTrainer._get_train_sampler(
        SimpleNamespace(
            args=TrainingArguments(output_dir=str(tmp_path), use_cpu=True),
            train_dataset=SampleDataset(rows),
            _train_batch_size=2,
        )
    )
    assert sampler.lengths.tolist() == expected
    assert len(reads) <= 1


def test_a_recipe_says_how_many_processes_encode(tokenizer, tmp_path, monkeypatch):
    path, asked, original = write(tmp_path / "a.jsonl", chat()), [], datasets.Dataset.map
    monkeypatch.setattr(
        datasets.Dataset, "map", lambda self, *a, **k: asked.append(k["num_proc"]) or original(self, *a, **k)
    )
    data.load_recipe_data(recipe_args(dataset_num_proc=1), [path], tokenizer)
    assert asked == [1]


def test_one_process_encodes_and_the_others_wait_without_a_deadline(tokenizer, tmp_path, monkeypatch):
    """However long it takes: nobody waits in a collective, which would time out after half an hour."""
    path = write(tmp_path / "a.jsonl", chat(), chat())
    encoding, go_on, encoded, original = threading.Event(), threading.Event(), [], data.encode_row

    def encode(row, *args):
        encoded.append(row)
        encoding.set()
        assert go_on.wait(timeout=30)
        return original(row, *args)

    monkeypatch.setattr(data, "encode_row", encode)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(load_data, [path], tokenizer)
        assert encoding.wait(timeout=30)
        second = pool.submit(load_data, [path], tokenizer)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.3)
        go_on.set()
        assert hash_data(first.result()) == hash_data(second.result())
    assert len(encoded) == 2


@pytest.mark.slow
def test_more_processes_give_the_same_data_and_the_same_error(tokenizer, tmp_path):
    rows = [chat(str(i)) for i in range(500)]
    packed = load_data([save(tmp_path / "p.jsonl.gz", rows)], tokenizer, num_proc=2)
    assert hash_data(packed) == hash_data(load_data([write(tmp_path / "p.jsonl", *rows)], tokenizer))
    path = write(tmp_path / "a.jsonl", *rows[:300], {"messages": say(("u", "Hi"))}, *rows[300:])
    alone = load_data_with_report([path], tokenizer)
    datasets.config.HF_DATASETS_CACHE = tmp_path / "other cache"
    together = load_data_with_report([path], tokenizer, num_proc=2)
    assert together[0]["source"][:] == alone[0]["source"][:]
    assert together[1] == alone[1]
    assert hash_data(together[0]) == hash_data(alone[0])
    with pytest.raises(ValueError, match=r"b\.jsonl:501: not JSON"):
        load_data([write(tmp_path / "b.jsonl", *rows, "{")], tokenizer, num_proc=2)


def test_the_result_is_a_memory_mapped_file_with_the_promised_types(tokenizer, tmp_path):
    dataset = load_data([write(tmp_path / "a.jsonl", chat(), chat())], tokenizer)
    assert [Path(f["filename"]).parents[1] for f in dataset.cache_files] == [tmp_path / "cache" / "hyperdflash"]
    List, Value = datasets.List, datasets.Value
    assert dataset.features == {
        "input_ids": List(Value("int32")),
        "loss_mask": List(Value("int8")),
        "length": Value("int32"),
        "source": Value("string"),
        "mode": Value("string"),
    }
    assert dataset["length"][:] == [12, 12]


def test_the_hash_follows_tokens_masks_and_order_only(tokenizer, tmp_path):
    def hashed(name, *rows, **kwargs):
        return hash_data(load_data([write(tmp_path / name, *rows)], tokenizer, **kwargs))

    given = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    base = hashed("a.jsonl", chat("x"), given)
    assert hashed("b.jsonl", "", chat("x"), {"messages": say(("u", "left out"))}, given) == base
    assert hashed("c.jsonl", given, chat("x")) != base
    assert hashed("d.jsonl", chat("x"), {**given, "loss_mask": [0, 1, 1, 1]}) != base
    assert hashed("e.jsonl", chat("x"), {**given, "input_ids": [5, 6, 7, 9]}) != base
    one, two = [{"input_ids": [5] * n, "loss_mask": [1] * n} for n in (3, 5)]
    assert hashed("f.jsonl", one, two) != hashed("g.jsonl", two, one)  # the same tokens, cut elsewhere


def test_the_hash_of_a_tokenizer_follows_its_content_and_not_its_use():
    before = hash_tokenizer(make_tokenizer())
    used = make_tokenizer()
    used.pad_token = used.eos_token
    used(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert used.backend_tokenizer.truncation  # left over from the call
    assert hash_tokenizer(used) == before
    used.add_tokens("abc")
    assert hash_tokenizer(used) != before


def test_there_is_no_progress_bar_without_a_terminal(tokenizer, tmp_path, capfd):
    assert not datasets.are_progress_bars_disabled()
    load_data([write(tmp_path / "a.jsonl", chat())], tokenizer)
    assert not datasets.are_progress_bars_disabled()  # nor is the caller's choice touched
    assert capfd.readouterr().err == ""


LARGE = """
import re, sys, threading, time
from pathlib import Path

import torch
from transformers import AutoTokenizer
from hyperdflash.common.data_files import read_rows
from hyperdflash.training.data import load_data

def anonymous():  # MB of memory that is no mapped file
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def growth(work):
    start, peak, done = anonymous(), [0], threading.Event()
    def watch():
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    result = work()
    done.set()
    watcher.join()
    return result, peak[0] - start

torch.set_num_threads(1)
path = sys.argv[1]
tokenizer = AutoTokenizer.from_pretrained("examples/tiny/target")
load_data([sys.argv[2]], tokenizer)  # libraries take their memory first
dataset, streamed = growth(lambda: load_data([path], tokenizer))
loader = torch.utils.data.DataLoader(dataset.with_format("torch"), batch_size=None, num_workers=2)
seen = [int(row["source"].rpartition(":")[2]) for row in loader]
assert sorted(seen) == list(range(1, len(dataset) + 1)), "an epoch is not every sample once"
_, held = growth(lambda: list(read_rows([path])))
print(len(seen), round(streamed), round(held))
"""


@pytest.mark.slow
def test_memory_is_bounded_for_large_files_and_an_epoch_is_every_row_once(tmp_path):
    """https://github.com/fw-ai/cookbook/pull/371"""
    row = json.dumps({"input_ids": list(range(1000, 3000)), "loss_mask": [0] * 50 + [1] * 1950}) + "\n"
    count = 2000
    with (tmp_path / "large.jsonl").open("w") as file:
        file.writelines(row for _ in range(count))
    assert (tmp_path / "large.jsonl").stat().st_size > 30e6
    small = write(tmp_path / "small.jsonl", *[row.strip()] * 300)
    env = {**os.environ, "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", LARGE, tmp_path / "large.jsonl", small]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    seen, streamed, held = map(int, run.stdout.split())
    assert seen == count
    assert streamed < 18  # MB, half of the file
    assert held > 60  # what reading everything at once takes: the bound can fail
