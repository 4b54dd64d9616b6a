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
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from child import fork
from fresh import COMMAND_LINE, run_ranks
from huggingface_hub import constants
from huggingface_hub.errors import LocalTokenNotFoundError
from safetensors.torch import load_file
from tiny_v4 import nightly, tiny_target
from transformers import AutoModel, DeepseekV4ForCausalLM

from hyperdflash import __main__ as cli
from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.pairing_hyperdflash import target_fingerprint
from hyperdflash.parsers import parse
from hyperdflash.training import init, run_folder, train
from hyperdflash.training.arguments import RecipeError, load_recipe
from hyperdflash.training.init import init_drafter
from hyperdflash.training.run_folder import list_checkpoints, read_state
from hyperdflash.training.target import TargetHead
from hyperdflash.training.trainer import HyperDFlashTrainer

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "examples" / "tiny" / "target"
TINY = str(ROOT / "examples" / "tiny" / "drafter")
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
    "draft_head": "markov",
    "markov_rank": 8,
    "markov_gate": True,
    "draft_confidence": True,
}
STEP_LINE = (
    r"step {step}/{steps}  loss \d+\.\d{{4}}  ce \d+\.\d{{4}}  kl \d+\.\d{{4}}  expected \d\.\d{{3}}  "
    r"lr \d\.\de[-+]\d\d  [\d,]+ tok/s  left \d+:\d\d:\d\d"
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


# ----------------------------------------------------------------------------------------------------- from end to end


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
        "hyperdflash train trained.yaml output_dir=trained eval_strategy=steps eval_steps=4 "
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
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()  # a folder in use is no matter: nothing is written
    options |= {"eval_on_start": True, "eval_data": [str(trained.parent / "eval.jsonl")]}
    result = hd("report_to=tensorboard", "--dry-run", "gradient_accumulation_steps=2", **options)
    assert "evaluation" not in result.out
    assert result.status == 0, result.err
    out = re.sub(" +", " ", result.out)
    assert "steps 4 of 8 samples, 2 per epoch" in out
    assert "tokens 445 per epoch, 890 in total" in out
    assert len(re.findall(r"^step 1/1 ", out, re.MULTILINE)) == 1
    assert "memory" in out
    assert "disk" in out
    assert re.search(r"^time \d+:\d\d:\d\d estimated", out, re.MULTILINE)
    counts = re.search(r"drafter ([\d,]+) .*, ([\d,]+) frozen", out).groups()
    trainable, frozen = (int(count.replace(",", "")) for count in counts)
    drafter = HyperDFlashModel.from_pretrained(trained / "final")
    assert frozen == (drafter.num_parameters() if lora else 0)
    assert trainable < drafter.num_parameters() if lora else trainable == drafter.num_parameters()
    assert {path.name for path in tmp_path.iterdir()} == {"recipe", "run"}
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


# ------------------------------------------------------------------------------------------------- how a run may end


@pytest.mark.slow
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
        ([], {"without": ["target"]}, 2, ["has no target", "target=..."]),
        ([], {"without": ["train_data"]}, 2, ["has no train_data"]),
        ([], {"without": ["output_dir"]}, 2, ["has no output_dir"]),
        (["train_data="], {}, 2, ["has no train_data"]),
        ([], {"drafter": DRAFTER | {"num_layers": 2}}, 2, ["drafter has no option 'num_layers'; did you mean num_h"]),
        (["eval_strategy=steps"], {}, 2, ["eval_strategy steps needs eval_data"]),
        (["eval_decode_prompts=2"], {}, 2, ["eval_data, which is empty"]),
        (["features=offline"], {}, 2, ["needs features_dir"]),
        (["features=cached"], {}, 2, ["features is one of online, offline, server; got 'cached'"]),
        (["kl_temperature=0"], {}, 2, ["kl_temperature must be above 0"]),
        (["num_train_epochs=0"], {}, 2, ["num_train_epochs must be above 0"]),
        (["mode=fast"], {}, 2, ["unknown mode 'fast'", "non-thinking, thinking"]),
        (["lora={r: 2}"], {}, 2, ["lora adapts a trained drafter: give it in init_from"]),
        (["lora={r: many}"], {}, 2, ["lora.r takes int; got 'many'"]),
        ([], {"drafter": DRAFTER | {"block_size": "seven"}}, 2, ["drafter.block_size takes int; got 'seven'"]),
        (["drafter={block_size: 4, block_size: 5}"], {}, 2, ["'block_size' appears twice"]),
        (["drafter={block_size: 4"], {}, 2, ["drafter={block_size: 4 is not readable YAML"]),
        (["neftune_noise_alpha=5"], {}, 2, ["neftune_noise_alpha is not supported"]),
        (["label_smoothing_factor=0.1"], {}, 2, ["label_smoothing_factor is not supported"]),
        (["eval_do_concat_batches=false"], {}, 2, ["eval_do_concat_batches is not supported"]),
        (["include_for_metrics=[inputs]"], {}, 2, ["include_for_metrics is not supported"]),
        (["batch_eval_metrics=true"], {}, 2, ["batch_eval_metrics is not supported"]),
        (["remove_unused_columns=true"], {}, 2, ["remove_unused_columns is not supported"]),
        (["parallelism_config=foo"], {}, 2, ["parallelism_config is not supported"]),
        (["use_liger_kernel=true"], {}, 2, ["use_liger_kernel is not supported"]),
        (["metric_for_best_model=tau"], {}, 2, ["metric_for_best_model 'tau' is not a figure", "acceptance_rate_3"]),
        (["metric_for_best_model=acceptance_length"], {}, 2, ["'acceptance_length' is not a figure"]),
        (["target_dtype=float16"], {}, 2, ["target_dtype: DeepSeek-V4 does not run in float16"]),
        (['lr_scheduler_kwargs={"floor": 1}'], {}, 2, ["lr_scheduler_kwargs do not fit cosine: .*'floor'"]),
        (["optim=lomo"], {}, 1, ["lomo"]),
        (["torch_compile_mode=fast"], {}, 2, ["torch_compile_mode is one of .*; got 'fast'"]),
        (["train_sampling_strategy=sequential"], {}, 2, ["train_sampling_strategy is one of random, group_by_length"]),
        (["log_level=loud"], {}, 2, ["log_level is one of", "'loud'"]),
        (['accelerator_config={"speed": 1}'], {}, 2, ["accelerator_config: .*'speed'"]),
        (["gradient_accumulation_steps=0"], {}, 2, ["gradient_accumulation_steps must be at least 1; got 0"]),
        (["per_device_eval_batch_size=0"], {}, 2, ["per_device_eval_batch_size must be at least 1"]),
        (["learning_rate=-1"], {}, 2, ["learning_rate must not be negative"]),
        (["learning_rate=.nan"], {}, 2, ["learning_rate must be a finite number"]),
        (["adam_beta1=1"], {}, 2, ["adam_beta1 must be at least 0 and below 1"]),
        (["attention=flash"], {}, 2, ["attention is one of eager, sdpa, flex_attention; got 'flash'"]),
        (["max_samples=0"], {}, 2, ["max_samples must be at least 1; got 0"]),
        (["dataset_num_proc=0"], {}, 2, ["dataset_num_proc must be at least 1; got 0"]),
        (["train_weights=[1, 2]"], {}, 2, [r"train_weights has a number above 0 for each of 1 entries; got \[1, 2\]"]),
        (["train_weights=[0]"], {}, 2, ["train_weights has a number above 0"]),
        (["train_weights=[much]"], {}, 2, ["train_weights has a number above 0"]),
        (["train_data=nowhere.jsonl"], {}, 1, ["nowhere.jsonl"]),
        (
            ["target=nowhere/at-all"],
            {},
            1,
            ["nowhere/at-all is not a folder here", "could not be downloaded"],
        ),
        (["init_from=nowhere/at-all"], {"without": ["drafter"]}, 1, ["nowhere/at-all is not a folder here"]),
        (["save_strategy=sometimes"], {}, 1, ["sometimes"]),
        (["fsdp=true"], {}, 1, ["fsdp only works in distributed training"]),
    ],
)
def test_a_recipe_that_cannot_run_is_refused_in_one_line(hd, tmp_path, arguments, changes, status, patterns):
    """https://github.com/huggingface/transformers/issues/9224"""
    result = hd(*arguments, **changes)
    assert_refused(result, status, *patterns)
    assert "rows kept" not in result.out or "nowhere.jsonl" in result.err or "fsdp" in result.err  # before any work
    assert not (tmp_path / "run").exists()


def test_a_key_that_is_there_twice_is_refused_with_its_line(world, tmp_path, capsys):
    """YAML's loaders take the last one silently."""
    recipe = world.write_recipe(tmp_path / "recipe.yaml")
    recipe.write_text(recipe.read_text() + "num_anchors: 5\n")
    assert cli.main(["train", str(recipe)]) == 2
    assert re.search(r"recipe\.yaml.*'num_anchors' appears twice.*line \d+", capsys.readouterr().err)


def test_numbers_written_as_text_are_numbers_in_mappings_too(world, trained):
    recipe = world.write_recipe(world.folder / "text.yaml", without=("drafter",), init_from=str(trained / "final"))
    args = load_recipe(recipe, ["lora={r: '4', lora_dropout: '1e-1'}"])
    assert args.lora == {"r": 4, "lora_dropout": 0.1}
    args = load_recipe(world.write_recipe(recipe), ["drafter={block_size: '4', mask_token_id: 3}"])
    assert args.drafter == {"block_size": 4, "mask_token_id": 3}


@pytest.mark.parametrize(
    ("metric", "greater"),
    [("eval_kl", False), ("ce", False), ("loss", False), ("eval_expected_acceptance_length", True)],
)
def test_the_best_of_a_divergence_is_the_smallest(world, metric, greater):
    """transformers takes every figure but a loss for one of which more is better."""
    recipe = world.write_recipe(world.folder / "metric.yaml")
    assert load_recipe(recipe, [f"metric_for_best_model={metric}"]).greater_is_better is greater


def test_a_mask_token_that_is_an_ordinary_word_is_said(hd, monkeypatch):
    warnings = []
    monkeypatch.setattr(init.logger, "warning", warnings.append)
    assert hd("max_steps=1", "--dry-run").status == 0
    assert warnings == []
    assert hd("max_steps=1", "--dry-run", drafter=DRAFTER | {"mask_token_id": 300}).status == 0
    assert [line for line in warnings if line.startswith("mask_token_id 300 is ")]


def test_a_mistake_in_the_drafter_shows_before_data_is_read(hd, world):
    """Encoding a large data set takes hours."""
    result = hd(drafter=DRAFTER | {"num_attention_heads": 3, "num_key_value_heads": 2}, train_data=["nowhere.jsonl"])
    assert_refused(result, 1, "num_attention_heads")
    result = hd("lora={target_modules: [qkv]}", train_data=["nowhere.jsonl"], without=["drafter"], init_from=TINY)
    assert_refused(result, 1, "No modules were targeted")


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
    err = capsys.readouterr().err
    assert err.startswith(f"hyperdflash train: no recipe {tmp_path / 'missing.yaml'}; ")
    assert err.endswith("training/recipes has stage1.yaml, stage2.yaml, tiny_headline.yaml\n")


@pytest.mark.parametrize(
    "resume",
    [[], ["resume_from_checkpoint={trained}/checkpoint-3"], ["resume_from_checkpoint=true"]],
    ids=["new", "another's", "no run's"],
)
def test_a_folder_in_use_is_left_alone(hd, trained, tmp_path, resume):
    """https://github.com/huggingface/transformers/issues/20058"""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    result = hd(*(argument.format(trained=trained) for argument in resume))
    assert_refused(result, 1, f"{tmp_path / 'run'} is not empty: choose another")
    assert tree(tmp_path / "run") == {"thesis.txt": b"mine"}


def test_a_runs_folder_is_gone_on_with_only_when_asked_to(hd, stopped):
    before = tree(stopped)
    assert_refused(hd(), 1, f"{stopped} is not empty: resume with resume_from_checkpoint=true, choose another")
    assert tree(stopped) == before


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
        ({"rank": 2}, 2, "lora has no option 'rank'"),
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
    """The run as it was after step 6, of 8."""
    run = tmp_path / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("checkpoint-8", "final"))
    return run


SAME = {"eval_strategy": "steps", "eval_steps": 4, "seed": 7}


@pytest.mark.slow
@pytest.mark.parametrize("remains", ["no state", "nothing at all"])
def test_a_checkpoint_that_was_cut_short_is_passed_over(hd, world, trained, stopped, remains):
    (stopped / "checkpoint-6" / "trainer_state.json").unlink()
    if remains == "nothing at all":
        shutil.rmtree(stopped / "checkpoint-6")
        (stopped / "checkpoint-6").mkdir()
    (stopped / "checkpoint-6" / "junk").write_text("of the killed run")
    result = hd("resume_from_checkpoint=true", eval_data=[str(world.eval_data)], **SAME)
    assert result.status == 0, result.err
    assert re.search(r"^step 4/8", result.out, re.MULTILINE)
    assert not re.search(r"^step 3/8", result.out, re.MULTILINE)
    assert not (stopped / "checkpoint-6" / "junk").exists()
    assert logged(stopped) == logged(trained)
    assert logged(stopped, "eval_loss") == logged(trained, "eval_loss")
    assert_equal_weights(last_weights(stopped), last_weights(trained))


def test_weights_of_a_checkpoint_are_as_readable_as_its_folder(hd, tmp_path):
    before = os.umask(0o027)
    try:
        assert hd("max_steps=1").status == 0
    finally:
        os.umask(before)
    assert (tmp_path / "run" / "checkpoint-1" / "model.safetensors").stat().st_mode & 0o777 == 0o640


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


@pytest.mark.slow
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
        ("loss", {"gamma": 1.0}, "trained with gamma 4.0, now it is 1.0"),
        ("clipping", {"max_grad_norm": 2.0}, "trained with max_grad_norm 1.0, now it is 2.0"),
        ("beta", {"adam_beta2": 0.95}, "trained with adam_beta2 0.999, now it is 0.95"),
        ("epsilon", {"adam_epsilon": 1e-6}, "trained with adam_epsilon 1e-08, now it is 1e-06"),
        ("optimizer", {"optim": "sgd"}, "trained with optim 'adamw_torch"),
        ("rate", {"learning_rate": 1e-2}, "trained with learning_rate 0.003, now it is 0.01"),
        ("anchors", {"num_anchors": 2}, "trained with num_anchors 4, now it is 2"),
        ("batch", {"per_device_train_batch_size": 2}, "trained with samples per step 4, now it is 2"),
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
    assert_refused(hd(f"resume_from_checkpoint={resume}", **changes), 1, pattern, "init_from starts a new run")
    assert tree(stopped) == before


def test_a_batch_may_be_cut_differently_and_a_longer_run_is_warned_of(hd, world, stopped, caplog, monkeypatch):
    warnings = []
    monkeypatch.setattr(run_folder.logger, "warning", warnings.append)
    options = SAME | {"eval_data": [str(world.eval_data)], "per_device_train_batch_size": 2}
    result = hd(
        "resume_from_checkpoint=true", "gradient_accumulation_steps=2", "num_train_epochs=3", "save_steps=6", **options
    )
    assert result.status == 0, result.err
    assert [w for w in warnings if "resumes with" in w] == [
        f"{stopped} resumes with num_train_epochs 3.0 instead of 2.0: the learning rate follows"
    ]
    assert f"resuming from {stopped / 'checkpoint-6'}" in result.out
    assert len(logged(stopped)) == 12
    commands = (stopped / "command.txt").read_text().splitlines()
    assert len(commands) == 2  # the first one, then this
    assert not [line for line in commands if str(stopped.parent) in line]


def test_a_checkpoint_without_its_optimizer_is_no_place_to_go_on(hd, tmp_path):
    assert hd("max_steps=2", "save_only_model=true", "save_steps=1").status == 0
    before = tree(tmp_path / "run")
    result = hd("max_steps=2", "resume_from_checkpoint=true")
    assert_refused(result, 1, "without optimizer and schedule", "weights with init_from=.*checkpoint-2")
    assert tree(tmp_path / "run") == before


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])


def make_pointer(file: Path) -> None:
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("optimizer.pt", Path.unlink, r"checkpoint-6 has no optimizer\.pt"),
        ("scheduler.pt", Path.unlink, r"checkpoint-6 has no scheduler\.pt"),
        ("rng_state.pth", Path.unlink, r"checkpoint-6 has no rng_state\.pth"),
        ("model.safetensors", Path.unlink, "checkpoint-6 has no weights"),
        ("optimizer.pt", cut, r"optimizer\.pt is damaged or cut short"),
        ("scheduler.pt", make_pointer, r"scheduler\.pt is a Git LFS pointer"),
        ("rng_state.pth", lambda file: file.write_bytes(b""), r"rng_state\.pth is empty"),
        ("model.safetensors", cut, r"model\.safetensors is damaged or cut short"),
        ("model.safetensors", make_pointer, r"model\.safetensors is a Git LFS pointer"),
        ("config.json", cut, r"config\.json is damaged or cut short"),
        ("trainer_state.json", make_pointer, r"trainer_state\.json is a Git LFS pointer"),
        ("trainer_state.json", cut, r"trainer_state\.json is damaged or cut short"),
        ("trainer_state.json", lambda file: file.write_text("{}"), r"trainer_state\.json is not a state"),
    ],
)
def test_a_file_of_a_checkpoint_that_is_missing_or_damaged_is_named(hd, world, stopped, file, damage, problem):
    """The library resumes without an optimizer silently: the learning rates are another schedule's then."""
    damage(stopped / "checkpoint-6" / file)
    before = tree(stopped)
    result = hd("resume_from_checkpoint=true", eval_data=[str(world.eval_data)], **SAME)
    assert_refused(result, 1, problem, "remove .*checkpoint-6 to resume from the (one|checkpoint) before it")
    assert tree(stopped) == before


def test_the_random_state_of_every_process_is_looked_for(stopped, monkeypatch):
    checkpoint, warnings = stopped / "checkpoint-6", []
    monkeypatch.setattr(run_folder.logger, "warning", warnings.append)
    state = (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_2.pth")
    shutil.copy(state, checkpoint / "rng_state_0.pth")
    with pytest.raises(ValueError, match=r"checkpoint-6 has no rng_state_1\.pth: remove"):
        run_folder.check_checkpoint(checkpoint, 3)
    shutil.copy(state, checkpoint / "rng_state_1.pth")
    assert run_folder.check_checkpoint(checkpoint, 3) == checkpoint
    assert not warnings
    # More processes than the run had is no damage: a step does not depend on how it is split
    assert run_folder.check_checkpoint(checkpoint, 4) == checkpoint
    assert re.search("random states of 3 processes, not of 4", warnings[0])


def test_a_checkpoint_without_weights_and_two_other_files_is_not_one_of_weights_alone(hd, world, stopped):
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt"):
        (stopped / "checkpoint-6" / name).unlink()
    result = hd("resume_from_checkpoint=true", eval_data=[str(world.eval_data)], **SAME)
    assert_refused(result, 1, r"checkpoint-6 has no weights, optimizer\.pt, scheduler\.pt")


def test_a_run_of_an_earlier_version_that_recorded_fewer_settings_is_resumed(hd, world, stopped):
    facts = json.loads((stopped / "run.json").read_text())
    for name in ("optim", "adam_beta1", "max_grad_norm"):
        del facts["fixed"][name]
    (stopped / "run.json").write_text(json.dumps(facts))
    result = hd("resume_from_checkpoint=true", eval_data=[str(world.eval_data)], **SAME)
    assert result.status == 0, result.err


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["save_strategy=no"]])
def test_a_finished_run_of_max_steps_is_not_trained_on(hd, tmp_path, more):
    """A cluster's requeued job runs the same command again."""
    options = ["max_steps=3", "save_steps=1", "save_total_limit=1", "resume_from_checkpoint=true", *more]
    assert hd(*options).status == 0
    before = tree(tmp_path / "run")
    result = hd(*options)
    assert result.status == 0, result.err
    assert not re.search(r"^step ", result.out, re.MULTILINE)
    assert "checkpoint-3 is at step 3 of 3: nothing is left to train" in result.out
    after = tree(tmp_path / "run")
    assert after == before


def test_several_gpus_in_one_process_are_refused(world, monkeypatch):
    """torch's DataParallel would hand every replica the masks of the whole batch."""
    args = load_recipe(world.write_recipe(world.folder / "gpus.yaml"))
    args._n_gpu = 2
    with pytest.raises(ValueError, match="one process for 2 GPUs: start one per GPU with `accelerate launch"):
        train.make_trainer(args, None)


@pytest.mark.slow
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


class KilledRuns:
    """A run that nothing stops, and one of the same recipe, of four steps an epoch, that a test kills and starts."""

    def __init__(self, world, folder: Path, num_epochs: int):
        self.folder, self.num_steps = folder, 4 * num_epochs
        options = {"num_train_epochs": num_epochs, "save_steps": 2, "save_total_limit": 2, "num_anchors": 2}
        for name in ("whole", "killed"):
            world.write_recipe(folder / f"{name}.yaml", output_dir=str(folder / name), **options)
        assert os.waitpid(self.start("whole"), 0)[1] == 0

    def start(self, name="killed", before=lambda: None) -> int:
        """In a child, where `before` is called first; returns its pid."""

        def child():
            before()
            with (self.folder / f"{name}.log").open("w") as log, contextlib.redirect_stdout(log):
                return cli.main(["train", str(self.folder / f"{name}.yaml"), "resume_from_checkpoint=true"])

        return fork(child)

    def end(self) -> None:
        """Nothing kills the last start: the same losses and the very same weights as if nothing ever had."""
        assert os.waitpid(self.start(), 0)[1] == 0
        killed, whole = self.folder / "killed", self.folder / "whole"
        assert logged(killed) == logged(whole)
        assert len(logged(whole)) == self.num_steps
        assert_equal_weights(last_weights(killed), last_weights(whole))
        last = {f"checkpoint-{self.num_steps - 2}", f"checkpoint-{self.num_steps}"}
        assert {p.name for p in list_checkpoints(killed)} == last
        published = [folder / "final" / "model.safetensors" for folder in (killed, whole)]
        assert published[0].read_bytes() == published[1].read_bytes()


def kill_at(owner, name: str, path: str) -> None:
    """From now on this process is killed where it calls `owner.name` for a path that ends with `path`."""
    own = getattr(owner, name)

    def call(*args, **kwargs):
        if any(str(arg).endswith(path) for arg in args):
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **kwargs)

    setattr(owner, name, call)


@pytest.mark.slow
def test_a_run_killed_in_three_writes_ends_as_an_uninterrupted_one(world, tmp_path):
    """In its first checkpoint, between weights and optimizer; in a middle one; and before the drafter to publish has
    its name. Whatever a kill leaves behind is put right by the next start."""
    runs = KilledRuns(world, tmp_path, num_epochs=3)
    for owner, name, path in (
        (torch, "save", "checkpoint-2/optimizer.pt"),
        (torch, "save", "checkpoint-6/rng_state.pth"),
        (Path, "rename", ".final.partial"),
    ):
        pid = runs.start(before=lambda where=(owner, name, path): kill_at(*where))
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), path
    assert not (tmp_path / "killed" / "final").exists()
    runs.end()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_killed_at_ten_random_moments_ends_as_an_uninterrupted_one(world, tmp_path):
    runs, generator, steps = KilledRuns(world, tmp_path, num_epochs=10), random.Random(0), []
    for _ in range(10):
        (tmp_path / "killed.log").unlink(missing_ok=True)
        pid, number = runs.start(), generator.randint(0, 3)
        steps.append(wait_for_steps(tmp_path / "killed.log", number))
        time.sleep(generator.random() * (0.05 if number else 0.5))  # a start takes longer than a step
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), steps  # it was still running
    runs.end()


def wait_for_steps(log: Path, number: int) -> int:
    """Until the log has so many lines of steps; returns the last step, or 0."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = re.findall(r"^step (\d+)/", log.read_text(), re.MULTILINE) if log.exists() else []
        if len(found) >= number:
            return int(found[-1]) if found else 0
        time.sleep(0.005)
    raise TimeoutError(f"{number} steps in {log}")


# ------------------------------------------------------------------------------------------------------ two processes


# accelerate shards on accelerators alone, and leaves it out elsewhere; torch itself does it on CPUs as well.
SHARDED_ON_CPUS = """
import sys
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from hyperdflash import __main__ as cli

make_state, plugins = AcceleratorState.__init__, []

def make_sharded_state(self, *args, fsdp_plugin=None, **kwargs):
    make_state(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    plugins.extend([fsdp_plugin] if fsdp_plugin else [])
    self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugins[0]

AcceleratorState.__init__ = make_sharded_state
raise SystemExit(cli.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "stops"), [("fsdp", True), nightly("ddp", False), nightly("ddp", True)])
def test_two_processes_run_the_recipe_as_one_does(world, trained, tmp_path, kind, stops):
    """What is printed is printed once, and a stopped run goes on to the very same weights."""
    program = tmp_path / "program.py"
    program.write_text(SHARDED_ON_CPUS if kind == "fsdp" else COMMAND_LINE)
    options = ["per_device_train_batch_size=2", "ddp_backend=gloo", "seed=7", f"fsdp={str(kind == 'fsdp').lower()}"]
    recipe = world.write_recipe(tmp_path / "recipe.yaml", output_dir=str(tmp_path / "run"))
    first = launch(str(program), "train", str(recipe), *options)
    assert len(re.findall(r"^step \d/8 ", first, re.MULTILINE)) == 8
    assert first.count("rows kept") == first.count("ready for `hf upload`") == 1
    assert logged(tmp_path / "run") == pytest.approx(logged(trained), abs=1e-5)
    last, of_one = last_weights(tmp_path / "run"), last_weights(trained)
    assert last.keys() == of_one.keys()
    for name, tensor in last.items():
        torch.testing.assert_close(tensor, of_one[name], atol=1e-6, rtol=1e-4, msg=name)
    assert (tmp_path / "run" / "checkpoint-8" / "pytorch_model_fsdp.bin").exists() is (kind == "fsdp")
    if stops:
        for folder in ("checkpoint-6", "checkpoint-8", "final"):
            shutil.rmtree(tmp_path / "run" / folder)
        options.append("resume_from_checkpoint=true")
        again = run_ranks(program.read_text(), tmp_path / "home", "train", recipe, *options)
        assert re.findall(r"^step (\d)/8 ", again, re.MULTILINE) == ["4", "5", "6", "7", "8"]
        assert_equal_weights(last_weights(tmp_path / "run"), last)
    drafter = AutoModel.from_pretrained(tmp_path / "run" / "final", trust_remote_code=True)
    assert drafter.config.block_size == 4


def launch(*program: str) -> str:
    """Run a Python program in two processes, as users do; returns what they print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *program]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


# ------------------------------------------------------------------------------------------------------------ stage 2


def test_stage_two_starts_from_weights_with_a_new_optimizer(hd, trained, tmp_path):
    """https://github.com/lightseekorg/TorchSpec/pull/184"""
    result = hd("max_steps=1", "learning_rate=0", without=["drafter"], init_from=str(trained / "final"))
    assert result.status == 0, result.err
    first = load_file(trained / "final" / "model.safetensors")
    assert_equal_weights(last_weights(tmp_path / "run"), {name: tensor.float() for name, tensor in first.items()})
    shutil.rmtree(tmp_path / "run")
    result = hd("max_steps=2", without=["drafter"], init_from=str(trained / "final"))
    assert result.status == 0, result.err
    optimizer = torch.load(tmp_path / "run" / "checkpoint-2" / "optimizer.pt")
    assert {float(state["step"]) for state in optimizer["state"].values()} == {2.0}
    assert logged(tmp_path / "run", "learning_rate")[-1] == pytest.approx(3e-3, rel=0.01)  # of a cosine of its own
    assert "with a new optimizer and schedule" in result.out


def test_stage_two_starts_from_a_runs_fp32_weights(hd, trained, tmp_path):
    """Of its last checkpoint: `final/` has them rounded to bf16."""
    result = hd("max_steps=1", "learning_rate=0", without=["drafter"], init_from=str(trained))
    assert result.status == 0, result.err
    assert_equal_weights(last_weights(tmp_path / "run"), last_weights(trained))


@pytest.mark.parametrize("given", [".", "final"])
def test_a_card_says_what_the_weights_were_trained_on_before(hd, world, trained, tmp_path, given):
    assert hd("max_steps=1", without=["drafter"], init_from=str(trained / given)).status == 0
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    name = (trained / given).name
    assert f"training started from the weights of `{name}` (14 samples of `train.jsonl`)" in card


def test_a_run_trains_on_a_part_of_its_data(hd, world, tmp_path):
    """The card's facts and the plan are of that part; another part is another run."""
    result = hd("max_samples=5", "max_steps=1", eval_data=[str(world.eval_data)])
    assert result.status == 0, result.err
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["num_samples"] == 5
    assert "5 of the rows kept are used" in result.out
    result = hd("max_samples=6", "max_steps=2", "resume_from_checkpoint=true")
    assert_refused(result, 1, "was trained with data_sha256")


def cache_of_the_hub(tmp_path, monkeypatch, name: str, folder: Path) -> str:
    """Puts a folder into a cache of the Hub, at the branch `stable`; `main` has a commit whose files are not there.
    Returns the commit."""
    repo, commit = tmp_path / "hub" / f"models--{name.replace('/', '--')}", "c" * 40
    shutil.copytree(folder, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    for branch, at in (("stable", commit), ("main", "d" * 40)):
        (repo / "refs" / branch).write_text(at)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return commit


@pytest.mark.parametrize("more", [["target=org/v4@stable"], ["target=org/v4", "target_revision=stable"]])
def test_the_targets_commit_is_what_is_loaded_and_recorded(hd, stored, tmp_path, monkeypatch, world, more):
    """A branch moves. Features are known by the target's content, whatever it is called."""
    commit = cache_of_the_hub(tmp_path, monkeypatch, "org/v4", world.target)
    result = hd("max_steps=1", *more)
    assert result.status == 0, result.err
    config = HyperDFlashConfig.from_pretrained(tmp_path / "run" / "final")
    assert (config.target_name_or_path, config.target_revision) == ("org/v4", commit)
    assert f"revision `{commit}`" in (tmp_path / "run" / "final" / "README.md").read_text()
    shutil.rmtree(tmp_path / "run")
    assert hd("max_steps=1", "features=offline", f"features_dir={stored}", *more).status == 0


@pytest.mark.parametrize("given", ["org/drafter@stable", "~/final"])
def test_init_from_is_read_like_any_other_checkpoint(hd, trained, tmp_path, monkeypatch, given):
    cache_of_the_hub(tmp_path, monkeypatch, "org/drafter", trained / "final")
    monkeypatch.setenv("HOME", str(trained))
    result = hd("max_steps=1", f"init_from={given}", without=["drafter"])
    assert result.status == 0, result.err
    assert f"weights of {given}" in result.out


def test_a_snapshot_of_the_hubs_cache_keeps_its_name_and_commit(hd, world, tmp_path):
    """Its folder is named for the commit, which says nothing to a reader and is no place to load from."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--some-one--tiny-v4" / "snapshots" / commit
    shutil.copytree(world.target, snapshot)
    assert hd("max_steps=1", f"target={snapshot}").status == 0
    made = init_drafter(snapshot, tmp_path / "new", mask_token_id=MASK)
    assert (made / "encoding_deepseek_v4.py").read_bytes() == (ROOT / "encoding_deepseek_v4.py").read_bytes()
    for folder in (tmp_path / "run" / "final", made):
        config = HyperDFlashConfig.from_pretrained(folder)
        assert (config.target_name_or_path, config.target_revision) == ("some-one/tiny-v4", commit)
    card = (tmp_path / "run" / "final" / "README.md").read_text()
    assert "base_model: some-one/tiny-v4" in card
    assert f'from_pretrained(target_name, revision="{commit}")' in card
    assert "- Target: `some-one/tiny-v4`, revision" in card


def test_what_a_run_publishes_has_no_path_of_the_machine(hd, world, trained, tmp_path):
    options = {"init_from": str(trained / "final"), "without": ["drafter"], "eval_data": [str(world.eval_data)]}
    assert hd("max_steps=1", f"target={world.target}", f"train_data=[{world.data}]", **options).status == 0
    run = tmp_path / "run"
    for file in (run / "command.txt", run / "final" / "command.txt", run / "final" / "README.md"):
        text = file.read_text()
        assert not re.search(r"(?<![\w.:/<])/\w+/", text), file
        assert "train.jsonl" in text
    assert (run / "command.txt").read_text() == (
        "hyperdflash train recipe.yaml max_steps=1 target=target 'train_data=[train.jsonl]'\n"
    )


def test_stage_two_says_what_it_was_trained_for_and_on(hd, trained, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(train.logger, "warning", warnings.append)
    target = save_target(tmp_path / "another", seed=1)
    options = {"without": ["drafter"], "init_from": str(trained / "final"), "target": str(target)}
    result = hd("max_steps=1", "mode=thinking", **options)
    assert result.status == 0, result.err
    assert len(warnings) == 1
    assert re.search("was trained for other weights: .* differs .*; embed.weight differs", warnings[0])
    before, config = (HyperDFlashConfig.from_pretrained(run / "final") for run in (trained, tmp_path / "run"))
    assert config.target_name_or_path == "another"
    assert config.encoding == {"generation": "preview", "modes": ["thinking"]}
    head = TargetHead.from_target(DeepseekV4ForCausalLM.from_pretrained(target))
    assert config.target_fingerprint == target_fingerprint(head.identity()) != before.target_fingerprint


@pytest.mark.parametrize(
    ("shape", "pattern"),
    [
        ({"hidden_size": 48}, "hidden size 32, but the target has 48"),
        ({"hc_mult": 4}, "hc_mult 2, but the target has 4"),
        ({"layer_types": ["sliding_attention"] * 2}, "number of layers 3, but the target has 2"),
    ],
    ids=["hidden size", "paths", "layers"],
)
def test_stage_two_for_a_target_of_other_shapes_is_refused(hd, trained, tmp_path, shape, pattern):
    target = save_target(tmp_path / "target", **shape)
    result = hd(f"target={target}", without=["drafter"], init_from=str(trained / "final"))
    assert_refused(result, 1, f"made for a target with {pattern}")
    assert not (tmp_path / "run").exists()


def test_a_target_is_no_drafter_to_start_from(hd, world, tmp_path):
    assert_refused(
        hd(without=["drafter"], init_from=str(world.target)),
        1,
        f"{world.target} is not a HyperDFlash drafter",
        "deepseek_v4",
    )
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------- stored features


@pytest.fixture(scope="module")
def stored(world) -> Path:
    folder = world.folder / "features"
    recipe = world.write_recipe(world.folder / "features.yaml", features_dir=str(folder), features="offline")
    assert cli.main(["features", str(recipe)]) == 0
    return folder


def test_training_from_stored_features_is_training_online_without_the_target(
    hd, trained, stored, tmp_path, monkeypatch
):
    """Stored features are bf16, which keeps 8 bits of each number; losses of about 8.5 agree to 0.01."""

    def refuse(*args, **kwargs):
        raise AssertionError("the target was made")

    monkeypatch.setattr(DeepseekV4ForCausalLM, "__init__", refuse)
    result = hd("features=offline", f"features_dir={stored}", "seed=7")
    assert result.status == 0, result.err
    assert logged(tmp_path / "run") == pytest.approx(logged(trained), abs=0.01)
    assert logged(tmp_path / "run") != logged(trained)
    online, offline = (HyperDFlashConfig.from_pretrained(run / "final") for run in (trained, tmp_path / "run"))
    assert offline.target_fingerprint == online.target_fingerprint


@pytest.mark.parametrize(
    ("changes", "patterns"),
    [
        ({"features_dir": "nowhere"}, ["nowhere", "hyperdflash features"]),
        ({"max_length": 32}, ["lacks the features of", "train data"]),
        ({"eval_data": True}, ["lacks the features of 6 of 6 samples of eval data"]),
    ],
    ids=["missing", "other samples", "no evaluation data"],
)
def test_features_that_do_not_fit_are_refused(hd, world, stored, tmp_path, changes, patterns):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2478"""
    if changes.get("eval_data"):
        changes = {"eval_data": [str(world.eval_data)]}
    result = hd(**({"features": "offline", "features_dir": str(stored)} | changes))
    assert_refused(result, 1, *patterns)
    assert not (tmp_path / "run").exists()


# --------------------------------------------------------------------------------------------------------------- LoRA


def test_an_adapter_becomes_part_of_the_published_drafter(hd, trained, tmp_path):
    """Its weights are the first drafter's plus alpha / r * B @ A, and those of gate and heads are the trained ones."""
    run, lora = tmp_path / "run", {"r": 2, "lora_alpha": 6}
    result = hd("learning_rate=0.03", lora=lora, without=["drafter"], init_from=str(trained / "final"))
    assert result.status == 0, result.err
    base, final = (load_file(run / name / "model.safetensors") for name in ("base", "final"))
    first = load_file(trained / "final" / "model.safetensors")
    assert_equal_weights(base, {name: tensor.float() for name, tensor in first.items()})
    adapter = last_weights(run, "adapter_model.safetensors")
    prefix, adapted = "base_model.model.", 0
    for name, tensor in final.items():
        module, expected = prefix + name.removesuffix(".weight"), base[name]
        if module + ".lora_A.weight" in adapter:
            adapted += 1
            delta = adapter[module + ".lora_B.weight"] @ adapter[module + ".lora_A.weight"]
            assert delta.abs().max() > 0
            expected = expected + 6 / 2 * delta
        if name.startswith(("reducer.", "markov_head.", "confidence_head.")):
            expected = adapter[prefix + name]
            assert not torch.equal(expected, base[name])
        torch.testing.assert_close(tensor.float(), expected, atol=1e-6, rtol=2**-8, msg=name)
    assert adapted == 7
    facts = json.loads((run / "run.json").read_text())
    assert facts["num_trainable_parameters"] < facts["num_parameters"]
    assert HyperDFlashModel.from_pretrained(run / "final").num_parameters() == facts["num_parameters"]


@pytest.mark.slow
def test_two_runs_of_an_adapter_with_one_seed_are_the_same(hd, trained, tmp_path):
    options = {"lora": {"r": 2}, "without": ["drafter"], "init_from": str(trained / "final")}
    weights = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(weights))  # whatever was drawn before
        assert hd("max_steps=1", f"seed={seed}", **options).status == 0
        weights.append(last_weights(tmp_path / "run", "adapter_model.safetensors"))
        shutil.rmtree(tmp_path / "run")
    assert_equal_weights(weights[1], weights[0])
    assert any(not torch.equal(weights[2][name], weights[0][name]) for name in weights[0] if "lora_A" in name)


def test_an_adapters_run_goes_on_where_it_stopped(hd, trained, tmp_path):
    options = {"lora": {"r": 2}, "without": ["drafter"], "init_from": str(trained / "final")}
    assert hd(**options).status == 0
    weights = last_weights(tmp_path / "run", "adapter_model.safetensors")
    for folder in ("checkpoint-6", "checkpoint-8", "final"):
        shutil.rmtree(tmp_path / "run" / folder)
    result = hd("resume_from_checkpoint=true", **options)
    assert result.status == 0, result.err
    assert re.findall(r"^step (\d)/8 ", result.out, re.MULTILINE) == ["4", "5", "6", "7", "8"]
    assert_equal_weights(last_weights(tmp_path / "run", "adapter_model.safetensors"), weights)


# --------------------------------------------------------------------------------------------------------- publishing

TOKEN = "hf_" + "secret" * 5


class StubHub:
    """In place of `HfApi`: keeps what it is asked for."""

    calls: list[tuple] = []
    logged_in = True

    def __init__(self, token=None):
        self.token = token

    def whoami(self):
        if not self.logged_in:
            raise LocalTokenNotFoundError("Token is required, but no token found")
        self.calls.append(("whoami", self.token))

    def create_repo(self, repo_id, private=None, exist_ok=False):
        self.calls.append(("create_repo", repo_id, private, exist_ok))
        return SimpleNamespace(repo_id=f"somebody/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append(("upload_folder", repo_id, folder_path, self.token))


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(StubHub, "calls", [])
    monkeypatch.setattr(train, "HfApi", StubHub)
    return StubHub


@pytest.mark.parametrize("where", ["command", "file"])
def test_publishing_uploads_the_result_and_keeps_the_token_to_itself(hd, hub, tmp_path, where):
    token = {"hub_token": TOKEN} if where == "file" else {}
    arguments = [f"hub_token={TOKEN}"] if where == "command" else []
    options = ["push_to_hub=true", "hub_model_id=drafter", "hub_private_repo=true", "max_steps=1"]
    result = hd(*options, *arguments, **token)
    assert result.status == 0, result.err
    assert hub.calls == [
        ("whoami", TOKEN),
        ("create_repo", "drafter", True, True),
        ("upload_folder", "somebody/drafter", tmp_path / "run" / "final", TOKEN),
    ]
    assert result.out.splitlines()[-1] == "published somebody/drafter"
    files = tree(tmp_path / "run")
    assert "checkpoint-1/training_args.bin" in files
    assert not [name for name, content in files.items() if TOKEN.encode() in content]


def test_publishing_without_a_login_stops_before_any_work(hd, hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "logged_in", False)
    result = hd("push_to_hub=true")
    assert_refused(result, 1, "no token found")
    assert result.out == ""
    assert not (tmp_path / "run").exists()


def test_nothing_is_published_unless_asked_for(hd, hub):
    assert hd("max_steps=1").status == 0
    assert hub.calls == []


# ------------------------------------------------------------------------------------------- recipes, the command line


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_names_existing_options(recipe):
    args = load_recipe(recipe, ["use_cpu=true"])
    assert args.output_dir
    assert args.train_data


SHELL = r"""
hyperdflash() { printf '%s\0' "$@"; printf '\1'; }
accelerate() { while [ "$1" != hyperdflash ]; do shift; done; shift; hyperdflash "$@"; }
vllm() { :; }
"""


def header_commands(recipe: Path, folder: Path) -> list:
    """What the commands in a recipe's header ask the command line for, loops unrolled."""
    lines = [line[4:] for line in recipe.read_text().splitlines() if line.startswith("#   ")]
    script = "set -e\n" + SHELL + "\n".join(lines)
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    return [parse(words.split("\0")[:-1]) for words in done.stdout.split("\1")[:-1]]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_commands_in_a_recipes_header_end_with_its_training(recipe, tmp_path):
    assert header_commands(recipe, tmp_path)[-1].recipe == str(recipe.relative_to(ROOT))


@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_the_papers_recipes_train_on_what_their_headers_make(tmp_path, stage):
    """All of it, from files that exist then, as many rows as the paper has; evaluated on others."""
    folder = ROOT / "training" / "recipes"
    made = [c for name in ("stage1", "stage2") for c in header_commands(folder / f"{name}.yaml", tmp_path)]
    made = {str(command.output): command for command in made if hasattr(command, "output")}
    recipe = load_recipe(folder / f"{stage}.yaml", ["use_cpu=true"])
    used = [name for name in made if any(fnmatch(name, entry) for entry in recipe.train_data)]
    assert all(any(fnmatch(name, entry) for name in made) for entry in (*recipe.train_data, *recipe.eval_data))
    assert sum(made[name].max_samples for name in used) == recipe.max_samples
    assert len({(*made[name].files, made[name].seed) for name in used}) == len(
        used
    )  # no conversations twice by design
    assert {(made[name].mode, made[name].temperature) for name in used} == {
        (mode, temperature) for mode in ("non-thinking", "thinking") for temperature in (0.0, 1.0)
    }
    asked = {file for name in used for file in made[name].files}
    assert not any(asked & set(made[name].files) for name in made if fnmatch(name, recipe.eval_data[0]))


@pytest.mark.parametrize("file", sorted((ROOT / "training" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_takes_every_shipped_configuration(file):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(file))  # which refuses keys that it does not know
    assert config.num_processes == 4 * config.num_machines
    assert config.distributed_type == "MULTI_GPU"


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("True", True), ("yes", True), ("false", False), ("False", False), ("no", False), ("off", False)],
)
def test_a_truth_value_means_what_is_typed(world, text, value):
    """https://github.com/garrytan/gbrain/issues/4602"""
    recipe = world.write_recipe(world.folder / "truth.yaml")
    assert load_recipe(recipe, [f"skip_bad_rows={text}"]).skip_bad_rows is value


@pytest.mark.parametrize("text", ["0", "1", "maybe", "null"])
def test_what_is_no_truth_value_is_refused(world, text):
    """https://github.com/garrytan/gbrain/issues/4602"""
    recipe = world.write_recipe(world.folder / "truth.yaml")
    with pytest.raises(RecipeError, match="skip_bad_rows takes bool"):
        load_recipe(recipe, [f"skip_bad_rows={text}"])


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("learning_rate=8e-4", 8e-4),
        ("gamma=4", 4.0),
        ("num_anchors=1e2", 100),
        ("train_data=a.jsonl", ["a.jsonl"]),
        ("train_data=[a.jsonl, b.jsonl]", ["a.jsonl", "b.jsonl"]),
        ("save_strategy=no", "no"),
        ("target=1234", "1234"),
        ("effort=null", None),
        ("drafter={block_size: 7}", {"block_size": 7}),
    ],
)
def test_values_get_the_type_of_their_field(world, override, value):
    recipe = world.write_recipe(world.folder / "types.yaml")
    got = getattr(load_recipe(recipe, [override]), override.partition("=")[0])
    assert got == value
    assert isinstance(got, type(value))


def test_no_in_a_recipe_is_a_choice_where_choices_are_asked_for(world):
    """YAML takes it for a false."""
    recipe = world.write_recipe(world.folder / "choice.yaml")
    recipe.write_text(recipe.read_text() + "save_strategy: no\neval_strategy: no\n")
    args = load_recipe(recipe)
    assert (args.save_strategy, args.eval_strategy) == ("no", "no")


@pytest.mark.parametrize(
    ("command", "names"), [([], ["data", "features", "train", "export"]), (["data"], ["preview", "regenerate"])]
)
def test_the_commands_are_in_the_help(capsys, command, names):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    found = re.findall(r"^ +(\w+)\b", capsys.readouterr().out, re.MULTILINE)
    assert set(names) <= set(found)
