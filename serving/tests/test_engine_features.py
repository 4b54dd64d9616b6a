"""Features that a vLLM server writes are the target's residual, bit for bit, and training reads them as it runs."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm_server import byte_tokenizer, serve, stop

pytestmark = pytest.mark.usefixtures("v4")
WHOLE_PROMPTS = {"enable_chunked_prefill": False, "enable_prefix_caching": False}


def prompts(build: Path, split: str = "train") -> list[list[int]]:
    lines = (build / "features" / f"{split}.jsonl").read_text().splitlines()
    return [json.loads(line)["input_ids"] for line in lines]


# -------------------------------------------------------------------------------------------------- the right features


@pytest.fixture(scope="module")
def write(v4, build, run_job, tmp_path_factory):
    """A function of a runner: the folder that an engine filled, and what its forwards held."""
    results = {}

    def once(runner: str) -> dict:
        if runner not in results:
            results[runner] = run(runner)
        return results[runner]

    def run(runner: str) -> dict:
        folder = tmp_path_factory.mktemp("features")
        store = folder / "store"
        store.mkdir()
        job = {
            "target": str(build / "sliding" / "target"),
            "runner": runner,
            "batches": [prompts(build), prompts(build, "eval"), prompts(build)[:2]],
            "max_tokens": 1,
            "options": {**WHOLE_PROMPTS, "additional_config": {"hyperdflash_features": str(store)}},
            "seen": str(folder / "seen.safetensors"),
            "written": str(store),
        }
        result = run_job(job, folder)
        assert "error" not in result, result
        return {"store": store, "seen": load_file(job["seen"]), "forwards": result["forwards"]}

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
def test_the_files_hold_the_residual_of_the_forwards_bit_for_bit(build, write, runner):
    written = write(runner)
    wanted = {tuple(row) for row in prompts(build) + prompts(build, "eval")}
    files = {tuple((file := load_file(path))["input_ids"].tolist()): file for path in written["store"].rglob("*.s*")}
    assert files.keys() == wanted  # two are alike, and two were run again
    for row in wanted:
        want = find(written["seen"], list(row))
        assert files[row]["context"].dtype == want.dtype == torch.bfloat16
        assert torch.equal(files[row]["context"], want)


def test_several_prompts_share_a_forward(write):
    assert write("v1")["forwards"] < 8  # for fourteen prompts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_chunked_prefill": True}, "serve with --no-enable-chunked-prefill"),
        ({"additional_config": {"hyperdflash_features": "/no/such/folder"}}, "is not a folder that can be written"),
    ],
)
def test_what_would_lose_prompts_is_refused(v4, build, run_job, tmp_path, options, message):
    job = {"target": str(build / "sliding" / "target"), "runner": "v1", "batches": [[[1, 2, 3]]], "max_tokens": 1}
    options = {"additional_config": {"hyperdflash_features": str(tmp_path)}, **WHOLE_PROMPTS, **options}
    result = run_job({**job, "options": options, "caching": True}, tmp_path)
    assert message in result["error"] + result["log"]


# -------------------------------------------------------------------------------------------------- a server, training


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shared") / "features"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def served(v4, build, folder, tmp_path_factory):
    """`vllm serve` of the random target, engine and worker in processes of their own: its process and address."""
    tokenizer = tmp_path_factory.mktemp("bytes")
    byte_tokenizer(tokenizer, build / "sliding" / "target")
    arguments = [build / "sliding" / "target", "--tokenizer", tokenizer, "--tokenizer-mode", "hf", "--enforce-eager"]
    arguments += ["--no-enable-chunked-prefill", "--no-enable-prefix-caching", "--max-model-len", 257]
    arguments += ["--max-num-batched-tokens", 512, "--max-num-seqs", 8]
    arguments += ["--additional-config", json.dumps({"hyperdflash_features": str(folder)})]
    process, url = serve(arguments, tmp_path_factory.mktemp("served") / "log.txt", WITH_SHIM="1")
    yield process, url
    stop(process)


@pytest.fixture(scope="module")
def train(build, main_python, folder, served, tmp_path_factory):
    """A function of a name and options, which trains and returns weights and losses."""
    output = tmp_path_factory.mktemp("runs")

    def run(name: str, *options: str, processes: int = 1) -> tuple[dict, list[float]]:
        start = [main_python, "-m"]
        if processes > 1:
            start += ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m"]
        recipe = [str(build / "features" / "recipe.yaml"), f"features_dir={folder}", f"features_server={served[1]}"]
        command = [*start, "hyperdflash", "train", *recipe, f"output_dir={output / name}", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-6000:]
        (checkpoint,) = (output / name).glob("checkpoint-*")
        log = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
        return load_file(checkpoint / "model.safetensors"), [entry["loss"] for entry in log if "loss" in entry]

    return run


def test_a_drafter_is_trained_from_a_server_and_from_its_files_with_the_server_gone(train, folder, served):
    """One request at a time: the last bits of a forward depend on who shares it."""
    options = ["eval_data=[]", "per_device_train_batch_size=1"]
    asked = train("asked", *options, "keep_features=false")
    assert not list(folder.rglob("*.safetensors"))
    two = train("two", *options, "ddp_backend=gloo", "keep_features=false", processes=2)
    assert not list(folder.rglob("*.safetensors"))
    assert len(two[1]) == len(asked[1]) == 6
    kept = train("kept", *options)
    stop(served[0])
    gone = train("gone", *options)
    offline = train("offline", *options, "features=offline", "on_missing=error")
    for weights, losses in (kept, gone, offline):
        assert losses == asked[1]
        assert all(torch.equal(weights[name], tensor) for name, tensor in asked[0].items())
