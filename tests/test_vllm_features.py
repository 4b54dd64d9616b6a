"""Features that vLLM writes: the plan, and what is taken in afterwards. `serving/tests` has the engine.

vLLM is stood in for by a model of transformers behind the plug-in's own `RowCapture`.
"""

import json
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_v4 import TINY_WORLD_TARGET, features_recipe

from hyperdflash import __main__ as cli
from hyperdflash.common.checkpoint import TargetCheckpoint, load_target
from hyperdflash.training.target import OnlineFeatures, TargetHead
from hyperdflash.training.vllm_features import read_head
from hyperdflash_vllm import capture, features


@pytest.fixture(scope="module")
def target():
    return load_target(str(TINY_WORLD_TARGET), None)[0]


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return features_recipe(
        tmp_path,
        "features: offline\nbf16: false\nmax_steps: 2\nper_device_train_batch_size: 1\nmax_length: 16\n"
        "num_anchors: 2\nreport_to: none\n",
    )


class Engine:
    """`LLM` as far as `write_shards` uses it."""

    def __init__(self, target):
        self.online = OnlineFeatures(target, None)
        self.worker = capture.FeatureWorker()
        self.worker.rank, self.worker.get_model = 0, lambda: self
        self.capture = capture.RowCapture(target.config.hc_mult)

    def collective_rpc(self, name, args):
        return [getattr(self.worker, name)(*args)]

    def run(self, row):
        with torch.no_grad():
            kept = []
            model = self.online.target.model
            hook = model.hc_head.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
            model(torch.tensor([row]), use_cache=False)
            hook.remove()
        self.capture.take(torch.tensor(row), torch.arange(len(row)), kept[0][0].flatten(1))


def write(folder: Path, target) -> None:
    """What `python -m hyperdflash_vllm.features` does, without vLLM."""
    engine = Engine(target)
    for plan in features.find_plans(folder):
        for shard in features.read_plan(plan)[1]:
            if (plan.parent / shard["file"]).exists():
                continue
            features.ask_workers(engine, "start_features", shard["input_ids"])
            for row in shard["input_ids"]:
                engine.run(row)
            file = str(plan.parent / shard["file"])
            features.ask_workers(engine, "write_features", file, shard["mark"], shard["input_ids"])


def test_the_head_of_a_checkpoint_is_that_of_the_loaded_target(target):
    head = read_head(TargetCheckpoint(TINY_WORLD_TARGET))
    assert head.sha256 == TargetHead.from_target(target).sha256


def test_planned_written_and_taken_in_they_are_the_features_of_transformers(recipe, target, capsys):
    """One sample a forward in both, and therefore the same bytes in the same shards."""
    folder, plain = recipe.parent / "features", recipe.parent / "plain"
    assert cli.main(["features", str(recipe), "--vllm"]) == 0
    said = capsys.readouterr().out
    assert "1 of 1 still to write" in said
    assert f"python -m hyperdflash_vllm.features {folder} --model {TINY_WORLD_TARGET}" in said
    write(folder, target)
    assert cli.main(["features", str(recipe), "--vllm"]) == 0
    assert "1 shards added" in (said := capsys.readouterr().out)
    assert "is complete" in said
    assert cli.main(["features", str(recipe), "--verify"]) == 0

    assert cli.main(["features", str(recipe), f"features_dir={plain}"]) == 0
    for split in ("train", "eval"):
        ours, theirs = (json.loads((at / split / "manifest.json").read_text()) for at in (folder, plain))
        assert {**ours, "shards": 0} == {**theirs, "shards": 0}
        ours, theirs = (load_file(at / split / "shard-00000.safetensors") for at in (folder, plain))
        torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)  # there, samples share a padded batch


def test_training_reads_them(recipe, target):
    assert cli.main(["features", str(recipe), "--vllm"]) == 0
    write(recipe.parent / "features", target)
    assert cli.main(["train", str(recipe)]) == 1  # not taken in yet
    assert cli.main(["features", str(recipe), "--vllm"]) == 0
    assert cli.main(["train", str(recipe)]) == 0
    assert (recipe.parent / "run" / "final" / "model.safetensors").is_file()


def test_what_is_there_is_not_computed_again(recipe, target):
    folder = recipe.parent / "features"
    assert cli.main(["features", str(recipe), "--vllm"]) == 0
    write(folder, target)
    assert features.write_all(folder, {}) == 0  # and vLLM is not even imported


@pytest.mark.slow
@pytest.mark.parametrize("problem", ["mark", "lengths", "nan", "dtype", "other data", "cut short"])
def test_a_shard_that_is_not_the_planned_one_is_refused_by_name(recipe, target, capsys, problem):
    folder = recipe.parent / "features"
    assert cli.main(["features", str(recipe), "--vllm"]) == 0
    write(folder, target)
    file = folder / "train" / "shard-00000.safetensors"
    tensors = load_file(file)
    mark = features.read_plan(folder / "train" / features.PLAN)[1][0]["mark"]
    if problem == "other data":
        shutil.copy(folder / "eval" / file.name, file)
    elif problem == "cut short":
        file.write_bytes(file.read_bytes()[:-8])
    else:
        if problem == "lengths":
            tensors["offsets"][1] += 1
        elif problem == "nan":
            tensors["context"][3] = float("nan")
        elif problem == "dtype":
            tensors["context"] = tensors["context"].float()
        save_file(tensors, file, {"shard": "another" if problem == "mark" else mark})
    capsys.readouterr()
    assert cli.main(["features", str(recipe), "--vllm"]) == 1
    error = capsys.readouterr().err
    said = {
        "mark": "comes from other features",
        "other data": "comes from other features",
        "lengths": "does not hold the 2 samples that were planned",
        "nan": "NaN or infinite values",
        "dtype": "holds F32 instead of BF16",
        "cut short": "cannot be read",
    }
    assert str(file) in error
    assert said[problem] in error
    assert "Remove it" in error
    file.unlink()
    write(folder, target)
    assert cli.main(["features", str(recipe), "--vllm"]) == 0


def test_tapped_layers_are_refused_before_anything_is_written(recipe, capsys):
    override = "drafter={mask_token_id: 3, context_source: hidden_layers, target_layer_ids: [0, 1], reducer: fc}"
    assert cli.main(["features", str(recipe), "--vllm", override]) == 1
    assert "leave out --vllm" in capsys.readouterr().err
    assert not (recipe.parent / "features").exists()


def test_what_a_worker_finds_wrong_is_the_reason_that_the_command_gives(target, tmp_path):
    engine = Engine(target)
    features.ask_workers(engine, "start_features", [[5, 6]])
    with pytest.raises(ValueError, match="1 of 1 sequences never went through the target"):
        features.ask_workers(engine, "write_features", str(tmp_path / "shard"), "mark", [[5, 6]])
    del engine.capture
    with pytest.raises(ValueError, match="another class than the plug-in's serves the target"):
        features.ask_workers(engine, "start_features", [[5, 6]])


def test_a_shard_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(capture.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        capture.write_whole(tmp_path / "shard", b"x")
    assert not (tmp_path / "shard").exists()
