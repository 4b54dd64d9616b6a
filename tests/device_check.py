"""What only a GPU can tell, in one run of under ten minutes: `make device`. Every part says what it found; the exit
status is 1 if one failed.

    python tests/device_check.py                    # --device cpu tries the script itself, without a GPU
"""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from audit import ForwardAudit
from tiny_v4 import features_recipe

from hyperdflash.common.checkpoint import load_target
from hyperdflash.encoding_deepseek_v4 import encode_with_mask
from hyperdflash.generation.comparison import first_difference, timed_greedy
from hyperdflash.generation.demo import PROMPTS
from hyperdflash.modeling_hyperdflash import HyperDFlashModel

TINY = Path(__file__).parents[1] / "examples" / "tiny"
NUM_NEW = 96


def load_pair(device: str, dtype: str):
    """The example's target, tokenizer and drafter, and its prompts as ids on that device."""
    target, tokenizer = load_target(str(TINY / "target"), None, dtype, device)
    drafter = HyperDFlashModel.from_pretrained(TINY / "drafter", dtype=target.dtype).to(device)
    texts = ([{"role": "user", "content": text}] for text in PROMPTS.values())
    ids = [encode_with_mask(text, tokenizer, add_generation_prompt=True)[0] for text in texts]
    return target, drafter, [torch.tensor([x], device=device) for x in ids]


def run(*command: str) -> None:
    """A command of this environment, whose output is shown; raises when it fails."""
    subprocess.run([sys.executable, *command], check=True, timeout=300)


def skipped_tests(device: str) -> None:
    """The tests that are skipped without a GPU."""
    names = ["tests/test_generation.py::test_drafter_and_target_on_different_devices", "tests/test_check.py"]
    run("-m", "pytest", "-q", *names, "-k", "different_devices or on_a_gpu")


def losslessness(device: str) -> None:
    """Held against the target's own forwards, exactly; where ids differ from single steps', the gap of the tokens."""
    for dtype in ("float32", "bfloat16"):
        target, drafter, prompts = load_pair(device, dtype)
        differences = []
        for ids in prompts:
            plain, _ = timed_greedy(target, ids, NUM_NEW)
            with ForwardAudit(target) as audit:
                output, _ = timed_greedy(target, ids, NUM_NEW, drafter)
            audit.check(output)
            if difference := first_difference(target, plain.sequences, output.sequences):
                differences.append(f"{difference[1]:.3g} at position {difference[0]}")
        print(f"{dtype}: {len(differences)} of {len(prompts)} differ from single steps, gaps: {differences}")


def times(device: str) -> None:
    """Where a round's time goes, and tokens per second: plain, with the drafter, with the drafter compiled."""
    on = ["--device-map", device] if device != "cpu" else []
    run("-m", "hyperdflash.benchmark.profile_rounds", "--dtype", "bfloat16", "--repeats", "3", *on)
    target, drafter, prompts = load_pair(device, "bfloat16")
    for name in ("plain", "drafter", "drafter, compiled"):
        if "compiled" in name:
            drafter.compile(dynamic=True)
        assistant = None if name == "plain" else drafter
        for ids in prompts:
            timed_greedy(target, ids, NUM_NEW, assistant)  # compiles and warms up
        runs = [timed_greedy(target, ids, NUM_NEW, assistant) for ids in prompts]
        num_new = sum(out.sequences.shape[1] - ids.shape[1] for (out, _), ids in zip(runs, prompts, strict=True))
        print(f"{name}: {num_new / sum(seconds for _, seconds in runs):.1f} tokens per second")


def acceptance(device: str) -> None:
    """tau on this device and on the CPU, of the same prompts in fp32."""
    for where in (device, "cpu"):
        target, drafter, prompts = load_pair(where, "float32")
        stats = [timed_greedy(target, ids, NUM_NEW, drafter)[0].speculation for ids in prompts]
        print(f"{where}: tau {[round(x.acceptance_length, 3) for x in stats]}")


def training(device: str) -> None:
    """Two steps; flex attention on a GPU. With two GPUs, two steps in two processes as well."""
    for num_processes in range(1, min(2, max(torch.cuda.device_count(), 1)) + 1):
        with tempfile.TemporaryDirectory() as folder:
            recipe = features_recipe(Path(folder), "max_steps: 2\n")
            if device != "cpu":
                recipe.write_text(recipe.read_text().replace("use_cpu: true\n", ""))
            run("-m", "hyperdflash", "features", str(recipe))
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if num_processes == 2 else []
            run(*launcher, "-m", "hyperdflash", "train", str(recipe))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parts = {f.__name__: f for f in (losslessness, acceptance, times, training, skipped_tests)}
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU here; --device cpu tries the script itself")
    failed = []
    for name in args.parts:
        print(f"\n== {name}: {parts[name].__doc__}", flush=True)
        start = time.perf_counter()
        try:
            parts[name](args.device)
        except Exception:
            traceback.print_exc()
            failed.append(name)
        print(f"== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall parts passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
