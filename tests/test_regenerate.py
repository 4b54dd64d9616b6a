"""Regenerated answers: kept as they were written, once each, whoever writes them and however often the run is killed.

.venv/bin/python -m pytest tests/test_regenerate.py
"""

import errno
import itertools
import json
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from child import fork, wait_for_lines
from fake_server import EOS, THINK_END, FakeServer, choice
from tiny_v4 import nightly
from transformers import AutoTokenizer

from hyperdflash.common import growing_file
from hyperdflash.common.console import UsageError
from hyperdflash.encoding_deepseek_v4 import EOS_TOKEN, encode_with_mask
from hyperdflash.parsers import parse
from hyperdflash.training import regenerate as command
from hyperdflash.training.data import load_data
from hyperdflash.training.regenerate import Output, answer_positions, regenerate
from hyperdflash.training.writers import Sampling, ServerWriter, TargetWriter, Turn, choose, take_batch

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny" / "target"
QUESTIONS = ["I need a cheap hotel.", "Is there a train to Ely?", "Hello", "What is 3 + 4?", "Thank you, goodbye."]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def say(*contents, **keys) -> dict:
    """A row of user and assistant turns in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **keys}


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def by_source(path: Path) -> dict[str, dict]:
    """The rows of an output by the last part of their source, each of them there once."""
    rows = read_lines(path)
    found = {row["source"].rpartition("/")[2]: row for row in rows}
    assert len(found) == len(rows)
    return found


def prompt_of(messages, tokenizer, **encoding) -> list[int]:
    return encode_with_mask(messages, tokenizer, add_generation_prompt=True, **encoding)[0]


# ------------------------------------------------------------------------------------------------------- with a server


@pytest.fixture
def server(tokenizer, monkeypatch):
    monkeypatch.setattr(ServerWriter, "first_wait", 0.01)
    fake = FakeServer(tokenizer)
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


@pytest.fixture
def ask(server, tokenizer, tmp_path):
    """Run `regenerate` on some rows against the fake server; returns the report."""

    def run(rows, *, out=tmp_path / "out.jsonl", sampling=None, writer=(), **kwargs):
        file = write_rows(tmp_path / "in.jsonl", rows) if isinstance(rows, list) else rows
        options = {"concurrency": 4, "retries": 3, **dict(writer)}
        return regenerate(
            [str(file)],
            out,
            ServerWriter(server.url, "v4", **options),
            tokenizer,
            sampling=sampling or Sampling(),
            **kwargs,
        )

    return run


def test_the_ids_that_the_model_wrote_are_kept(ask, server, tokenizer, tmp_path):
    """https://github.com/sgl-project/sglang/pull/30917"""
    ask([say("Hello", "an old answer")])
    (row,) = read_lines(tmp_path / "out.jsonl")
    prompt, written = prompt_of(say("Hello")["messages"], tokenizer), [*server.spell("Re: Hello"), EOS]
    assert tokenizer.encode("Re: Hello", add_special_tokens=False) != written[:-1]
    assert row == {
        **say("Hello", "Re: Hello"),
        "input_ids": prompt + written,
        "loss_mask": [0] * len(prompt) + [1] * len(written),
        "answers": 1,
        "mode": "non-thinking",
        "effort": None,
        "generation": "preview",
        "source": f"{tmp_path / 'in.jsonl'}:1#1",
        "model": "v4",
        "temperature": 0.0,
        "finish_reason": "stop",
        "token_ids": "exact",
    }
    (body,) = server.requests
    assert body == {
        "model": "v4",
        "prompt": prompt,
        "max_tokens": 2048,
        "temperature": 0.0,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def test_a_stop_token_that_the_server_keeps_to_itself_is_learned_all_the_same(ask, server, tmp_path):
    server.reply = lambda body: choice(token_ids=server.spell("Yes"))
    ask([say("Hello", "an old answer")])
    (row,) = read_lines(tmp_path / "out.jsonl")
    assert row["input_ids"][-4:] == [*server.spell("Yes"), EOS]
    assert sum(row["loss_mask"]) == 4


@pytest.mark.parametrize(
    ("name", "kept"),
    [("stop_reason", True), ("stop_reason", False), ("matched_stop", True), ("matched_stop", False), (None, True)],
)
def test_another_end_token_than_eos_is_the_answers_last(ask, server, tmp_path, name, kept):
    """The model ended its answer with it: an EOS behind it would be a token that was never written."""
    other = 2  # a special token of the tiny target
    named = {} if name is None else {name: other}
    server.reply = lambda body: choice(token_ids=[*server.spell("Yes"), *[other] * kept], **named)
    ask([say("Hello", "an old answer", "And?", "")])
    first, second = read_lines(tmp_path / "out.jsonl")
    assert first["input_ids"][-4:] == [*server.spell("Yes"), other]
    assert first["messages"][-1]["content"] == "Yes"
    assert second["messages"][:2] == first["messages"]
    assert (first["finish_reason"], first["token_ids"]) == ("stop", "exact")


def test_another_end_token_is_the_last_of_a_text_too(ask, server, tmp_path):
    server.reply = lambda body: choice(text="Yes", stop_reason=2)
    ask([say("Hello")])
    (row,) = read_lines(tmp_path / "out.jsonl")
    assert row["input_ids"][-1] == 2
    assert EOS not in row["input_ids"]


@pytest.mark.parametrize("keys", [{"stop_reason": "\n"}, {"matched_stop": "END"}])
@pytest.mark.parametrize("answer", [{"token_ids": [20]}, {"text": "Yes"}])
def test_an_answer_ended_by_a_stop_string_of_the_server_fails(ask, server, tmp_path, keys, answer):
    server.reply = lambda body: choice(**answer, **keys)
    assert ask([say("Hello")]).num_failed == 1
    reason = read_lines(tmp_path / "out.failed.jsonl")[0]["reason"]
    assert f"stopped at {next(iter(keys.values()))!r}, where the model had not ended" in reason


def test_think_tags_in_the_text_of_a_server_are_no_reasoning(ask, server, tokenizer, tmp_path):
    server.reply = lambda body: choice(text="<think>hm</think>yes")
    ask([say("A", "<think>old</think>old", "B", "")], mode="thinking")
    for row in read_lines(tmp_path / "out.jsonl"):
        assert row["messages"][-1] == {"role": "assistant", "reasoning": "hm", "content": "yes"}
        assert tokenizer.decode(row["input_ids"]).endswith(f"<think>hm</think>yes{EOS_TOKEN}")
        assert tokenizer.decode(row["input_ids"]).count("<think>") == 1
    assert ask([say("A")], out=tmp_path / "plain.jsonl").num_failed == 1
    assert "in non-thinking mode" in read_lines(tmp_path / "plain.failed.jsonl")[0]["reason"]


def test_think_tokens_that_a_model_opens_itself_are_kept_as_ids_and_not_told_to_later_turns(
    ask, server, tokenizer, tmp_path
):
    (start,) = tokenizer.convert_tokens_to_ids(["<think>"])
    ids = [start, *server.spell("hm"), THINK_END, *server.spell("yes"), EOS]
    server.reply = lambda body: choice(token_ids=ids)
    ask([say("A", "", "B", "")])
    first, second = read_lines(tmp_path / "out.jsonl")
    assert first["input_ids"][-len(ids) :] == ids
    assert first["messages"][-1] == {"role": "assistant", "reasoning": "hm", "content": "yes"}
    assert second["input_ids"][: -len(ids)] == prompt_of(say("A", "yes", "B")["messages"], tokenizer)


def test_the_output_is_training_data_whose_mask_is_the_answer(ask, tokenizer, tmp_path):
    ask([say("Hello", ""), say("What is 3 + 4?", "", "And 5?", "")])
    rows = read_lines(tmp_path / "out.jsonl")
    data = load_data([str(tmp_path / "out.jsonl")], tokenizer)
    assert len(data) == 3
    for row, sample in zip(rows, data, strict=True):
        prompt = prompt_of(row["messages"][:-1], tokenizer)
        assert sample["input_ids"] == row["input_ids"]
        assert sample["input_ids"][: len(prompt)] == prompt
        assert sample["loss_mask"] == [0] * len(prompt) + [1] * (len(row["input_ids"]) - len(prompt))
        assert tokenizer.decode(sample["input_ids"][len(prompt) :]) == row["messages"][-1]["content"] + EOS_TOKEN


def test_later_turns_see_the_new_answers(ask, server, tokenizer, tmp_path):
    """https://github.com/vllm-project/speculators/issues/584"""
    ask([say("A", "old", "B", "old", "C")])
    rows = by_source(tmp_path / "out.jsonl")
    assert list(rows) == ["in.jsonl:1#1", "in.jsonl:1#2", "in.jsonl:1#3"]
    told = say("A", "Re: A", "B", "Re: B", "C", "Re: C")["messages"]
    assert [row["messages"] for row in rows.values()] == [told[:2], told[:4], told]
    assert [body["prompt"] for body in server.requests] == [prompt_of(told[:n], tokenizer) for n in (1, 3, 5)]


# ------------------------------------------------------------------------------------------------ a row a conversation

SIX_TURNS = say("A", "", "B", "", "C", "", "D", "", "E", "", "F")


@pytest.fixture
def canonical(server, tokenizer):
    """Answers with the ids that the tokenizer gives their text, as nearly all of a model's are."""

    def reply(body):
        return choice(token_ids=[*tokenizer.encode(f"Re: {server.question(body)}", add_special_tokens=False), EOS])

    server.reply = reply
    return reply


def test_a_conversation_of_six_turns_is_one_row_that_learns_all_answers(ask, canonical, tokenizer, tmp_path):
    report = ask([SIX_TURNS, say("Z")])
    assert report.num_answered == 7
    rows = by_source(tmp_path / "out.jsonl")
    assert {source: row["answers"] for source, row in rows.items()} == {"in.jsonl:1#6": 6, "in.jsonl:2#1": 1}
    row = rows["in.jsonl:1#6"]
    assert (row["input_ids"], row["loss_mask"]) == encode_with_mask(row["messages"], tokenizer)
    assert ask([SIX_TURNS, say("Z")]).num_answered == 0  # the shorter file knows that all turns are done
    assert by_source(tmp_path / "out.jsonl") == rows


def test_a_conversation_that_was_broken_off_goes_on_in_its_row(ask, server, canonical, tokenizer, tmp_path):
    server.reply = lambda body: (400, {}) if server.question(body) == "D" else canonical(body)
    assert ask([SIX_TURNS]).num_answered == 3
    assert [row["answers"] for row in read_lines(tmp_path / "out.jsonl")] == [3]
    server.reply = canonical
    assert ask([SIX_TURNS]).num_answered == 3
    (row,) = read_lines(tmp_path / "out.jsonl")
    assert (row["input_ids"], row["loss_mask"]) == encode_with_mask(row["messages"], tokenizer)


def test_answers_with_other_ids_than_their_text_stay_rows_of_their_own(ask, server, canonical, tokenizer, tmp_path):
    """The prompt of the turn after C has other ids than C's row: A to C are one row, D to F another."""
    server.reply = lambda body: server.echo(body) if server.question(body) == "C" else canonical(body)
    ask([SIX_TURNS])
    rows = by_source(tmp_path / "out.jsonl")
    assert {source: row["answers"] for source, row in rows.items()} == {"in.jsonl:1#3": 3, "in.jsonl:1#6": 3}
    data = load_data([str(tmp_path / "out.jsonl")], tokenizer)
    learned = [sum(mask) for mask in data["loss_mask"]]
    canonical_answer = len(tokenizer.encode("Re: A", add_special_tokens=False)) + 1
    assert learned == [2 * canonical_answer + len(server.spell("Re: C")) + 1, 3 * canonical_answer]


def test_a_thinking_conversation_is_a_row_an_answer(ask, server, tmp_path):
    """The encoding drops the reasoning of earlier turns, so that no row contains another."""
    ids = [*server.spell("hm"), THINK_END, *server.spell("yes"), EOS]
    server.reply = lambda body: choice(token_ids=ids)
    ask([say("A", "", "B", "", "C")], mode="thinking")
    rows = read_lines(tmp_path / "out.jsonl")
    assert [(row["answers"], sum(row["loss_mask"])) for row in rows] == [(1, len(ids))] * 3


def test_a_full_disk_leaves_the_file_with_its_repetitions(ask, canonical, tmp_path, monkeypatch):
    def fail(file):
        if Path(f"/proc/self/fd/{file}").readlink().name == ".out.jsonl.partial":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(growing_file.os, "fsync", fail)
    with pytest.raises(OSError, match="out.jsonl is complete, but .* repetitions .*No space left"):
        ask([SIX_TURNS])
    monkeypatch.undo()
    assert [row["answers"] for row in read_lines(tmp_path / "out.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.settings.json"]
    assert ask([SIX_TURNS]).num_answered == 0
    assert [row["answers"] for row in read_lines(tmp_path / "out.jsonl")] == [6]


def test_a_part_of_the_rows_is_answered_and_another_part_is_another_file(ask, server, tmp_path):
    """Drawn by the seed, in the order of the file."""
    rows = [say(f"Q{i}") for i in range(40)]
    assert ask(rows, max_samples=12).num_answered == 12
    first = set(server.asked())
    assert len(first) == 12
    assert first != {f"Q{i}" for i in range(12)}
    assert ask(rows, max_samples=12).num_answered == 0
    with pytest.raises(ValueError, match="was started with data_sha256="):
        ask(rows, max_samples=13)
    server.requests = []
    ask(rows, max_samples=12, out=tmp_path / "again.jsonl", sampling=Sampling(seed=1))
    assert set(server.asked()) != first
    assert ask(rows, max_samples=100, out=tmp_path / "all.jsonl").num_answered == 40


@pytest.mark.parametrize(
    ("row", "question", "messages"),
    [
        (say("Hello"), "Hello", say("Hello", "Re: Hello")),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "x"}]},
            "Hi",
            say("Hi", "Re: Hi"),
        ),
        ({"instruction": "Add.", "input": "", "output": "2"}, "Add.", say("Add.", "Re: Add.")),
        ({"prompt": "Hi", "input_ids": [1, 2], "loss_mask": [0, 1]}, "Hi", say("Hi", "Re: Hi")),
    ],
    ids=["ends with the user", "ShareGPT", "Alpaca", "a prompt, and tokens"],
)
def test_every_row_format_is_answered(ask, server, tmp_path, row, question, messages):
    ask([row])
    assert server.asked() == [question]
    assert read_lines(tmp_path / "out.jsonl")[0]["messages"] == messages["messages"]


def test_turns_that_the_encoding_gives_no_header_are_kept(ask, server, tokenizer, tmp_path):
    greeting, second = ({"role": "assistant", "content": text} for text in ("Welcome!", "More?"))
    messages = [greeting, *say("A", "old")["messages"], second, *say("B", "old")["messages"]]
    assert answer_positions(messages) == [2, 5]
    ask([{"messages": messages}])
    new = [greeting, *say("A", "Re: A")["messages"], second, *say("B", "Re: B")["messages"]]
    assert [row["messages"] for row in read_lines(tmp_path / "out.jsonl")] == [new[:3], new]
    assert server.requests[1]["prompt"] == prompt_of(new[:5], tokenizer)


def test_thinking_rows_keep_their_reasoning_until_the_next_question(ask, server, tokenizer, tmp_path):
    server.reply = lambda body: choice(token_ids=[*server.spell("hm"), THINK_END, *server.spell("yes"), EOS])
    ask([say("A", "", "B", "")], mode="thinking", effort="max")
    first, second = read_lines(tmp_path / "out.jsonl")
    thought = {"role": "assistant", "reasoning": "hm", "content": "yes"}
    assert first["messages"] == [*say("A")["messages"], thought]
    assert (first["mode"], first["effort"]) == ("thinking", "max")
    asked = [*say("A")["messages"], thought, {"role": "user", "content": "B"}]
    prompt = prompt_of(asked, tokenizer, mode="thinking", effort="max")
    assert tokenizer.decode(prompt).endswith("</think>yes<｜end▁of▁sentence｜><｜User｜>B<｜Assistant｜><think>")
    assert second["input_ids"] == prompt + [*server.spell("hm"), THINK_END, *server.spell("yes"), EOS]
    assert sum(second["loss_mask"]) == 7


def test_a_rows_own_mode_wins_and_is_written_down(ask, tokenizer, tmp_path):
    ask([say("A", mode="thinking", effort="max"), say("B")])
    rows = by_source(tmp_path / "out.jsonl")
    assert [(rows[f"in.jsonl:{i}#1"]["mode"], rows[f"in.jsonl:{i}#1"]["effort"]) for i in (1, 2)] == [
        ("thinking", "max"),
        ("non-thinking", None),
    ]
    assert sorted(load_data([str(tmp_path / "out.jsonl")], tokenizer)["mode"]) == ["non-thinking", "thinking"]


def test_without_token_ids_the_text_is_encoded_and_the_row_says_so(ask, server, tokenizer, tmp_path):
    server.reply = lambda body: choice(text="Re: Hello")
    report = ask([say("Hello")])
    (row,) = read_lines(tmp_path / "out.jsonl")
    assert row["token_ids"] == "re-encoded"
    assert report.num_re_encoded == 1
    assert (row["input_ids"], row["loss_mask"]) == encode_with_mask(row["messages"], tokenizer)


@pytest.mark.parametrize(
    ("text", "reason", "written"),
    [
        ("hm</think>yes", "stop", "hm</think>yes<｜end▁of▁sentence｜>"),
        ("hm</think>yes<｜end▁of▁sentence｜>", "stop", "hm</think>yes<｜end▁of▁sentence｜>"),
        ("hm</think>ye", "length", "hm</think>ye"),
        ("hm", "length", "hm"),
    ],
)
def test_a_text_with_reasoning_gets_no_token_that_was_not_written(
    ask, server, tokenizer, tmp_path, text, reason, written
):
    server.reply = lambda body: choice(text=text, finish_reason=reason)
    ask([say("Hello")], mode="thinking")
    (row,) = read_lines(tmp_path / "out.jsonl")
    answer = [i for i, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit]
    assert tokenizer.decode(answer) == written
    assert (THINK_END in answer) == ("</think>" in written)


def test_an_answer_cut_by_the_limit_gets_no_eos_and_ends_its_conversation(ask, server, tmp_path):
    server.reply = lambda body: choice(token_ids=server.spell("Re"), finish_reason="length")
    rows = [say("A", "", "B", "", "C"), say("D")]
    report = ask(rows)
    found = by_source(tmp_path / "out.jsonl")
    assert set(found) == {"in.jsonl:1#1", "in.jsonl:2#1"}
    assert found["in.jsonl:1#1"]["finish_reason"] == "length"
    assert found["in.jsonl:1#1"]["input_ids"][-2:] == server.spell("Re")
    assert (report.num_answered, report.num_cut, report.num_unasked) == (2, 2, 2)
    assert ask(rows).num_answered == 0
    assert sorted(server.asked()) == ["A", "D"]


def test_requests_are_really_concurrent_and_bounded(ask, server):
    together = threading.Barrier(4)

    def reply(body):
        together.wait(timeout=10)  # answers come only when four requests are there at once
        return server.echo(body)

    server.reply = reply
    assert ask([say(f"Q{i}") for i in range(16)], writer={"concurrency": 4, "retries": 0}).num_answered == 16
    assert server.max_active == 4


def test_answers_that_come_out_of_order_belong_to_their_rows(ask, server, tmp_path):
    """https://github.com/deepseek-ai/DeepSpec/issues/35"""

    def reply(body):
        time.sleep(0.2 if server.question(body) == "Q0" else 0)
        return server.echo(body)

    server.reply = reply
    ask([say(f"Q{i}", "", f"R{i}", "") for i in range(5)])
    rows = read_lines(tmp_path / "out.jsonl")
    assert rows[0]["source"] != f"{tmp_path / 'in.jsonl'}:1#1"
    for row in rows:
        line, turn = map(int, row["source"].rpartition(":")[2].split("#"))
        assert row["messages"][-1]["content"] == f"Re: {'QR'[turn - 1]}{line - 1}"


@pytest.mark.parametrize("failure", ["busy", "broken", "hung up", "no JSON"])
def test_passing_failures_are_tried_again(ask, server, tmp_path, failure):
    failed = set()

    def reply(body):
        if server.question(body) in failed:
            return server.echo(body)
        failed.add(server.question(body))
        return {
            "busy": (429, {}, [("Retry-After", "0")]),
            "broken": (503, {}),
            "hung up": None,
            "no JSON": (200, {}, [("Content-Length", "1")]),
        }[failure]

    server.reply = reply
    report = ask([say(q) for q in QUESTIONS])
    assert (report.num_answered, report.num_failed) == (5, 0)
    assert len(by_source(tmp_path / "out.jsonl")) == 5
    assert len(server.requests) == 10
    assert not (tmp_path / "out.failed.jsonl").exists()


def test_a_servers_retry_after_is_waited_for(ask, server):
    times = []

    def reply(body):
        times.append(time.monotonic())
        return (429, {}, [("Retry-After", "1")]) if len(times) == 1 else server.echo(body)

    server.reply = reply
    ask([say("A")])
    assert 1 <= times[1] - times[0] < 3


def test_refused_turns_go_to_their_own_file_and_are_asked_again_next_time(ask, server, tmp_path):
    rows = [say("A", "", "too long", "", "B", ""), say("C")]
    server.reply = lambda body: (
        (400, {"error": "maximum context length"}) if server.question(body) == "too long" else server.echo(body)
    )
    report = ask(rows)
    (failed,) = read_lines(tmp_path / "out.failed.jsonl")
    assert failed["source"].endswith("in.jsonl:1#2")
    assert failed["reason"].startswith("HTTP 400")
    assert "maximum context length" in failed["reason"]
    assert failed["messages"] == say("A", "Re: A", "too long")["messages"]
    assert (report.num_answered, report.num_failed, report.num_unasked) == (2, 1, 1)
    assert sorted(server.asked()) == ["A", "C", "too long"]  # a refusal is not tried again

    server.reply, server.requests = server.echo, []
    assert ask(rows).num_answered == 2
    assert server.asked() == ["too long", "B"]
    assert len(by_source(tmp_path / "out.jsonl")) == 4
    assert not (tmp_path / "out.failed.jsonl").exists()


def test_an_answer_that_takes_too_long_fails_alone(ask, server, tmp_path):
    def reply(body):
        time.sleep(1.5 if server.question(body) == "slow" else 0)
        return server.echo(body)

    server.reply = reply
    report = ask([say("slow"), say("A")], writer={"timeout": 0.5, "retries": 1})
    assert (report.num_answered, report.num_failed) == (1, 1)
    assert read_lines(tmp_path / "out.failed.jsonl")[0]["reason"] == "timed out, after 2 tries"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (choice(token_ids=[20], finish_reason="abort"), "finish_reason 'abort'"),
        (choice(token_ids=[20, 4096]), "outside the tokenizer's 4096"),
        (choice(token_ids=[]), "or none"),
        (choice(token_ids=[20], prompt_token_ids=[0, 0]), "prompt ids are not those"),
        (choice(text=""), "neither token ids nor text"),
        ((200, {"choices": []}), "no choice in the server's answer"),
        ((200, ["surprise"]), "no choice in the server's answer"),
    ],
)
def test_an_answer_that_is_none_fails_with_its_reason(ask, server, tmp_path, answer, reason):
    server.reply = lambda body: answer
    assert ask([say("A")]).num_failed == 1
    assert reason in read_lines(tmp_path / "out.failed.jsonl")[0]["reason"]
    assert read_lines(tmp_path / "out.jsonl") == []


def test_a_server_whose_replies_are_not_json_is_there(ask, server, tmp_path):
    """A proxy's page of HTML costs the turns it answers, which the next run asks again."""
    server.reply = lambda body: (200, b"<html>") if len(server.requests) < 12 else server.echo(body)
    report = ask([say(f"Q{i}") for i in range(20)], writer={"retries": 0, "concurrency": 2})
    assert report.num_failed >= 8
    assert report.num_answered == 20 - report.num_failed
    assert "Expecting value" in read_lines(tmp_path / "out.failed.jsonl")[0]["reason"]


def test_a_server_that_goes_away_stops_the_run_and_costs_nothing(ask, server, tmp_path):
    rows = [say(f"Q{i}") for i in range(60)]
    server.reply = lambda body: server.echo(body) if len(server.requests) < 20 else None
    with pytest.raises(OSError, match="is gone .*again to resume"):
        ask(rows, writer={"retries": 0})
    assert len(server.requests) < 40
    server.reply = server.echo
    ask(rows)
    assert len(by_source(tmp_path / "out.jsonl")) == 60


def test_sampled_requests_carry_a_seed_of_their_own_wherever_the_file_lies(ask, server, tokenizer, tmp_path):
    def seeds(folder, seed):
        (tmp_path / folder).mkdir(exist_ok=True)
        file = write_rows(tmp_path / folder / "in.jsonl", [say("A"), say("A")])
        server.requests = []
        ask(file, out=tmp_path / f"{folder}-{seed}.jsonl", sampling=Sampling(temperature=0.7, top_p=0.9, seed=seed))
        assert {(body["temperature"], body["top_p"]) for body in server.requests} == {(0.7, 0.9)}
        return sorted(body["seed"] for body in server.requests)

    first = seeds("a", 0)
    assert len(set(first)) == 2
    assert seeds("b", 0) == first
    assert not set(seeds("a", 1)) & set(first)


# --------------------------------------------------------------------------------------------------------- going on


@pytest.mark.parametrize("cut", [1, 40, 2000])
def test_a_file_cut_in_the_middle_of_a_line_is_completed(ask, server, tmp_path, cut):
    """https://github.com/deepseek-ai/DeepSpec/issues/35"""
    rows, out = [say(f"Q{i}", "", f"R{i}") for i in range(6)], tmp_path / "out.jsonl"
    ask(rows)
    expected, num_asked = by_source(out), len(server.requests)
    out.write_bytes(out.read_bytes()[:-cut])
    num_left = out.read_bytes().count(b"\n")
    ask(rows)
    assert by_source(out) == expected
    assert len(server.requests) - num_asked == 12 - num_left < 12


def test_a_conversation_goes_on_with_the_answers_that_are_written(ask, server, tmp_path):
    rows, out = [say("A", "", "B", "")], tmp_path / "out.jsonl"
    ask(rows)
    out.write_text(out.read_text().splitlines(keepends=True)[0])
    server.reply, server.requests = (lambda body: choice(token_ids=[*server.spell("other"), EOS])), []
    ask(rows)
    assert server.asked() == ["B"]
    assert read_lines(out)[1]["messages"] == say("A", "Re: A", "B", "other")["messages"]


def test_a_finished_run_asks_nothing(ask, server):
    rows = [say(q) for q in QUESTIONS]
    ask(rows)
    report = ask(rows)
    assert (report.num_answered, report.num_done_before, len(server.requests)) == (0, 5, 5)


@pytest.mark.slow
@pytest.mark.parametrize("moments", [(1, 30, 59), nightly((1, 2, 3, 10, 20, 30, 40, 50, 58, 59))], ids=len)
def test_a_run_killed_at_any_moment_ends_with_the_rows_of_one_that_was_not(ask, server, tmp_path, moments):
    """After the first of 60 answers, in the middle, before the last; others have been asked for each time.

    https://github.com/deepseek-ai/DeepSpec/issues/35
    """
    rows, out = [say(f"Q{i}", "", f"R{i}") for i in range(30)], tmp_path / "killed.jsonl"
    ask(rows, out=tmp_path / "whole.jsonl")
    options = ["--server", server.url, "--model", "v4", "--tokenizer", TINY, "--concurrency", "3", "--output", out]
    num_written = 0
    for num_lines in moments:
        numbers, is_killed = itertools.count(num_written), threading.Event()

        def reply(body, numbers=numbers, is_killed=is_killed, num_lines=num_lines):
            if next(numbers) < num_lines:
                return server.echo(body)
            is_killed.wait()  # then hang up

        server.reply = reply
        pid = fork(lambda: run_command(tmp_path / "in.jsonl", *options))
        wait_for_lines(out, num_lines, pid)
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        is_killed.set()
        num_written = out.read_bytes().count(b"\n")
        assert num_written == num_lines
    server.reply = server.echo
    assert run_command(tmp_path / "in.jsonl", *options) == 0
    assert by_source(out) == by_source(tmp_path / "whole.jsonl")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sampling": Sampling(temperature=0.5)}, "temperature=0.0 .now 0.5"),
        ({"sampling": Sampling(max_new_tokens=9)}, "max_new_tokens=2048 .now 9"),
        ({"sampling": Sampling(seed=1)}, "seed=0 .now 1"),
        ({"mode": "thinking"}, "mode=non-thinking .now thinking"),
        ({"generation": "0731"}, "generation=preview .now 0731"),
        ({"rows": [say("B")]}, "data_sha256="),
    ],
)
def test_other_settings_than_the_first_runs_are_refused_by_name(ask, server, tmp_path, change, named):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2307"""
    out = tmp_path / "out.jsonl"
    ask([say("A")])
    before = out.read_bytes()
    with pytest.raises(ValueError, match=named):
        ask(**{"rows": [say("A")], **change})
    assert out.read_bytes() == before
    assert len(server.requests) == 1


def test_another_model_is_refused_and_another_address_is_not(ask, server, tokenizer, tmp_path):
    ask([say("A")])
    other = TargetWriter(str(TINY))
    with pytest.raises(ValueError, match=r"backend=server \(now transformers\), model=v4 \(now target\)"):
        regenerate([str(tmp_path / "in.jsonl")], tmp_path / "out.jsonl", other, tokenizer)
    again = FakeServer(tokenizer)
    writer = ServerWriter(again.url + "/v1/", "v4", concurrency=1)
    assert regenerate([str(tmp_path / "in.jsonl")], tmp_path / "out.jsonl", writer, tokenizer).num_done_before == 1
    again.http.shutdown()


def test_a_file_of_something_else_is_left_alone(ask, tmp_path):
    out = tmp_path / "out.jsonl"
    out.write_text("precious\n")
    with pytest.raises(ValueError, match="out.jsonl exists, but out.jsonl.settings.json does not"):
        ask([say("A")])
    assert out.read_text() == "precious\n"


def test_a_broken_line_in_the_output_is_named(ask, tmp_path):
    out = tmp_path / "out.jsonl"
    ask([say("A"), say("B")])
    out.write_text("rubbish\n" + out.read_text())
    with pytest.raises(ValueError, match="out.jsonl:1 is broken"):
        ask([say("A"), say("B")])


def test_two_runs_cannot_write_one_file(ask, tmp_path):
    rows = [say("A")]
    ask(rows)
    settings = json.loads((tmp_path / "out.jsonl.settings.json").read_text())
    with Output(tmp_path / "out.jsonl", settings), pytest.raises(OSError, match="another run is writing to"):
        ask(rows)


# --------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"messages": [{"role"', "not JSON"),
        ("[]", "a row must be a JSON object"),
        ('{"input_ids": [0, 4], "loss_mask": [0, 1]}', "tokens only"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "no user turn"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "role 'tool'"),
        ('{"messages": [{"role": "user", "content": "a"}], "mode": "fast"}', "unknown mode 'fast'"),
    ],
)
def test_a_bad_row_is_named_before_any_work_or_counted_as_failed(ask, server, tmp_path, row, reason):
    file = tmp_path / "in.jsonl"
    file.write_text(f"{json.dumps(say('A'))}\n\n{row}\n{json.dumps(say('B'))}\n")
    with pytest.raises(ValueError, match=f"in.jsonl:3: .*{reason}.*--skip-bad-rows"):
        ask(file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]
    assert not server.requests

    report = ask(file, skip_bad_rows=True)
    assert (report.num_answered, report.num_failed) == (2, 1)
    (failed,) = read_lines(tmp_path / "out.failed.jsonl")
    assert failed["source"].endswith("in.jsonl:3")
    assert reason in failed["reason"]
    assert set(by_source(tmp_path / "out.jsonl")) == {"in.jsonl:1#1", "in.jsonl:4#1"}


def test_a_file_given_twice_is_refused(server, tokenizer, tmp_path):
    file, other = (str(write_rows(tmp_path / name, [say("A")])) for name in ("in.jsonl", "other.jsonl"))
    for files in ([file, file], [file, other, file]):
        with pytest.raises(ValueError, match="in.jsonl is given twice"):
            regenerate(files, tmp_path / "out.jsonl", ServerWriter(server.url, "v4"), tokenizer)


def run_command(*args) -> int:
    """The command line, as `hyperdflash data regenerate` runs it."""
    return command.run(parse(["data", "regenerate", *map(str, args)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--server", "URL", "--model", "v4"], "--tokenizer"),
        (["--server", "URL", "--tokenizer", TINY], "--model"),
        (
            ["--server", "URL", "--model", "v4", "--tokenizer", TINY, "--batch-size", 4],
            "--batch-size needs --target",
        ),
        (["--target", TINY, "--concurrency", 4], "--concurrency needs --server"),
        (["--target", TINY, "--temperature", -1], "--temperature must be 0"),
        (["--target", TINY, "--top-p", 0], "--top-p must be above 0"),
        (["--target", TINY, "--max-new-tokens", 0], "--max-new-tokens must be at least 1"),
        (["--target", TINY, "--effort", "most"], "unknown effort 'most'"),
        (["--target", "no/such/folder/at all"], "no folder no/such"),
        (["--server", "URL", "--model", "v4", "--tokenizer", "no/such/tokenizer"], "no folder no/such/tokenizer"),
        (["--server", "localhost:8000", "--model", "v4", "--tokenizer", TINY], "must start with http"),
        (["--server", "http://127.0.0.1:9", "--model", "v4", "--tokenizer", TINY], "no server answers at"),
        (["--server", "URL", "--model", "v5", "--tokenizer", TINY], "does not serve 'v5'; it serves v4"),
        (["--server", "URL", "--model", "v4", "--tokenizer", TINY, "--api-key-env", "NO_SUCH"], "NO_SUCH"),
    ],
)
def test_wrong_options_are_one_error_and_leave_nothing_behind(server, tmp_path, options, message):
    file = write_rows(tmp_path / "in.jsonl", [say("A")])
    options = [server.url if option == "URL" else option for option in options]
    with pytest.raises((ValueError, OSError), match=message):
        run_command(file, "--output", tmp_path / "out.jsonl", *options)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl"]


@pytest.mark.parametrize(
    ("output", "options"),
    [
        ("out.jsonl", ["--server", "localhost:8000", "--model", "v4", "--tokenizer", TINY]),
        ("out.jsonl", ["--server", "http://a", "--model", "v4", "--tokenizer", TINY, "--api-key-env", "NO_SUCH"]),
        ("out.txt", ["--target", TINY]),
    ],
)
def test_what_is_typed_wrong_is_an_error_of_usage(tmp_path, output, options):
    file = write_rows(tmp_path / "in.jsonl", [say("A")])
    with pytest.raises(UsageError):
        run_command(file, "--output", tmp_path / output, *options)


def test_a_snapshot_of_the_hubs_cache_is_a_target_to_load(tmp_path):
    """A drafter records its commit, but from_pretrained takes none with a folder."""
    snapshot = tmp_path / "models--org--v4" / "snapshots" / ("c" * 40)
    shutil.copytree(TINY, snapshot)
    writer = TargetWriter(str(snapshot))
    writer.load()
    assert (writer.name, writer.revision) == ("org/v4", "c" * 40)
    assert writer.target.config.model_type == "deepseek_v4"


@pytest.mark.parametrize(
    ("output", "message"),
    [("in.jsonl", "is one of the input files"), ("no/out.jsonl", "no folder"), ("out.txt", ".jsonl"), ("", ".jsonl")],
)
def test_an_output_that_cannot_be_one_is_refused(tmp_path, output, message):
    file = write_rows(tmp_path / "in.jsonl", [say("A")])
    with pytest.raises((ValueError, OSError), match=message):
        run_command(file, "--output", tmp_path / output, "--target", TINY)
    assert file.read_text() == json.dumps(say("A")) + "\n"


def test_the_command_sends_its_key_and_reports(server, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "open sesame")
    file, out = write_rows(tmp_path / "in.jsonl", [say("A")]), tmp_path / "out.jsonl"
    options = ["--server", server.url, "--model", "v4", "--tokenizer", TINY, "--api-key-env", "SERVER_KEY"]
    assert run_command(file, "--output", out, *options) == 0
    assert server.headers[0]["Authorization"] == "Bearer open sesame"
    assert "open sesame" not in (tmp_path / "out.jsonl.settings.json").read_text()
    assert f"{out}: 1 answers of 6 tokens; " in capsys.readouterr().out


def test_the_status_is_1_only_if_there_is_no_answer_at_all(server, tmp_path, capsys):
    file, out = write_rows(tmp_path / "in.jsonl", [say("A"), say("bad")]), tmp_path / "out.jsonl"
    options = ["--output", out, "--server", server.url, "--model", "v4", "--tokenizer", TINY]
    server.reply = lambda body: (400, {})
    assert run_command(file, *options) == 1
    assert "2 failed" in capsys.readouterr().out
    server.reply = lambda body: (400, {}) if server.question(body) == "bad" else server.echo(body)
    assert run_command(file, *options) == 0
    assert "out.failed.jsonl" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ a target, in process


@pytest.fixture(scope="module")
def target():
    writer = TargetWriter(str(TINY), dtype="float32")
    writer.load()
    return writer.target


@pytest.fixture
def write(target, tokenizer, tmp_path, monkeypatch):
    """Run `regenerate` with the tiny target; returns the rows by source."""
    monkeypatch.setattr("hyperdflash.training.writers.load_target_model", lambda *args: target)

    def run(rows, name="out", *, batch_size=8, max_new_tokens=16, sampling=None, **kwargs):
        file, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / f"{name}.jsonl"
        sampling = sampling or Sampling(max_new_tokens)
        run.report = regenerate(
            [str(file)], out, TargetWriter(str(TINY), batch_size=batch_size), tokenizer, sampling=sampling, **kwargs
        )
        return by_source(out)

    return run


@pytest.mark.slow
def test_a_batch_of_unequal_prompts_is_answered_as_generate_answers_each_alone(write, target, tokenizer):
    """https://github.com/huggingface/transformers/issues/45938"""
    questions = [*QUESTIONS, "I am looking for a place to stay in the north of town, with free parking, for 3 nights."]
    rows = write([say(q) for q in questions], max_new_tokens=12)
    assert len({len(row["input_ids"]) - sum(row["loss_mask"]) for row in rows.values()}) >= 5
    for i, question in enumerate(questions, 1):
        prompt = torch.tensor([prompt_of(say(question)["messages"], tokenizer)])
        expected = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        row = rows[f"in.jsonl:{i}#1"]
        assert row["input_ids"] == expected[0].tolist()
        assert row["finish_reason"] == ("stop" if row["input_ids"][-1] == EOS else "length")
        assert (row["model"], row["token_ids"]) == ("target", "exact")
    assert {row["finish_reason"] for row in rows.values()} == {"stop", "length"}


@pytest.mark.slow
def test_sampled_answers_do_not_depend_on_the_batch(write):
    rows, sampling = [say(q) for q in QUESTIONS], Sampling(16, temperature=1.0, top_p=0.95)
    together = write(rows, "together", sampling=sampling)
    assert write(rows, "alone", sampling=sampling, batch_size=1) == together
    assert write(rows, "pairs", sampling=sampling, batch_size=2) == together
    assert write(rows, "seed", sampling=sampling._replace(seed=1)) != together
    assert write(rows, "greedy") != together


def test_the_same_question_on_two_lines_is_sampled_twice(write):
    rows = write([say("Hello")] * 4, sampling=Sampling(16, temperature=1.0))
    assert len({tuple(row["input_ids"]) for row in rows.values()}) > 1


def test_the_target_answers_later_turns_after_its_own_answers(write, tokenizer):
    rows = write([say("Hello", "old", "I need a train.", "old")], max_new_tokens=32)
    (row,) = rows.values()  # with both answers, whose ids the tokenizer gives their texts
    assert row["answers"] == 2
    prompt = prompt_of(row["messages"][:3], tokenizer)
    assert row["input_ids"][: len(prompt)] == prompt
    assert "old" not in [message["content"] for message in row["messages"]]
    answers = [message["content"] for message in row["messages"][1::2]]
    learned = [i for i, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit]
    assert tokenizer.decode([i for i in learned if i != EOS]) == "".join(answers)


def test_the_target_thinks_when_asked_to(write, tokenizer):
    rows = write([say("Hello")], mode="thinking")
    row = rows["in.jsonl:1#1"]
    answer = [i for i, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit]
    assert row["input_ids"][: -len(answer)] == prompt_of(say("Hello")["messages"], tokenizer, mode="thinking")
    message = row["messages"][-1]
    text = message["reasoning"] + ("</think>" + message["content"] if THINK_END in answer else "")
    assert tokenizer.decode([i for i in answer if i != EOS]) == text


def test_a_target_that_was_stopped_goes_on_to_the_same_rows(write, tmp_path):
    rows, sampling = [say(q, "", "And then?") for q in QUESTIONS], Sampling(12, temperature=1.0)
    whole, out = write(rows, sampling=sampling), tmp_path / "out.jsonl"
    out.write_bytes(out.read_bytes()[: out.stat().st_size // 2])
    assert write(rows, sampling=sampling) == whole
    assert 0 < write.report.num_answered < sum(row["answers"] for row in whole.values())


def test_a_prompt_as_long_as_the_target_fails_and_a_shorter_one_is_cut_there(write, tmp_path, target, monkeypatch):
    monkeypatch.setattr(target.config, "max_position_embeddings", 12)
    rows = write([say("1 2 3 4 5 6 7 8 9 1 2 3"), say("Hello")], max_new_tokens=100)
    (row,) = rows.values()
    assert len(row["input_ids"]) <= 12
    (failed,) = read_lines(tmp_path / "out.failed.jsonl")
    assert "fill the target's 12 positions" in failed["reason"]


def test_a_token_is_drawn_from_its_rows_own_number():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(6, 3)
    draws = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81, 1 - 2**-53], dtype=torch.float64)
    assert choose(logits, draws, Sampling(temperature=1.0)).tolist() == [0, 0, 1, 1, 2, 2]
    # 0.5 alone is less than 0.6, so the nucleus is the first two, 5/8 and 3/8
    assert choose(logits, draws, Sampling(temperature=1.0, top_p=0.6)).tolist() == [0, 0, 0, 1, 1, 1]
    # at temperature 1/2: 25/38, 9/38, 4/38
    assert choose(logits, draws, Sampling(temperature=0.5)).tolist() == [0, 0, 0, 1, 1, 2]
    assert choose(logits, None, Sampling()).tolist() == [0] * 6


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [
        ([10, 10, 10, 500], [10, 10, 10]),
        ([10, 500, 500, 560, 1000], [500, 500, 560]),
        ([10, 40, 60, 70, 71, 72, 73], [70, 71, 72, 73]),  # of three batches of four, the one that differs least
        ([5], [5]),
    ],
)
def test_a_batch_is_the_largest_of_prompts_of_similar_length(lengths, taken):
    pending = [Turn("x", 1, [], 0, {}, [0] * length) for length in lengths]
    batch = take_batch(pending, 4)
    assert [len(turn.prompt_ids) for turn in batch] == taken
    assert sorted(len(turn.prompt_ids) for turn in pending + batch) == sorted(lengths)
