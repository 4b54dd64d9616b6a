"""The command line: what a person types, sees, and is told."""

import io
import json
import math
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import Qwen3Config

from hyperdflash.__main__ import main
from hyperdflash.generation.decoding import first_difference
from hyperdflash.generation.demo import TINY
from hyperdflash.generation.streaming import DraftStreamer

TARGET, DRAFTER = str(TINY / "target"), str(TINY / "drafter")
PROMPT = ["--prompt", "Find the value of x in the equation: 24*x + 130 = 1066", "--threads", "1"]


class BytesTokenizer:
    """Ids are bytes."""

    def decode(self, ids, **kwargs):
        return bytes(ids).decode("utf-8", errors="replace")


def stream(rounds, *, terminal: bool) -> str:
    file = io.StringIO()
    colours = "standard" if terminal else None
    console = Console(file=file, force_terminal=terminal, soft_wrap=True, color_system=colours)
    streamer = DraftStreamer(BytesTokenizer(), console)
    streamer.put(torch.tensor([[1, 2]]))
    for new, drafts, num_accepted in rounds:
        streamer.put_round(list(new), list(drafts), num_accepted)
    streamer.end()
    return file.getvalue()


def test_generate_streams_text_and_ends_with_a_line_of_statistics(capsys):
    assert main(["generate", TARGET, DRAFTER, *PROMPT]) == 0
    captured = capsys.readouterr()
    assert "#### " in captured.out
    assert "acceptance length (tau)" in captured.err
    assert "tokens/s" in captured.err


def test_text_is_the_same_with_and_without_the_drafter(capsys):
    main(["generate", TARGET, DRAFTER, *PROMPT])
    drafted = capsys.readouterr().out
    main(["generate", TARGET, *PROMPT])
    assert capsys.readouterr().out == drafted


def test_sampling_with_a_seed_repeats_itself(capsys):
    options = ["--temperature", "0.8", "--top-p", "0.9", "--seed", "3", "--max-new-tokens", "30"]
    outputs = []
    for _ in range(2):
        assert main(["generate", TARGET, DRAFTER, *PROMPT, *options]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_a_chat_file_is_continued(tmp_path, capsys):
    chat = [
        {"role": "user", "content": "I need a cheap hotel."},
        {"role": "assistant", "content": "Which area?"},
        {"role": "user", "content": "The north, please."},
    ]
    for content in (chat, {"messages": chat}):
        (tmp_path / "chat.json").write_text(json.dumps(content))
        assert main(["generate", TARGET, DRAFTER, "--chat-file", str(tmp_path / "chat.json"), "--threads", "1"]) == 0
        assert capsys.readouterr().out.strip()


def test_show_drafts_colours_accepted_own_and_rejected():
    text = stream([(b"ab!", b"abcd", 2), (b"?", b"", 0)], terminal=True)
    assert "\x1b[32ma\x1b[0m\x1b[32mb" in text  # green: accepted
    assert "\x1b[1m!" in text  # bold: the target's own
    assert "\x1b[9;31mcd" in text  # struck through, red: rejected
    assert text.index("cd") < text.index("?")


def test_without_a_terminal_only_the_text_is_printed():
    assert stream([(b"ab!", b"abcd", 2), (b"?", b"x", 0)], terminal=False) == "ab!?\n"


def test_a_character_split_over_tokens_is_printed_once_whole():
    """https://github.com/vllm-project/vllm/pull/45678"""
    euro = "€".encode()
    assert (
        stream([(b"a" + euro[:1], b"", 0), (euro[1:2], b"", 0), (euro[2:] + b"b", b"", 0)], terminal=False) == "a€b\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate", TARGET, DRAFTER, "--prompt", "  "], "the prompt is empty"),
        (["generate", TARGET, "--prompt", "x", "--show-drafts"], "--show-drafts needs a drafter"),
        (["generate", TARGET, "--prompt", "x", "--max-new-tokens", "0"], "at least 1, got 0"),
        (["generate", TARGET, "--prompt", "x", "--max-new-tokens", "5000"], "2048 positions"),
        (["generate", TARGET, "--prompt-file", "no/such/file"], "no/such/file"),
        (["generate", "no/such/model", "--prompt", "x"], "no/such/model"),
        (["generate", DRAFTER, "--prompt", "x"], "is a hyperdflash model"),
        (["generate", TARGET, "--prompt", "x", "--effort", "huge"], "huge"),
        (["generate", TARGET, "--prompt", "x", "--temperature", "-1"], "got -1.0"),
        (["generate", TARGET, DRAFTER, "--prompt", "x", "--num-assistant-tokens", "-2"], "num_assistant_tokens=-2"),
        (["generate", "./no-such-folder", "--prompt", "x"], "no folder ./no-such-folder"),
        (["demo", "--repeats", "0"], "at least 1, got 0"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(argv, message, capsys):
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_broken_chat_file_is_named(tmp_path, capsys):
    file = tmp_path / "chat.json"
    for content in ("{", "[1, 2]", '[{"role": "user"}]', '{"text": "x"}', '"x"'):
        file.write_text(content)
        assert main(["generate", TARGET, "--chat-file", str(file), "--raw"]) == 1
        err = capsys.readouterr().err
        assert str(file) in err or "content" in err


def test_another_architecture_is_refused_by_name(tmp_path, capsys):
    Qwen3Config(num_hidden_layers=1).save_pretrained(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 1
    assert "qwen3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["generate", TARGET, "--promt", "x"], ["generate", TARGET, "--max-new", "3"], ["nothing"], []]
)
def test_misspelled_and_abbreviated_options_are_usage_errors(argv, capsys):
    """https://github.com/huggingface/transformers/issues/9224"""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    capsys.readouterr()


class FixedTarget:
    """Thinks the same of every position; its top-2 gap is a rounding tie."""

    device = torch.device("cpu")

    def __init__(self, logits=(2.0, 0.5, 2.0, 1.5, 0.0)):
        self.logits = torch.tensor(logits)

    def __call__(self, ids, **kwargs):
        assert ids.device == self.device
        return SimpleNamespace(logits=self.logits.expand(1, ids.shape[1], 5))


def test_first_difference_reports_the_gap_of_the_two_tokens_not_the_targets_top_2():
    plain = torch.tensor([[1, 2, 0, 4]])
    assert first_difference(FixedTarget(), plain, plain) is None
    for token, gap in ((2, 0.0), (3, 0.5), (1, 1.5), (4, 2.0)):
        assert first_difference(FixedTarget(), plain, torch.tensor([[1, 2, token, 4]])) == (2, gap)
        assert first_difference(FixedTarget(), torch.tensor([[1, 2, token, 4]]), plain) == (2, gap)


def test_no_tie_explains_a_run_that_only_ends_earlier_or_logits_that_are_no_numbers():
    plain, other = torch.tensor([[1, 2, 0, 4]]), torch.tensor([[1, 2, 2, 4]])
    assert first_difference(FixedTarget(), plain, plain[:, :3]) == (3, math.inf)
    assert first_difference(FixedTarget((float("nan"),) * 5), plain, other) == (2, math.inf)


def test_first_difference_moves_ids_to_the_targets_device():
    target = FixedTarget()
    target.device = torch.device("meta")
    assert first_difference(target, torch.tensor([[1, 2, 0]]), torch.tensor([[1, 2, 3]])) == (2, 0.5)
