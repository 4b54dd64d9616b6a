"""Features that vLLM's engine writes are the target's residual, bit for bit, and training reads them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.usefixtures("v4")
SMALL = ["--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--seed", "0"]


@pytest.fixture(scope="module")
def write(build, run_job, tmp_path_factory):
    """A function of a runner: a copy of the planned folder that the engine fills, and what the forwards held."""
    results = {}

    def once(runner: str) -> dict:
        if runner not in results:
            results[runner] = run(runner)
        return results[runner]

    def run(runner: str) -> dict:
        folder = tmp_path_factory.mktemp("features")
        store = shutil.copytree(build / "features" / "store", folder / "store")
        job = {
            "target": str(build / "sliding" / "target"),
            "runner": runner,
            "features": str(store),
            "options": SMALL,
            "seen": str(folder / "seen.safetensors"),
        }
        result = run_job(job, folder)
        assert result.get("status") == 0, result
        return {"store": store, "seen": load_file(folder / "seen.safetensors"), "forwards": result["forwards"]}

    return once


def find(seen: dict, row: list[int]) -> torch.Tensor:
    """The residual of the first forward part that holds this row from position 0."""
    ids, positions = torch.tensor(row), torch.arange(len(row))
    for start_at in (seen["positions"] == 0).nonzero()[:, 0].tolist():
        part = slice(start_at, start_at + len(row))
        if torch.equal(seen["ids"][part].long(), ids) and torch.equal(seen["positions"][part], positions):
            return seen["residuals"][part]
    raise AssertionError(f"a row of {len(row)} tokens was never run")


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_shards_hold_the_residual_of_the_forwards_bit_for_bit(write, split, runner):
    written = write(runner)
    folder = written["store"] / split
    plan = [json.loads(line) for line in (folder / "vllm-plan.jsonl").read_text().splitlines()][1:]
    for shard in plan:
        tensors = load_file(folder / shard["file"])
        want = torch.cat([find(written["seen"], row) for row in shard["input_ids"]])
        assert tensors["context"].dtype == want.dtype == torch.bfloat16
        assert torch.equal(tensors["context"], want)
        assert tensors["offsets"].diff().tolist() == [len(row) for row in shard["input_ids"]]


def test_several_sequences_share_a_forward(write):
    assert write("v1")["forwards"] == 4  # for twelve rows, by --max-num-batched-tokens


def test_the_command_writes_them_with_an_engine_in_a_process_of_its_own(build, write, tmp_path):
    """As it runs without the tests: every shard of one split, and of the other the reason why there is none."""
    store = shutil.copytree(build / "features" / "store", tmp_path / "store")
    plan = store / "train" / "vllm-plan.jsonl"
    plan.write_text(plan.read_text().replace('"file": "', '"file": "gone/'))
    command = [sys.executable, str(Path(__file__).with_name("vllm_cli.py")), "features", str(store), *SMALL]
    command += ["--model", str(build / "sliding" / "target")]
    done = subprocess.run(command, env={**os.environ, "WITH_SHIM": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "\nhyperdflash_vllm.features: [Errno 2] No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr
    shards = sorted(store.rglob("shard-*"))
    assert [path.parent.name for path in shards] == ["eval"]
    assert shards[0].read_bytes() == (write("v1")["store"] / "eval" / shards[0].name).read_bytes()


def test_training_reads_them(build, write, main_python, tmp_path):
    recipe = [str(build / "features" / "recipe.yaml"), f"features_dir={write('v1')['store']}"]
    command = [main_python, "-m", "hyperdflash"]
    said = subprocess.run([*command, "features", *recipe, "--vllm"], check=True, capture_output=True, text=True).stdout
    assert "is complete" in said
    subprocess.run([*command, "features", *recipe, "--verify"], check=True)
    subprocess.run([*command, "train", *recipe, f"output_dir={tmp_path / 'run'}"], check=True)
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mixed", "the features' plan was made for a target with number of layers 3, but the target has 5"),
        ("sliding", "the features' plan was made for another target"),
    ],
)
def test_another_target_than_the_planned_one_is_refused(build, run_job, tmp_path, target, message):
    store = shutil.copytree(build / "features" / "store", tmp_path / "store")
    for plan in store.glob("*/vllm-plan.jsonl"):
        facts, *shards = plan.read_text().splitlines()
        facts = json.loads(facts)
        facts["target_fingerprint"]["hc_head_fn"][0] *= 2
        plan.write_text("\n".join([json.dumps(facts), *shards]) + "\n")
    job = {"target": str(build / target / "target"), "runner": "v1", "features": str(store), "options": SMALL}
    result = run_job({**job, "seen": str(tmp_path / "seen")}, tmp_path)
    assert result["status"] == 1
    assert message in result["log"]
    assert not list(store.rglob("shard-*"))
