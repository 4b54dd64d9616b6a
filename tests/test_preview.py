"""The mask preview: what a person sees of a data file, in a terminal and in a pipe.

.venv/bin/python -m pytest tests/test_preview.py
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_encoding import ASSISTANT, BOS, CLOSE, EOS, USER, make_tokenizer, say

from hyperdflash.common.console import visible
from hyperdflash.training import preview
from hyperdflash.training.data import Sample
from hyperdflash.training.preview import Piece, as_text, make_pieces

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny" / "target"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def sample_of(tokenizer, *parts, mode="non-thinking"):
    """(token text, bit) pairs as a sample; a text is one token a byte, a tuple one control token."""
    ids, mask = [], []
    for text, bit in parts:
        found = tokenizer.convert_tokens_to_ids(list(text)) if isinstance(text, tuple) else plain(text, tokenizer)
        ids += found
        mask += [bit] * len(found)
    return Sample(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.int8), mode, "")


def plain(text, tokenizer):
    return tokenizer(text, add_special_tokens=False).input_ids


def shown(tokenizer, *parts):
    return as_text(make_pieces(sample_of(tokenizer, *parts), tokenizer), colour=False).plain


def run_preview(*args) -> int:
    parser = argparse.ArgumentParser()
    preview.add_parser(parser.add_subparsers())
    args = parser.parse_args(["preview", *map(str, args)])
    return args.run(args)


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    rows = [
        {"messages": say(("u", "Hi"), ("a", "I am\nhere"))},
        {"messages": say(("u", "no answer"))},
        {"messages": say(("u", "<b>&amp;</b>"), ("a", "<script>x</script>")), "mode": "thinking"},
        {"messages": say(("u", "a third"), ("a", "one"))},
    ]
    lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join([lines[0], '{"messages": ', *lines[1:]]) + "\n")
    return path


# -------------------------------------------------------------------------------------------------------------- pieces


def test_each_token_is_a_piece_with_its_mask_and_kind(tokenizer):
    pieces = make_pieces(sample_of(tokenizer, ((BOS, USER), 0), ("Hi", 0), (("</think>",), 1), ("a", 1)), tokenizer)
    assert [(p.text, p.is_learned, p.is_control) for p in pieces] == [
        (BOS, False, True),
        (USER, False, True),
        ("H", False, False),
        ("i", False, False),
        (CLOSE, True, True),
        ("a", True, False),
    ]


def test_tokens_that_share_a_character_are_one_piece(tokenizer):
    pieces = make_pieces(sample_of(tokenizer, ("a好😀b", 1)), tokenizer)
    assert [(p.text, len(p.token_ids)) for p in pieces] == [("a", 1), ("好", 3), ("😀", 4), ("b", 1)]


def test_a_character_cut_in_two_by_the_mask_or_the_end_stays_visible(tokenizer):
    first, second, third = plain("好", tokenizer)
    sample = Sample(np.array([first, second, third, first]), np.array([0, 1, 1, 1]), "non-thinking", "")
    pieces = make_pieces(sample, tokenizer)
    assert [p.is_learned for p in pieces] == [False, True]
    assert [i for p in pieces for i in p.token_ids] == [first, second, third, first]
    assert all(p.text for p in pieces)


def test_no_token_is_lost_or_doubled(tokenizer):
    rng = np.random.default_rng(0)
    ids = rng.integers(len(tokenizer), size=2000)
    sample = Sample(ids, rng.integers(2, size=2000), "non-thinking", "")
    pieces = make_pieces(sample, tokenizer)
    assert [i for p in pieces for i in p.token_ids] == ids.tolist()
    assert [p.is_learned for p in pieces for _ in p.token_ids] == sample.loss_mask.astype(bool).tolist()


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("a\nb", "a⏎\nb"),
        ("\t", "␉"),
        ("\r\n", "␍⏎\n"),
        ("\x1b[31m", "␛[31m"),
        ("\x7f\x9b", "\\x7f\\x9b"),
        ("ä 好", "ä 好"),
    ],
)
def test_control_characters_are_shown_and_never_sent(text, seen):
    assert visible(text) == seen


# --------------------------------------------------------------------------------------------------------- text output


def test_without_colour_learned_tokens_stand_in_brackets(tokenizer):
    parts = ((BOS, USER), 0), ("Hi", 0), ((ASSISTANT, CLOSE), 0), ("a\nb", 1), ((EOS,), 1)
    assert shown(tokenizer, *parts) == f"{BOS}{USER}H│i{ASSISTANT}{CLOSE}⟦a│⏎\n│b{EOS}⟧"
    assert shown(tokenizer, *parts, ((USER,), 0), ("x", 0)).endswith(f"b{EOS}⟧{USER}x")
    assert shown(tokenizer, ("a", 1), ("b", 0), ("c", 1)) == "⟦a⟧b⟦c⟧"


def test_with_colour_learned_tokens_are_green_and_neighbours_differ():
    pieces = [Piece("a", [1], False, False), Piece("<x>", [2], False, True), *[Piece("b", [3], True, False)] * 2]
    text = as_text(pieces, colour=True)
    assert text.plain == "a<x>bb"
    styles = [str(span.style) for span in text.spans]
    assert ["green" in style for style in styles[-2:]] == [True, True]
    assert styles[-1] != styles[-2]
    assert not any("green" in style for style in styles[:-2])


def test_a_pipe_gets_samples_in_brackets_and_the_counts(chats, capsys):
    assert run_preview(chats, "--tokenizer", TINY, "--num-samples", 2) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert f"{chats}:1  non-thinking, " in out
    assert f"{chats}:4  thinking, " in out
    assert f"{chats}:5" not in out
    learned = re.findall(r"⟦([^⟧]*)⟧", out)[1:]  # the first is the legend
    assert [text.replace("│", "") for text in learned] == [f"I am⏎\nhere{EOS}", f"{CLOSE}<script>x</script>{EOS}"]
    assert out.splitlines()[-3:] == [
        "of the rows read: 2 of 4 rows kept, 2 left out",
        f"  1 left out: bad row ({chats}:2: not JSON: Expecting value at character 13 of the line)",
        f"  1 left out: no supervised token ({chats}:3)",
    ]


def test_the_header_counts_tokens(chats, tokenizer, capsys, monkeypatch):
    monkeypatch.setattr(preview, "load_tokenizer", lambda name: tokenizer)
    run_preview(chats, "--tokenizer", "any", "--num-samples", 1)
    assert f"{chats}:1  non-thinking, 16 tokens, 10 of them learned" in capsys.readouterr().out
    run_preview(chats, "--tokenizer", "any", "--num-samples", 1, "--max-length", 9)
    assert f"{chats}:1  non-thinking, 9 tokens, 3 of them learned" in capsys.readouterr().out


def test_a_terminal_gets_colour_and_no_brackets(chats, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")  # of whoever runs the tests, it may be none or dumb
    monkeypatch.delenv("NO_COLOR", raising=False)
    # Several processes of `datasets` leave rich with a copy of the environment (dill)
    monkeypatch.setattr("rich.console.Console._environ", os.environ)
    run_preview(chats, "--tokenizer", TINY)
    out = capsys.readouterr().out
    assert re.search(r"\x1b\[1;7;32m<｜end▁of▁sentence｜>", out)
    assert re.search(r"\x1b\[1;(4;)?32mhe", out)
    assert "⟦" not in out


def test_a_terminal_without_colour_gets_brackets(chats, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    run_preview(chats, "--tokenizer", TINY)
    assert "⟦" in capsys.readouterr().out


@pytest.mark.slow
def test_a_terminal_without_unicode_shows_everything_all_the_same(chats):
    """https://github.com/WangRongsheng/MedQA-ChatGLM/issues/2"""
    script = (
        "import argparse, sys; from hyperdflash.training import preview\n"
        "parser = argparse.ArgumentParser(); preview.add_parser(parser.add_subparsers())\n"
        "args = parser.parse_args(sys.argv[1:]); sys.exit(args.run(args))"
    )
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", script, "preview", chats, "--tokenizer", TINY]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=True)
    assert b"2 left out" in run.stdout
    assert run.stdout.isascii()


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (["--num-samples", 0], ValueError, "--num-samples must be at least 1, got 0"),
        (["--effort", "low"], ValueError, "unknown effort 'low'"),
        (["--max-length", 1], ValueError, "max_length must be at least 3"),
        (["--tokenizer", "./absent"], FileNotFoundError, "no folder ./absent"),
        (["--tokenizer", "empty"], OSError, "^no tokenizer can be loaded from empty: .*"),
        (["--max-length", 4], ValueError, "no row can be trained on: 0 of 5 rows kept, .*3 left out: cut off"),
    ],
)
def test_a_mistake_is_one_line_and_prints_no_sample(options, error, message, chats, monkeypatch, capsys):
    monkeypatch.chdir(chats.parent)
    (chats.parent / "empty").mkdir()
    with pytest.raises(error, match=message) as caught:
        run_preview("chats.jsonl", "--tokenizer", TINY, *options)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""


def test_a_tokenizer_without_the_control_tokens_is_said_once_and_not_for_every_row(chats, monkeypatch):
    """https://github.com/modelscope/evalscope/issues/1548"""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    foreign = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    monkeypatch.setattr(preview, "load_tokenizer", lambda name: foreign)
    with pytest.raises(ValueError, match="^the tokenizer lacks control tokens"):
        run_preview(chats, "--tokenizer", "any")


@pytest.mark.parametrize("row", [{"messages": say(("u", "Hi"))}, {"prompt": "Hi"}, {"messages": say(("s", "S"))}])
def test_prompts_without_answers_are_told_the_way_to_answers(row, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="1 left out: no supervised token .*`hyperdflash data regenerate` lets"):
        run_preview(path, "--tokenizer", TINY)


def test_a_row_cut_by_the_limit_is_counted(chats, capsys):
    run_preview(chats, "--tokenizer", TINY, "--num-samples", 1, "--max-length", 7)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "  1 of the rows kept are longer than max_length: their ends are not learned"


def test_only_as_much_is_read_as_is_shown(chats, capsys):
    with chats.open("a") as file:
        file.write("{" * 1000)
    run_preview(chats, "--tokenizer", TINY, "--num-samples", 1)
    assert "of the rows read: 1 of 1 rows kept, 0 left out" in capsys.readouterr().out
