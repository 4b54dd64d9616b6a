"""Engines run in forks of one process that has vLLM imported, each once for all tests that look at it."""

import json
import os
import subprocess
import sys
from pathlib import Path

# For this process and all that it starts
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
)

import pytest
import torch

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
MAIN_PYTHON = os.environ.get("HYPERDFLASH_PYTHON", str(HERE.parents[1] / ".venv" / "bin" / "python"))
# Of V4's pages (64 and 256 positions) and window (128): prompts that end around them
LENGTHS = ((58, 5, 120, 30), (61, 126, 20, 7), (250, 3, 64, 128))

torch.set_num_threads(1)


def batches(number: int, seed: int = 0, vocab_size: int = 318) -> list:
    """`number` batches of four prompts of random ids."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in LENGTHS[i % 3]] for i in range(number)
    ]


@pytest.fixture(scope="session")
def build() -> Path:
    """The folder that `make_tiny.py` wrote."""
    if not (BUILD / "made.json").is_file():
        pytest.fail(
            f"{BUILD} is not made: run serving/tests/make_tiny.py in the main environment (make test-vllm does)"
        )
    return BUILD


def need_v4() -> None:
    """Skips the test where DeepSeek-V4 does not run: loading would end with `'_C' object has no attribute
    'convert_weight_packed'`, which vllm-cpu does not build for other CPUs."""
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vllm-cpu runs DeepSeek-V4 on CPUs with AVX512 alone; test_standin.py runs here")


@pytest.fixture(scope="session")
def v4() -> None:
    need_v4()


@pytest.fixture(scope="session")
def engine(build, run_job, tmp_path_factory):
    """A function of target, drafter and the rest of a job, which returns what `run_engine.py` writes. It skips the
    test if the target does not run on this CPU."""
    results = {}

    def run(target="sliding", drafter=None, *, runner="v1", num_batches=3, max_tokens=80, drafts=3, **job) -> dict:
        if target != "standin":
            need_v4()
        spec = job.pop("speculative_config", {})
        job = {
            "target": str(build / target / "target"),
            "runner": runner,
            "batches": batches(num_batches),
            "max_tokens": max_tokens,
            **job,
        }
        if drafter is not None:
            spec = {
                "method": "dflash",
                "model": str(build / target / drafter),
                "num_speculative_tokens": drafts,
                "kv_cache_dtype": "bfloat16",
                **spec,
            }
            job["speculative_config"] = {name: value for name, value in spec.items() if value is not None}
        key = json.dumps(job, sort_keys=True)
        if key not in results:
            results[key] = run_job(job, tmp_path_factory.mktemp("engine"))
        return results[key]

    return run


@pytest.fixture(scope="session")
def main_python() -> str:
    """Python of the main environment."""
    return MAIN_PYTHON


@pytest.fixture(scope="session")
def run_job():
    """A function of a job and its folder, which returns what `run_engine.py` writes, with `log`.

    One process for each runner imports vLLM and forks for every job. A job that ends without a result fails the test
    with its last words.
    """
    servers = {}

    def run(job: dict, folder: Path) -> dict:
        runner = job["runner"]
        if runner not in servers:
            command = [sys.executable, str(HERE / "run_engine.py"), runner]
            servers[runner] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        server, files = servers[runner], [folder / name for name in ("job.json", "result.json", "log.txt")]
        files[0].write_text(json.dumps(job))
        print(*files, file=server.stdin, flush=True)
        while (line := server.stdout.readline()) not in ("", "ended\n"):
            pass  # what vLLM prints while it is imported
        log = files[2].read_text() if files[2].is_file() else ""
        if line == "" or not files[1].is_file():
            pytest.fail(f"the engine ended without a result:\n{log[-6000:]}")
        return {**json.loads(files[1].read_text()), "log": log}

    yield run
    for server in servers.values():
        server.stdin.close()
        server.wait()


@pytest.fixture
def any_runner(monkeypatch):
    """Configurations of any draft, where nothing is run: V1's runner takes no DSpark, and no sliding and full layers
    in one drafter, and V2's does not do without Triton."""
    from vllm.config import VllmConfig

    monkeypatch.setattr(VllmConfig, "_validate_v1_model_runner", lambda config: None)


@pytest.fixture(scope="session")
def one_process(tmp_path_factory):
    """vLLM's groups of processes for one process, so that its layers can be built without an engine."""
    from vllm.distributed import parallel_state

    meeting = tmp_path_factory.mktemp("group") / "file"
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, distributed_init_method=f"file://{meeting}", local_rank=0, backend="gloo"
    )
