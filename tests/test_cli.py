"""The command line: what a person types, sees, and is told."""

import argparse
import io
import json
import math
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_v4 import tiny_dspark, tiny_target
from transformers import Qwen3Config

from hyperdflash import parsers
from hyperdflash.__main__ import main
from hyperdflash.common import options
from hyperdflash.common.checkpoint import load_target
from hyperdflash.generation import generate
from hyperdflash.generation.comparison import first_difference
from hyperdflash.generation.demo import TINY
from hyperdflash.generation.dspark import SETTINGS
from hyperdflash.generation.streaming import DraftStreamer
from hyperdflash.parsers import make_parser

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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mode", "thinking"], "was trained on non-thinking texts, but the prompts are in thinking mode"),
        (["--generation", "0731"], "was trained for generation preview"),
        (["--raw"], None),
        ([], None),
    ],
    ids=str,
)
def test_a_mode_or_generation_that_the_drafter_was_not_trained_on_is_one_warning(options, words, capsys):
    short = ["--prompt", "2 + 2?", "--max-new-tokens", "2", "--threads", "1"]
    assert main(["generate", TARGET, DRAFTER, *short, *options]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == (words is not None)
    assert all(line.startswith("hyperdflash generate: warning: the drafter ") and words in line for line in warnings)


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


@pytest.fixture
def never_loaded(monkeypatch):
    monkeypatch.setattr(generate, "load_target_model", lambda *args: pytest.fail("the target was loaded"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt", "x", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--prompt", "x", "--max-new-tokens", "5000"], "2048 positions"),
        (["--prompt", "x", "--mode", "thinking", "--effort", "huge"], "unknown effort 'huge'"),
        (["--prompt", "x", "--effort", "high"], "--effort high is for thinking mode: add --mode thinking"),
        (["--prompt", "x", "--temperature", "-1"], "--temperature must be 0 (greedy) or above, got -1"),
        (["--prompt", "x", "--temperature", "nan"], "--temperature must be 0 (greedy) or above, got nan"),
        (["--prompt", "x", "--temperature", "inf"], "--temperature must be 0 (greedy) or above, got inf"),
        (["--prompt", "x", "--temperature", "1", "--top-p", "1.5"], "--top-p must be above 0 and at most 1, got 1.5"),
        (["--prompt", "x", "--temperature", "1", "--top-k", "-1"], "--top-k must be at least 0, got -1"),
        (["--prompt", "x", "--top-p", "0.9"], "--top-p is for sampling: add --temperature 1"),
        (["--prompt", "x", "--top-k", "5"], "--top-k is for sampling: add --temperature 1"),
        (["--prompt", "x", "--num-assistant-tokens", "-2"], "--num-assistant-tokens must be at least 1, got -2"),
        (["--prompt", "x", "--threads", "-2"], "--threads must be at least 1, got -2"),
        (["--prompt", "x", "--threads", "0"], "--threads must be at least 1, got 0"),
        (["--prompt", "x", "--threads", "false"], "--threads: invalid int value: 'false'"),
        (["--prompt", "x", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["--prompt", "x", "--device-map", "gpu"], "device_map 'gpu' is not a device"),
        (["--prompt", "x", "--device-map", "meta"], "device_map 'meta': torch finds"),
        (["--prompt", "x", "--target-revision", "main"], "revision='main' belongs to a Hub id"),
        (["--prompt", "x", "--drafter-revision", "main"], "revision='main' belongs to a Hub id"),
        (["--prompt", "x", "--raw", "--mode", "thinking"], "chat encoding, which --raw leaves out"),
        (["--prompt", "x", "--trace", "x.json"], "ends in .html, not x.json"),
        (["--prompt", "x", "surplus"], "unrecognized arguments: surplus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_that_names_it_before_anything_is_loaded(argv, message, never_loaded, capsys):
    assert main(["generate", TARGET, DRAFTER, *argv]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("command", ["generate", "check"])
def test_a_revision_of_the_drafter_in_the_targets_checkpoint_is_the_targets(command, never_loaded, capsys):
    prompt = ["--prompt", "x"] if command == "generate" else []
    assert main([command, TARGET, "mtp", *prompt, "--drafter-revision", "v1"]) == 2
    assert "mtp is in the target's checkpoint: give --target-revision" in capsys.readouterr().err


def test_the_targets_own_module_drafts_where_it_is_named(capsys):
    """As many drafts as are asked for, also more than the usual three."""
    options = ["--max-new-tokens", "12", "--threads", "1", "--num-assistant-tokens", "5"]
    assert main(["generate", TARGET, "mtp", *PROMPT, *options]) == 0
    drafted = capsys.readouterr()
    assert "tau" in drafted.err
    assert main(["generate", TARGET, *PROMPT, *options[:4]]) == 0
    assert capsys.readouterr().out == drafted.out


def test_a_dspark_module_in_the_targets_checkpoint_drafts_at_most_its_block(tmp_path, monkeypatch, capsys):
    target = tiny_target(vocab_size=4096)
    target.save_pretrained(tmp_path)
    dspark = tiny_dspark(target)
    tensors = {**load_file(tmp_path / "model.safetensors"), **dspark.official_state_dict()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    settings = {name: getattr(dspark.config, name) for name in SETTINGS}
    (tmp_path / "config.json").write_text(json.dumps({**config, **settings}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(TARGET) / name, tmp_path)
    argv = ["generate", str(tmp_path), "dspark", "--prompt", "x", "--max-new-tokens", "6", "--threads", "1"]
    assert main(argv) == 0
    assert "tau" in capsys.readouterr().err
    monkeypatch.setattr(generate, "load_target_model", lambda *args: pytest.fail("the target was loaded"))
    assert main([*argv, "--num-assistant-tokens", "7"]) == 1
    assert "at most 5 tokens per round (dspark_block_size 5)" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--show-drafts"], ["--num-assistant-tokens", "3"], ["--drafter-revision", "v1"]])
def test_an_option_about_the_drafter_is_refused_without_one(option, capsys):
    assert main(["generate", TARGET, "--prompt", "x", *option]) == 2
    assert f"{option[0]} needs a drafter" in capsys.readouterr().err


def test_a_cuda_device_is_refused_by_name_where_there_is_none(monkeypatch, never_loaded, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert main(["generate", TARGET, "--prompt", "x", "--device-map", "cuda:0"]) == 2
    assert "device_map 'cuda:0': torch finds no accelerator" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([TARGET, "--prompt-file", "no/such/file"], "no/such/file"),
        (["no/such/model", "--prompt", "x"], "no folder no/such/model"),
        (["./no-such-folder", "--prompt", "x"], "no folder ./no-such-folder"),
        ([TARGET, "examples/tiny/drafte", "--prompt", "x"], "no folder examples/tiny/drafte"),
        ([TARGET, "~/no-such-folder", "--prompt", "x"], "no folder ~/no-such-folder"),
        ([DRAFTER, "--prompt", "x"], "has model_type 'hyperdflash'"),
        ([TARGET, TARGET, "--prompt", "x"], "is not a HyperDFlash drafter: its model_type is deepseek_v4"),
        ([TARGET, "dspark", "--prompt", "x"], "carries a native MTP module under mtp.*, not the DSpark module"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_a_checkpoint_or_file_that_is_wrong_is_one_line_before_the_target_is_loaded(
    argv, message, never_loaded, capsys
):
    assert main(["generate", *argv]) == 1
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_drafter_for_a_target_of_other_shapes_is_refused_before_the_target_is_loaded(tmp_path, never_loaded, capsys):
    config = json.loads((TINY / "drafter" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 4000}))
    assert main(["generate", TARGET, str(tmp_path), "--prompt", "x"]) == 1
    assert "vocabulary 4000" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--prompt-file", "--chat-file"])
def test_a_file_that_is_not_utf_8_is_named(option, tmp_path, capsys):
    file = tmp_path / "latin.txt"
    file.write_bytes('[{"role": "user", "content": "café"}]'.encode("latin-1"))
    assert main(["generate", TARGET, option, str(file)]) == 1
    assert f"{file} is not UTF-8 text: invalid continuation byte at byte 33" in capsys.readouterr().err


def test_float16_is_refused_in_python_too():
    with pytest.raises(ValueError, match="DeepSeek-V4 does not run in float16"):
        load_target(TARGET, None, "float16")


# ------------------------------------------------------------------------------------------------- before any import


@pytest.mark.parametrize(
    ("argv", "status"),
    [(["--help"], 0), (["--version"], 0), (["train", "--help"], 0), (["genrate"], 2), (["check", "a", "--promts"], 2)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_misspelt_words_are_answered_without_importing_torch(argv, status):
    script = (
        "import atexit, sys; from hyperdflash.__main__ import main\n"
        "atexit.register(lambda: print(sorted({'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules))))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    run = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True)
    assert run.returncode == status
    assert run.stdout.splitlines()[-1] == "[]"
    assert "Traceback" not in run.stderr


def test_ctrl_c_while_a_command_is_imported_is_no_traceback(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("hyperdflash.__main__.import_module", interrupted)
    assert main(["plot", "a", "--output", "b"]) == 130


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hyperdflash {version('hyperdflash')}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["genrate"], "hyperdflash: there is no command 'genrate': did you mean generate?"),
        (["data", "prevew"], "hyperdflash data: there is no command 'prevew': did you mean preview?"),
        (["generate", TARGET, "--promt", "x"], "there is no option --promt: did you mean --prompt?"),
        (["generate", TARGET, "--max-new", "3"], "there is no option --max-new: did you mean --max-new-tokens?"),
        (["generate", TARGET, "--max_new_tokens=3"], "no option --max_new_tokens: did you mean --max-new-tokens?"),
        (["train", "r.yaml", "--learning-rate", "1e-4"], "keys of the recipe are written learning_rate=1e-4 "),
        (["features", "r.yaml", "--max_steps=5", "--verify"], "keys of the recipe are written max_steps=5 "),
        (["train", "r.yaml", "--bf16", "--dry-run"], "keys of the recipe are written bf16=... "),
        (["train", "r.yaml", "--dryrun"], "there is no option --dryrun: did you mean --dry-run?"),
        (["check", TARGET, DRAFTER, "--zzz"], "there is no option --zzz (see hyperdflash check --help)"),
        (["--verson"], "there is no option --verson: did you mean --version?"),
        ([], "required: COMMAND"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_a_misspelt_word_is_a_usage_error_that_names_the_nearest(argv, message, capsys):
    """https://github.com/huggingface/transformers/issues/9224: an abbreviation is a misspelt word too."""
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [["preview", "no.jsonl", "--tokenizer", TARGET], ["regenerate", "no.jsonl", "--target", TARGET, "--output", "x"]],
    ids=lambda argv: argv[0],
)
def test_an_error_of_a_data_command_begins_with_both_words(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *argv]) != 0
    assert capsys.readouterr().err.startswith(f"hyperdflash data {argv[0]}: ")


def test_a_value_may_look_like_an_option(never_loaded, capsys):
    for value in (["--prompt", "--no space before this"], ["--prompt=--help"]):
        assert main(["generate", "no/such/model", *value]) == 1  # it got as far as the model


def all_parsers(parser, name="hyperdflash"):
    yield name, parser
    for command, sub in parser.commands.items():
        yield from all_parsers(sub, f"{name} {command}")


def test_every_option_has_a_help_text_and_says_its_default():
    for name, parser in all_parsers(make_parser()):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                continue
            assert action.help, (name, action.dest)
            text = parser.formatter_class("")._expand_help(action)
            if action.option_strings and action.default not in (None, False, [], argparse.SUPPRESS):
                default = action.default
                shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
                assert text.endswith(f"(default: {shown})"), (name, text)


def test_a_folder_of_the_name_of_an_own_drafter_is_not_passed_over(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mtp").mkdir()
    assert main(["generate", "target", "mtp", "--prompt", "Hi"]) == 2
    assert "for the folder write ./mtp" in capsys.readouterr().err


def test_what_the_options_repeat_is_what_the_modules_say():
    from hyperdflash.benchmark.prompt_sets import PUBLIC_SETS
    from hyperdflash.check.check import BUILT_IN_PROMPTS
    from hyperdflash.configuration_hyperdflash import CONTEXT_SOURCES, DRAFT_HEADS, REDUCERS, HyperDFlashConfig
    from hyperdflash.generation.native import DSPARK, MTP
    from hyperdflash.training.data import EncodingSettings
    from hyperdflash.training.export import FORMATS

    assert tuple(PUBLIC_SETS) == parsers.PUBLIC_SETS
    assert len(BUILT_IN_PROMPTS) == parsers.NUM_BUILT_IN_PROMPTS
    assert (CONTEXT_SOURCES, REDUCERS) == (options.CONTEXT_SOURCES, options.REDUCERS)
    assert set(options.OWN_DRAFTERS) == {MTP, DSPARK}
    assert (DRAFT_HEADS, FORMATS) == (options.DRAFT_HEADS, parsers.EXPORT_FORMATS)
    preview = dict(all_parsers(make_parser()))["hyperdflash data preview"]
    assert preview.get_default("max_length") == EncodingSettings.max_length
    for name in ("sliding_window", "markov_rank", "verify_cost", "draft_head", "context_source"):
        default = getattr(HyperDFlashConfig, name)
        assert options.DRAFTER_OPTIONS[name]["help"].endswith(f"(default: {default})")


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
