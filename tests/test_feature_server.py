"""Training from a server that writes the features: `serving/tests` has vLLM, here a stand-in runs the same target.

What it runs goes through the plug-in's own `PromptWriter`, one prompt a forward.
"""

import json
import os
import pickle
import re
import shutil
import threading
from pathlib import Path

import datasets
import pytest
import torch
from child import fork
from fake_server import FakeServer, choice
from fresh import COMMAND_LINE, run_ranks
from safetensors.torch import load_file
from tiny_v4 import TINY_WORLD_TARGET, features_recipe

from hyperdflash import __main__ as cli
from hyperdflash.common.checkpoint import load_target
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training import feature_server
from hyperdflash.training.arguments import load_recipe
from hyperdflash.training.data import load_recipe_data
from hyperdflash.training.feature_cache import prompt_name, target_name
from hyperdflash.training.features import open_features, read_drafter_config
from hyperdflash.training.run_folder import list_checkpoints, read_state
from hyperdflash.training.target import TargetHead
from hyperdflash_vllm import capture

NUM_ROWS = 6


class TargetServer(FakeServer):
    """Runs the prompts that it is sent, and writes into `folder` as the plug-in does."""

    def __init__(self, target, folder: Path):
        super().__init__(None)
        self.target, self.reply = target, self.run
        folder.mkdir(exist_ok=True)
        self.writer = capture.PromptWriter(folder, target.config.hc_mult)
        self.writer.open(TargetHead.from_target(target).identity())

    def run(self, body):
        ids = torch.tensor([body["prompt"]])
        with self.lock, torch.no_grad(), ResidualTap(self.target) as tap:
            self.target.model(ids, use_cache=False)
            self.writer.take(ids[0], torch.arange(ids.shape[1]), tap.take()[0].flatten(1))
        return choice(token_ids=[0])

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.writer.threads.shutdown()


@pytest.fixture(scope="module")
def target():
    return load_target(str(TINY_WORLD_TARGET), None)[0]


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "features"


@pytest.fixture
def server(target, folder):
    server = TargetServer(target, folder)
    yield server
    server.close()


@pytest.fixture
def recipe(tmp_path, server, monkeypatch) -> Path:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(feature_server, "FIRST_WAIT", 0.01)
    path = features_recipe(
        tmp_path,
        f"features: server\nfeatures_server: {server.url}\nbf16: false\nmax_steps: 3\nlogging_steps: 1\n"
        "per_device_train_batch_size: 2\nnum_anchors: 4\nreport_to: none\nsave_steps: 3\n",
    )
    write_rows(tmp_path / "train.jsonl", range(NUM_ROWS))
    return path


def write_rows(path: Path, numbers) -> None:
    rows = [[0, *range(10 + i, 18 + 2 * i)] for i in numbers]
    lines = [json.dumps({"input_ids": ids, "loss_mask": [0] + [1] * (len(ids) - 1)}) for ids in rows]
    path.write_text("\n".join(lines))


def train(recipe: Path, name: str, *options) -> tuple[dict, list[float]]:
    """The weights and losses of a run that succeeds."""
    output = recipe.parent / name
    assert cli.main(["train", str(recipe), f"output_dir={output}", "eval_data=[]", *options]) == 0
    (checkpoint,) = list_checkpoints(output)
    losses = [entry["loss"] for entry in read_state(checkpoint)["log_history"] if "loss" in entry]
    return load_file(checkpoint / "model.safetensors"), losses


def assert_same(got, want) -> None:
    assert got[1] == want[1]
    assert got[0].keys() == want[0].keys()
    assert all(torch.equal(got[0][name], tensor) for name, tensor in want[0].items())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(recipe: Path, capsys, *options, command="train") -> str:
    capsys.readouterr()
    assert cli.main([command, str(recipe), *options]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"hyperdflash {command}: ")
    assert error.count("\n") == 1
    assert not (recipe.parent / "run").exists()
    return error


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.slow
def test_training_from_a_server_then_from_its_files_and_without_keeping_them_gives_the_same_weights(
    recipe, server, folder, monkeypatch
):
    want = train(recipe, "asked")
    assert len(files(folder)) == NUM_ROWS
    assert len(server.requests) == NUM_ROWS
    assert {(body["max_tokens"], body["model"]) for body in server.requests} == {(1, "v4")}
    shutil.rmtree(next(folder.iterdir()))
    server.writer.folder.mkdir()
    assert_same(train(recipe, "workers", "keep_features=false", "dataloader_num_workers=2"), want)
    assert not files(folder)
    assert_same(train(recipe, "again"), want)
    before, num_asked = files(folder), len(server.requests)
    server.close()
    for name, options in {
        "gone": [],  # nothing is missing, so nobody is asked
        "offline": ["features=offline"],
    }.items():
        assert_same(train(recipe, name, *options), want)
    assert files(folder) == before
    assert len(server.requests) == num_asked


def test_the_features_are_the_targets_own_under_the_same_names(recipe, server, target):
    assert cli.main(["features", str(recipe)]) == 0
    args = load_recipe(recipe)
    config = read_drafter_config(args)
    cache = open_features(args, config)
    tensors = {**TargetHead.from_target(target).identity()}
    assert capture.target_name(tensors) == target_name(cache.head, config) == cache.folder.name
    rows = load_recipe_data(args, args.train_data, load_target(args.target, None)[1])[0]
    for ids in rows["input_ids"]:
        assert capture.prompt_name(torch.tensor(ids)) == prompt_name(ids)
        with torch.no_grad(), ResidualTap(target) as tap:
            target.model(torch.tensor([ids]), use_cache=False)
        (sample,) = cache.load([ids])
        assert torch.equal(sample["context"], tap.take()[0])
    assert cli.main(["features", str(recipe), "--verify"]) == 0


def test_the_command_asks_for_what_is_missing_and_no_more(recipe, server, folder, capsys):
    assert cli.main(["features", str(recipe)]) == 0
    assert "is complete" in capsys.readouterr().out
    assert len(server.requests) == len(files(folder)) == NUM_ROWS + 1  # and the evaluation's
    write_rows(recipe.parent / "train.jsonl", [7, 3, 0, 9, 1, 7])  # another order, two more, one of them twice
    assert cli.main(["features", str(recipe), "keep_features=false"]) == 0
    assert "2 of 6 samples of train data to write" in capsys.readouterr().out
    assert len(server.requests) == len(files(folder)) == NUM_ROWS + 3


@pytest.mark.slow
def test_two_processes_train_from_one_server_as_one_process_does(recipe, server, folder):
    want = train(recipe, "one")
    shutil.rmtree(next(folder.iterdir()))
    server.writer.folder.mkdir()
    options = ["eval_data=[]", "per_device_train_batch_size=1", "ddp_backend=gloo", "keep_features=false"]
    output = recipe.parent / "two"
    run_ranks(COMMAND_LINE, recipe.parent / "home", "train", recipe, f"output_dir={output}", *options)
    (checkpoint,) = list_checkpoints(output)
    got = [entry["loss"] for entry in read_state(checkpoint)["log_history"] if "loss" in entry]
    assert got == pytest.approx(want[1], rel=1e-4)  # the head is bf16, and sees other batches
    assert not files(folder)


# --------------------------------------------------------------------------------------------------- what may go wrong


def test_a_server_that_is_not_there_is_named_before_any_work(recipe, server, capsys):
    server.close()
    error = refused(recipe, capsys)
    assert re.search(rf"features_server: no vLLM answers at {server.url}/v1 \(.*refused\)", error)
    assert "on_missing: error" in error
    error = refused(recipe, capsys, "on_missing=error")
    assert re.search(
        rf"lacks the features of {NUM_ROWS} of {NUM_ROWS} samples of train data, the first of them", error
    )


def test_a_server_that_writes_elsewhere_is_told_from_the_folder(recipe, server, capsys, monkeypatch, tmp_path):
    error = refused(recipe, capsys, f"features_dir={tmp_path / 'other'}")
    assert f"{tmp_path / 'other'}/{server.writer.folder.name} does not exist, so no server" in error
    assert f'"hyperdflash_features": "{tmp_path / "other"}"' in error
    # One of an earlier run is there, but what is written now goes elsewhere
    (tmp_path / "other" / server.writer.folder.name).mkdir(parents=True)
    monkeypatch.setattr(feature_server, "FILE_SECONDS", 0.05)
    assert "does not come: look at the server's log" in refused(recipe, capsys, f"features_dir={tmp_path / 'other'}")


def test_what_the_server_refuses_or_cannot_write_is_the_reason_that_is_given(recipe, server, capsys, monkeypatch):
    server.reply = lambda body: (400, {"error": {"message": "the prompt is too long"}}, ())
    assert re.search("a sample of 9 tokens is refused, .*HTTP 400: .*too long", refused(recipe, capsys))
    server.reply = server.run
    save = capture.save
    monkeypatch.setattr(capture, "save", lambda *args: (_ for _ in ()).throw(OSError("No space left on device")))
    assert re.search("the server did not write .*No space left on device", refused(recipe, capsys))
    assert list(server.writer.folder.glob("*.error"))
    monkeypatch.setattr(capture, "save", save)
    assert cli.main(["features", str(recipe)]) == 0  # and the reason is gone
    assert not list(server.writer.folder.glob("*.error"))


def test_a_busy_server_is_asked_again_and_a_lost_one_replaced(recipe, server, target, folder):
    failures = iter([500, 429, 503, None])

    def reply(body):
        status = next(failures, 200)
        return server.run(body) if status == 200 else status and (status, {}, ())

    server.reply = reply
    other = TargetServer(target, folder)
    other.reply = lambda body: None  # hangs up on everybody
    assert cli.main(["features", str(recipe), f"features_server=[{server.url},{other.url}]"]) == 0
    other.close()
    assert cli.main(["features", str(recipe), "--verify"]) == 0


def test_a_file_that_another_process_read_and_removed_is_asked_for_again(recipe, server, monkeypatch):
    args = load_recipe(recipe)
    cache = open_features(args, read_drafter_config(args))
    wait = feature_server.wait_for
    removed = []

    def remove_once(path, problem):
        found = wait(path, problem)
        if not removed:
            path.unlink()
            removed.append(path)
        return found

    monkeypatch.setattr(feature_server, "wait_for", remove_once)
    assert cache.load([[0, 11, 12]])[0]["context"].shape == (3, 4, 192)
    assert len(server.requests) == 2


def test_a_batch_is_asked_for_at_once_and_equal_samples_once(recipe, server):
    args = load_recipe(recipe)
    cache = open_features(args, read_drafter_config(args))
    together = threading.Barrier(3, timeout=20)

    def reply(body):
        together.wait()
        return server.run(body)

    server.reply = reply
    samples = [[0, 11, 12], [0, 12, 13], [0, 11, 12], [0, 13, 14]]
    loaded = cache.load(samples)
    assert len(server.requests) == 3
    assert torch.equal(loaded[0]["context"], loaded[2]["context"])
    assert not torch.equal(loaded[0]["context"], loaded[1]["context"])


def test_a_forked_worker_has_connections_of_its_own(recipe):
    args = load_recipe(recipe)
    cache = open_features(args, read_drafter_config(args))
    ours = cache.server.client
    assert cache.server.client is ours
    assert os.waitpid(fork(lambda: int(cache.server.client is ours)), 0)[1] == 0
    assert pickle.loads(pickle.dumps(cache)).server.client is not ours


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["target_dtype=float32"], "vLLM computes in bf16: set target_dtype: bfloat16"),
        (
            ["drafter={mask_token_id: 3, context_source: hidden_layers, target_layer_ids: [0, 1], reducer: fc}"],
            "vLLM hands on only the residual before hc_head",
        ),
    ],
)
def test_features_that_vllm_does_not_have_are_refused(recipe, capsys, options, message):
    assert message in refused(recipe, capsys, *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["features_server=[]"], "features: server needs features_server"),
        (["features_dir=null"], "features: server needs features_dir"),
        (["on_missing=skip"], "on_missing is one of generate, error; got 'skip'"),
        (["features_server=localhost:8000"], "localhost:8000 is not an address: it must start with http"),
    ],
)
def test_wrong_settings_are_refused(recipe, capsys, options, message):
    assert cli.main(["train", str(recipe), *options]) == 2
    assert message in capsys.readouterr().err
