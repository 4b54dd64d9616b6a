"""`hyperdflash train` from a recipe to a Hub folder: what it writes, what it refuses, and what a kill leaves behind.

.venv/bin/python -m pytest tests/test_train.py -m "not slow"
"""

import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_v4 import tiny_target
from transformers import AutoModel, DeepseekV4ForCausalLM

from hyperdflash.generation import cli
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.pairing_hyperdflash import target_fingerprint
from hyperdflash.training.card import list_checkpoints, read_state
from hyperdflash.training.target import TargetHead
from hyperdflash.training.trainer import HyperDFlashTrainer

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "examples" / "tiny" / "target"
RECIPES = sorted((ROOT / "training" / "recipes").glob("*.yaml"))
VOCAB_SIZE, EOS, PAD, MASK = 4096, 1, 2, 3
DRAFTER = {
    "block_size": 4,
    "mask_token_id": MASK,
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "sliding_window": 64,
}
STEP_LINE = (
    r"step {step}/{steps}  loss \d+\.\d{{4}}  ce \d+\.\d{{4}}  kl \d+\.\d{{4}}  expected \d\.\d{{3}}  "
    r"[\d,]+ tok/s  left \d+:\d\d:\d\d"
)


def save_target(folder: Path, **options) -> Path:
    """A random target with the tiny world's tokenizer."""
    tiny_target(vocab_size=VOCAB_SIZE, eos_token_id=EOS, pad_token_id=PAD, **options).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return folder


def write_rows(path: Path, numbers) -> Path:
    """A question and an answer for each number."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} + {i}?"},
                {"role": "assistant", "content": f"It is {2 * i}, as anybody can see" + " at once" * (i % 5)},
            ]
        }
        for i in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class World:
    """A target, data, and a recipe for them; `trained` is a run of it."""

    def __init__(self, folder: Path):
        self.folder, self.target = folder, save_target(folder / "target")
        self.data = write_rows(folder / "train.jsonl", range(14))
        self.eval_data = write_rows(folder / "eval.jsonl", range(50, 56))
        self.recipe = {
            "target": str(self.target),
            "train_data": [str(self.data)],
            "output_dir": str(folder / "run"),
            "drafter": DRAFTER,
            "max_length": 64,
            "num_anchors": 4,
            "learning_rate": 3e-3,
            "per_device_train_batch_size": 4,
            "num_train_epochs": 2,
            "save_steps": 3,
            "use_cpu": True,
        }

    def write_recipe(self, path: Path, without=(), **changes) -> Path:
        values = {name: value for name, value in (self.recipe | changes).items() if name not in without}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(values))
        return path


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def trained(world) -> Path:
    """The folder of a run of 8 steps, with evaluation and TensorBoard; tests do not change it."""
    output = world.folder / "trained"
    recipe = world.write_recipe(world.folder / "trained.yaml", eval_data=[str(world.eval_data)])
    options = ["eval_strategy=steps", "eval_steps=4", "report_to=tensorboard", "seed=7"]
    status = cli.main(["train", str(recipe), f"output_dir={output}", *options])
    assert status == 0
    return output


@pytest.fixture
def hd(world, tmp_path, capsys):
    """Runs the recipe, changed: `hd("key=value", "--dry-run", key=value)` -> status, stdout, stderr. Its folder is
    `tmp_path / "run"`."""

    def run(*arguments, without=(), **changes):
        changes = {"output_dir": str(tmp_path / "run")} | changes
        recipe = world.write_recipe(tmp_path / "recipe" / "recipe.yaml", without, **changes)
        capsys.readouterr()
        status = cli.main(["train", str(recipe), *arguments])
        captured = capsys.readouterr()
        return SimpleNamespace(status=status, out=captured.out, err=captured.err)

    return run


def assert_refused(result, status: int, *patterns: str) -> None:
    assert result.status == status, result.err
    assert result.err.startswith("hyperdflash train: ")
    assert result.err.count("\n") == 1 or "huggingface.co" in result.err  # one line, unless it is the library's
    for pattern in patterns:
        assert re.search(pattern, result.err), result.err


def history(run: Path) -> list[dict]:
    return read_state(list_checkpoints(run)[-1])["log_history"]


def logged(run: Path, name="loss") -> list[float]:
    return [entry[name] for entry in history(run) if name in entry]


def last_weights(run: Path, file="model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(list_checkpoints(run)[-1] / file)


def assert_equal_weights(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------ from end to end


def test_a_run_leaves_checkpoints_its_recipe_and_a_drafter_to_publish(world, trained):
    assert {p.name for p in list_checkpoints(trained)} == {"checkpoint-3", "checkpoint-6", "checkpoint-8"}
    facts = json.loads((trained / "run.json").read_text())
    assert facts["target"] == "target"
    assert facts["num_samples"] == 14
    assert facts["data_report"] == ["14 of 14 rows kept, 0 left out"]
    assert [entry["file"] for entry in facts["train_data"]] == [str(world.data)]
    assert [entry["file"] for entry in facts["eval_data"]] == [str(world.eval_data)]
    assert facts["num_trainable_parameters"] == facts["num_parameters"]
    assert facts["finished"] is True
    assert (trained / "command.txt").read_text() == (
        f"hyperdflash train {world.folder / 'trained.yaml'} output_dir={trained} eval_strategy=steps eval_steps=4 "
        "report_to=tensorboard seed=7\n"
    )
    resolved = yaml.safe_load((trained / "recipe.yaml").read_text())
    assert resolved["seed"] == 7  # of the command
    assert resolved["learning_rate"] == 3e-3  # of the file
    assert resolved["gamma"] == 4.0  # a default that shapes the result

    drafter = AutoModel.from_pretrained(trained / "final", trust_remote_code=True, dtype=torch.float32)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(parameter.detach(), last_weights(trained)[name], atol=1e-2, rtol=1e-2)
    config = drafter.config
    assert (config.mask_token_id, config.block_size, config.target_name_or_path) == (MASK, 4, "target")
    assert config.encoding == {"generation": "preview", "modes": ["non-thinking"]}
    head = TargetHead.from_target(DeepseekV4ForCausalLM.from_pretrained(world.target))
    assert config.target_fingerprint == target_fingerprint(head.identity())


def test_the_resolved_recipe_repeats_the_run(world, trained, tmp_path):
    assert cli.main(["train", str(trained / "recipe.yaml"), f"output_dir={tmp_path / 'again'}"]) == 0
    assert logged(tmp_path / "again") == logged(trained)
    assert_equal_weights(last_weights(tmp_path / "again"), last_weights(trained))


def test_every_step_says_loss_acceptance_speed_and_time_left(hd, world):
    result = hd("eval_strategy=steps", "eval_steps=4", f"eval_data={world.eval_data}")
    assert result.status == 0
    lines = result.out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == 8
    for number, line in enumerate(steps, 1):
        assert re.fullmatch(STEP_LINE.format(step=number, steps=8), line), line
    assert steps[-1].endswith("left 0:00:00")
    evaluations = [line for line in lines if line.startswith("evaluation at step ")]
    assert len(evaluations) == 2
    assert re.fullmatch(
        r"evaluation at step 4  loss \d+\.\d{4}  expected \d\.\d{3}  slots (\d\.\d\d ?){3}", evaluations[0]
    )
    assert result.err == ""


def test_tensorboard_gets_our_figures(trained):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = trained.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    names = {"train/ce", "train/kl", "train/expected_acceptance_length", "train/tokens_per_second"}
    names |= {"eval/loss", "eval/expected_acceptance_length", "eval/slot_accuracy_3", "eval/acceptance_rate_1"}
    assert names <= set(events.Tags()["scalars"])
    assert [event.value for event in events.Scalars("train/ce")] == pytest.approx(logged(trained, "ce"))


def test_the_profile_is_shares_of_the_whole_run(hd):
    result = hd("num_train_epochs=1", "--profile")
    lines = [line for line in result.out.splitlines() if line.startswith("profile")]
    shares = {m[2]: float(m[1]) for line in lines if (m := re.fullmatch(r"profile +([\d.]+)%  (.*)", line))}
    assert len(shares) == 5
    assert all(share >= 0 for share in shares.values())
    assert sum(shares.values()) == pytest.approx(100, abs=0.3)
    assert {"target", "loss", "data"} <= shares.keys()
    assert shares["target"] > 0
    assert shares["loss"] > 0


@pytest.mark.parametrize("lora", [False, True])
def test_a_dry_run_prints_the_plan_takes_one_step_and_writes_nothing(hd, trained, tmp_path, lora):
    options = {"init_from": str(trained / "final"), "lora": {"r": 2}, "without": ("drafter",)} if lora else {}
    result = hd("report_to=tensorboard", "--dry-run", gradient_accumulation_steps=2, **options)
    assert result.status == 0, result.err
    out = re.sub(" +", " ", result.out)
    assert "steps 4 of 8 samples, 2 an epoch" in out
    assert "tokens 445 an epoch, 890 in all" in out
    assert len(re.findall(r"^step 1/1 ", out, re.MULTILINE)) == 1
    assert "memory" in out
    assert "disk" in out
    assert re.search(r"^time [\d.]+ hours", out, re.MULTILINE)
    trainable, frozen = (
        int(n.replace(",", "")) for n in re.search(r"drafter ([\d,]+) .*, ([\d,]+) frozen", out).groups()
    )
    drafter = HyperDFlashModel.from_pretrained(trained / "final")
    assert frozen == (drafter.num_parameters() if lora else 0)
    assert trainable < drafter.num_parameters() if lora else trainable == drafter.num_parameters()
    assert {path.name for path in tmp_path.iterdir()} == {"recipe"}


# ------------------------------------------------------------------------------------------- how a run may come to an end


@pytest.mark.parametrize(
    "options",
    [
        {"save_steps": 500},
        {"save_strategy": "no"},
        {"save_strategy": "epoch", "max_steps": 5},
        {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "save_total_limit": 1},
        {"save_strategy": "best", "metric_for_best_model": "eval_loss", "eval_strategy": "epoch"},
    ],
    ids=["interval longer than the run", "no checkpoints", "stops within an epoch", "stops between saves", "best"],
)
def test_every_run_ends_with_a_drafter(hd, world, tmp_path, options):
    """https://github.com/huggingface/transformers/issues/20058"""
    result = hd(f"eval_data={world.eval_data}", *(f"{name}={value}" for name, value in options.items()))
    assert result.status == 0, result.err
    assert result.out.splitlines()[-1] == f"{tmp_path / 'run' / 'final'}: ready for `hf upload`"
    drafter = HyperDFlashModel.from_pretrained(tmp_path / "run" / "final", dtype=torch.float32)
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), last_weights(tmp_path / "run")[name], atol=1e-2, rtol=1e-2, msg=name
        )
    steps = options.get("max_steps", 8)
    assert logged(tmp_path / "run", "step")[-1] == steps


def test_fewer_rows_than_a_batch_train(hd, tmp_path):
    """https://github.com/inclusionAI/AReno/pull/90"""
    data = write_rows(tmp_path / "few.jsonl", range(3))
    result = hd(f"train_data={data}", "per_device_train_batch_size=8", "num_train_epochs=4")
    assert result.status == 0, result.err
    assert len(logged(tmp_path / "run")) == 4
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "changes", "status", "patterns"),
    [
        (["learning_rte=1e-4"], {}, 2, ["unknown key 'learning_rte'; did you mean learning_rate?"]),
        ([], {"num_anchor": 3}, 2, ["unknown key 'num_anchor'; did you mean num_anchors?"]),
        (["num_anchors"], {}, 2, ["'num_anchors' is not key=value"]),
        (["num_anchors=many"], {}, 2, ["num_anchors takes int; got 'many'"]),
        (["num_anchors=2.5"], {}, 2, ["num_anchors takes int; got 2.5"]),
        ([], {"bf16": "yes please"}, 2, ["bf16 takes bool; got 'yes please'"]),
        ([], {"drafter": [1]}, 2, [r"drafter takes dict; got \[1\]"]),
        ([], {"without": ["target"]}, 2, ["says no target", "target=..."]),
        ([], {"without": ["train_data"]}, 2, ["says no train_data"]),
        ([], {"without": ["output_dir"]}, 2, ["says no output_dir"]),
        (["train_data="], {}, 2, ["says no train_data"]),
        ([], {"drafter": DRAFTER | {"num_layers": 2}}, 2, ["drafter has no option 'num_layers'; did you mean num_h"]),
        (["eval_strategy=steps"], {}, 2, ["eval_strategy steps needs eval_data"]),
        (["eval_decode_prompts=2"], {}, 2, ["eval_data, which is empty"]),
        (["features=offline"], {}, 2, ["needs features_dir"]),
        (["features=cached"], {}, 2, ["features is one of online, offline; got 'cached'"]),
        (["kl_temperature=0"], {}, 2, ["kl_temperature must be above 0"]),
        (["num_train_epochs=0"], {}, 2, ["num_train_epochs must be above 0"]),
        (["mode=fast"], {}, 2, ["mode is one of", "'fast'"]),
        (["lora={r: 2}"], {}, 2, ["lora adapts a trained drafter: give it in init_from"]),
        (["train_data=nowhere.jsonl"], {}, 1, ["nowhere.jsonl"]),
        (["target=nowhere/at-all"], {}, 1, ["huggingface.co"]),
        (["init_from=nowhere/at-all"], {"without": ["drafter"]}, 1, ["huggingface.co"]),
        (["save_strategy=sometimes"], {}, 1, ["sometimes"]),
        (["fsdp=true"], {}, 1, ["fsdp only works in distributed training"]),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_in_one_line(hd, tmp_path, arguments, changes, status, patterns):
    """https://github.com/huggingface/transformers/issues/9224"""
    assert_refused(hd(*arguments, **changes), status, *patterns)
    assert not (tmp_path / "run").exists()


def test_the_command_wins_over_the_file(hd, tmp_path):
    """The last one does, as documented.

    https://github.com/huggingface/transformers/issues/9224
    """
    result = hd("max_steps=1", "seed=5", "seed=6", max_steps=2, save_strategy="no")
    assert result.status == 0, result.err
    assert len(logged(tmp_path / "run")) == 1
    assert yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())["seed"] == 6


@pytest.mark.parametrize("text", ["", "- a list", "learning_rate: [1", "only words"])
def test_a_file_that_is_no_recipe_is_refused(tmp_path, capsys, text):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    assert cli.main(["train", str(recipe)]) == 2
    assert str(recipe) in capsys.readouterr().err
    assert cli.main(["train", str(tmp_path / "missing.yaml")]) == 1
    assert capsys.readouterr().err == f"hyperdflash train: no recipe {tmp_path / 'missing.yaml'}\n"


@pytest.mark.parametrize("resume", [[], ["resume_from_checkpoint={trained}/checkpoint-3"]], ids=["new", "another's"])
def test_a_folder_in_use_is_left_alone(hd, trained, tmp_path, resume):
    """https://github.com/huggingface/transformers/issues/20058"""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    result = hd(*(argument.format(trained=trained) for argument in resume))
    assert_refused(result, 1, f"{tmp_path / 'run'} is not empty", "resume_from_checkpoint=true", "choose another")
    assert tree(tmp_path / "run") == {"thesis.txt": b"mine"}


@pytest.mark.parametrize(
    ("mask", "patterns"),
    [
        ({}, ["mask_token_id"]),
        ({"mask_token_id": EOS}, ["mask_token_id 1 is .*eos"]),
        ({"mask_token_id": PAD}, ["mask_token_id 2 is .*pad"]),
        ({"mask_token_id": VOCAB_SIZE}, ["4096"]),
        ({"mask_token_id": -1}, ["-1"]),
    ],
    ids=["none", "eos", "pad", "behind the last", "negative"],
)
def test_the_mask_token_must_be_chosen_and_must_exist(hd, tmp_path, mask, patterns):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2461 https://github.com/NVIDIA/Model-Optimizer/pull/1621"""
    options = {name: value for name, value in DRAFTER.items() if name != "mask_token_id"}
    assert_refused(hd(drafter=options | mask), 1, *patterns)
    assert not (tmp_path / "run").exists()


def test_a_block_of_one_has_nothing_to_train(hd, tmp_path):
    assert_refused(hd(drafter=DRAFTER | {"block_size": 1}), 1, "block_size", "1")
    assert not (tmp_path / "run").exists()


def test_data_without_any_usable_row_makes_no_model(hd, tmp_path):
    """Counts for each reason, and no success.

    https://github.com/inclusionAI/AReno/pull/90
    """
    rows = [{"messages": [{"role": "user", "content": "word " * 100}, {"role": "assistant", "content": "yes, it is"}]}]
    rows += [{"messages": [{"role": "user", "content": "And?"}]}] * 2
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = hd(f"train_data={tmp_path / 'data.jsonl'}")
    assert_refused(result, 1, "no row is left", "1 left out: cut off by max_length", "2 left out: no supervised token")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_without_the_control_tokens_is_refused(hd, world, tmp_path):
    target = Path(shutil.copytree(world.target, tmp_path / "target"))
    for file in target.glob("tokenizer*.json"):
        file.write_text(file.read_text().replace("<｜User｜>", "<｜Somebody｜>"))
    assert_refused(hd(f"target={target}"), 1, "<｜User｜>")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("lora", "status", "pattern"),
    [
        ({"rank": 2}, 2, "lora: .*'rank'.*LoraConfig"),
        ({"r": 2, "target_modules": ["qkv"]}, 1, "No modules were targeted.*target_modules"),
    ],
)
def test_an_adapter_that_cannot_be_made_is_refused(hd, trained, tmp_path, lora, status, pattern):
    result = hd(lora=lora, init_from=str(trained / "final"), without=["drafter"])
    assert_refused(result, status, pattern)
    assert not (tmp_path / "run").exists()


def test_a_report_that_is_not_installed_is_refused_before_any_work(hd, tmp_path):
    result = hd("report_to=trackio")
    assert_refused(result, 1, "pip install trackio")
    assert result.out == ""
    assert not (tmp_path / "run").exists()


def test_init_from_and_another_runs_checkpoint_exclude_each_other(hd, trained, tmp_path):
    options = {"init_from": str(trained / "final"), "without": ["drafter"]}
    result = hd(f"resume_from_checkpoint={trained / 'checkpoint-3'}", **options)
    assert_refused(result, 2, "init_from", "starts a new one from weights")
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------------------ resuming


@pytest.fixture
def stopped(trained, tmp_path) -> Path:
    """The run as it was after step 3, then the next checkpoint half-written: no state, or a cut one."""
    run = tmp_path / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("checkpoint-8", "final"))
    return run


SAME = {"eval_strategy": "steps", "eval_steps": 4, "seed": 7}


@pytest.mark.parametrize("remains", ["no state", "cut state", "nothing at all"])
def test_a_checkpoint_that_was_cut_short_is_passed_over(hd, world, trained, stopped, remains):
    state = stopped / "checkpoint-6" / "trainer_state.json"
    if remains == "cut state":
        state.write_text(state.read_text()[:200])
    else:
        state.unlink()
        for file in (stopped / "checkpoint-6").iterdir() if remains == "nothing at all" else []:
            file.unlink()
    (stopped / "checkpoint-6" / "junk").write_text("of the killed run")
    result = hd("resume_from_checkpoint=true", eval_data=[str(world.eval_data)], **SAME)
    assert result.status == 0, result.err
    assert re.search(r"^step 4/8", result.out, re.MULTILINE)
    assert not re.search(r"^step 3/8", result.out, re.MULTILINE)
    assert not (stopped / "checkpoint-6" / "junk").exists()
    assert logged(stopped) == logged(trained)
    assert logged(stopped, "eval_loss") == logged(trained, "eval_loss")
    assert_equal_weights(last_weights(stopped), last_weights(trained))


def test_going_on_with_nothing_starts_from_the_beginning(hd, tmp_path, caplog):
    result = hd("resume_from_checkpoint=true", "max_steps=1")
    assert result.status == 0, result.err
    assert len(logged(tmp_path / "run")) == 1


def test_going_on_with_a_finished_run_makes_its_drafter_again(hd, world, trained, tmp_path):
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.rmtree(run / "final")
    result = hd("resume_from_checkpoint=true", eval_data=[str(world.eval_data)], **SAME)
    assert result.status == 0, result.err
    assert not re.search(r"^step ", result.out, re.MULTILINE)
    assert (run / "final" / "model.safetensors").read_bytes() == (trained / "final/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("what", "changes", "pattern"),
    [
        ("seed", {"seed": 8}, "trained with seed 7, now it is 8"),
        ("drafter", {"drafter": DRAFTER | {"num_hidden_layers": 2}}, "trained with drafter"),
        ("data", {}, "trained with data_sha256"),
        ("target", {}, "trained with target"),
        ("init_from", {"without": ["drafter"]}, "trained with init_from None"),
        ("lora", {"without": ["drafter"], "lora": {"r": 2}}, "trained with"),
        ("seed, by path", {"seed": 8, "by_path": True}, "trained with seed 7, now it is 8"),
    ],
)
def test_a_run_cannot_go_on_as_another(hd, world, trained, stopped, tmp_path, what, changes, pattern):
    """Optimizer states are paired with parameters by position: other parameters would get them without a word.

    https://github.com/lightseekorg/TorchSpec/pull/184
    """
    changes = SAME | {"eval_data": [str(world.eval_data)]} | changes
    if what == "data":
        changes["train_data"] = [str(write_rows(tmp_path / "train.jsonl", range(1, 15)))]
    if what == "target":
        changes["target"] = str(save_target(tmp_path / "target", seed=1))
    if what in ("init_from", "lora"):
        changes["init_from"] = str(trained / "final")
    resume = stopped / "checkpoint-3" if changes.pop("by_path", False) else "true"
    before = tree(stopped)
    assert_refused(hd(f"resume_from_checkpoint={resume}", **changes), 1, pattern, "init_from takes over the weights")
    assert tree(stopped) == before


def fork(function) -> int:
    """Run `function` in a child; returns its pid. Its status is the function's value, 99 after an exception."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            status = function()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_full_disk_is_said_in_one_line_and_earlier_checkpoints_are_good(world, trained, tmp_path, file):
    """The disk is a limit on the size of files here, reached at step 6."""
    run = tmp_path / "run"
    changes = SAME | {"eval_data": [str(world.eval_data)], "output_dir": str(run)}
    recipe = world.write_recipe(tmp_path / "recipe.yaml", **changes)
    limit = (trained / "checkpoint-6" / file).stat().st_size - 100
    save = HyperDFlashTrainer._save_checkpoint

    def save_on_full_disk(self, *args):
        if self.state.global_step == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        save(self, *args)

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        HyperDFlashTrainer._save_checkpoint = save_on_full_disk
        with (tmp_path / "stderr.txt").open("w") as errors, contextlib.redirect_stderr(errors):
            return cli.main(["train", str(recipe)])

    status = os.waitstatus_to_exitcode(os.waitpid(fork(limited), 0)[1])
    errors = (tmp_path / "stderr.txt").read_text()
    assert status == 1, errors
    assert re.fullmatch("hyperdflash train: .*checkpoint-6 was not written: .*Earlier checkpoints are kept\n", errors)
    assert not (run / "final").exists()
    assert list_checkpoints(run) == [run / "checkpoint-3"]
    assert cli.main(["train", str(recipe), "resume_from_checkpoint=true"]) == 0
    assert_equal_weights(last_weights(run), last_weights(trained))


MANY_STEPS = {
    "num_train_epochs": 8,
    "save_steps": 2,
    "save_total_limit": 2,
    "num_anchors": 2,
    "dataloader_num_workers": 0,
}


@pytest.mark.slow
def test_a_run_killed_at_ten_random_moments_ends_as_an_uninterrupted_one(world, tmp_path):
    """The same losses and the very same weights; whatever a kill leaves behind is put right by the next start."""

    def run_in_child(name, *arguments) -> int:
        recipe = world.write_recipe(tmp_path / f"{name}.yaml", output_dir=str(tmp_path / name), **MANY_STEPS)

        def child():
            with (tmp_path / f"{name}.log").open("w") as log, contextlib.redirect_stdout(log):
                return cli.main(["train", str(recipe), *arguments])

        return fork(child)

    assert os.waitpid(run_in_child("whole"), 0)[1] == 0
    generator = random.Random(0)
    kills, steps = 0, []
    while kills < 10:
        pid = run_in_child("killed", "resume_from_checkpoint=true")
        steps.append(wait_for_steps(tmp_path / "killed.log", generator.randint(0, 3), pid))
        time.sleep(generator.random() * 0.15)
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        assert os.WIFSIGNALED(status), (steps, status)  # it was still running
        kills += 1
    assert max(steps) < 32
    assert os.waitpid(run_in_child("killed", "resume_from_checkpoint=true"), 0)[1] == 0
    assert logged(tmp_path / "killed") == logged(tmp_path / "whole")
    assert len(logged(tmp_path / "whole")) == 32
    assert_equal_weights(last_weights(tmp_path / "killed"), last_weights(tmp_path / "whole"))
    assert {p.name for p in list_checkpoints(tmp_path / "killed")} == {"checkpoint-30", "checkpoint-32"}
    published = [tmp_path / name / "final" / "model.safetensors" for name in ("killed", "whole")]
    assert published[0].read_bytes() == published[1].read_bytes()


def wait_for_steps(log: Path, number: int, pid: int) -> int:
    """Until the log has so many lines of steps; returns the last step. 0 waits for the process to start writing."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = re.findall(r"^step (\d+)/", log.read_text(), re.MULTILINE) if log.exists() else []
        if len(found) >= number:
            return int(found[-1]) if found else 0
        time.sleep(0.005)
    raise TimeoutError(log.read_text())
