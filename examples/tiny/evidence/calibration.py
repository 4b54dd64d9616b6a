"""Is the confidence head calibrated? Its estimates and the acceptance on held-out prompts at temperatures 0 and 1.

    python examples/tiny/evidence/calibration.py examples/tiny/drafter docs/results/heads  # calibration.json, .png

All drafts of a block are verified (`verify_cost` 0); a slot counts if it was reached, that is if all drafts before it
were accepted. The gain of verifying fewer drafts is computed on the same rounds, for several costs per verified token.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from hyperdflash.benchmark.prompt_sets import read_file
from hyperdflash.benchmark.timing import timed_call
from hyperdflash.common.checkpoint import load_drafter, load_target
from hyperdflash.common.colors import GREY, OF_METHODS
from hyperdflash.common.files import write_atomically
from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.encoding_deepseek_v4 import encode_with_mask
from hyperdflash.generation_hyperdflash import num_worth_verifying

TINY = Path(__file__).resolve().parents[1]
PROMPTS = [TINY / "build" / "prompts" / "heldout" / f"{domain}.jsonl" for domain in ("code", "math", "chat")]
NUM_BINS = 10
COSTS = (0.03, 0.1, 0.2)  # of one more verified token, relative to a round without drafts


def run_rounds(target, tokenizer, drafter, temperature: float, num_prompts: int) -> list[tuple[list[float], int]]:
    """For each round, the estimates of its drafts and how many were accepted."""
    rounds, estimates = [], []
    column = int(temperature > 0)
    hook = drafter.confidence_head.register_forward_hook(
        lambda module, args, logits: estimates.append(logits[0, 1:, column].sigmoid().tolist())
    )
    for path in PROMPTS:
        for prompt in tqdm(read_file(path).prompts[:num_prompts], desc=f"{path.stem}, temperature {temperature:g}"):
            messages = [{"role": "user", "content": prompt.turns[0]}]
            ids, _ = encode_with_mask(messages, tokenizer, add_generation_prompt=True)
            estimates.clear()
            call = timed_call(
                target, {"assistant_model": drafter}, ids, max_new_tokens=128, temperature=temperature, seed=0
            )
            for block, drafted, accepted in zip(estimates, call["num_drafts"], call["num_accepted"], strict=True):
                rounds.append((block[:drafted], accepted))
    hook.remove()
    return rounds


def reached_slots(rounds: list[tuple[list[float], int]]) -> np.ndarray:
    """Rows (estimate, accepted) of all slots that were reached."""
    rows = [
        (estimate, slot < accepted)
        for block, accepted in rounds
        for slot, estimate in enumerate(block[: accepted + 1])
    ]
    return np.array(rows, dtype=float)


def gains(rounds: list[tuple[list[float], int]], cost: float) -> dict[str, float]:
    """Tokens per second with fewer drafts per round, relative to all drafts, if one more verified token costs `cost`.

    `fixed` is the best number that is the same for all rounds, `confidence` stops by the estimates, and `known` at
    what will be accepted, which bounds the rest.
    """

    def tokens_a_second(numbers: list[int]) -> float:
        kept = sum(1 + min(number, accepted) for number, (_, accepted) in zip(numbers, rounds, strict=True))
        return kept / sum(1 + cost * number for number in numbers)

    drafted = [len(block) for block, _ in rounds]
    fixed = {most: tokens_a_second([min(most, n) for n in drafted]) for most in range(1, max(drafted) + 1)}
    most = max(fixed, key=fixed.get)
    everything = tokens_a_second(drafted)
    return {
        "cost": cost,
        "best_fixed_number": most,
        "fixed": fixed[most] / everything,
        "confidence": tokens_a_second([num_worth_verifying(block, cost) for block, _ in rounds]) / everything,
        "known": tokens_a_second([max(accepted, 1) for _, accepted in rounds]) / everything,
    }


def bins_of(rows: np.ndarray) -> list[dict]:
    """Slots binned by their estimate, in equal steps from 0 to 1."""
    index = np.minimum((rows[:, 0] * NUM_BINS).astype(int), NUM_BINS - 1)
    return [
        {
            "slots": int((index == i).sum()),
            "estimated": float(rows[index == i, 0].mean()),
            "accepted": float(rows[index == i, 1].mean()),
        }
        for i in range(NUM_BINS)
        if (index == i).any()
    ]


def summary(rounds: list[tuple[list[float], int]]) -> dict:
    """Expected calibration error, Brier score beside that of the mean alone, the bins, and the gains."""
    rows = reached_slots(rounds)
    bins = bins_of(rows)
    error = sum(b["slots"] * abs(b["estimated"] - b["accepted"]) for b in bins) / len(rows)
    return {
        "slots": len(rows),
        "calibration_error": float(error),
        "brier": float(((rows[:, 0] - rows[:, 1]) ** 2).mean()),
        "brier_of_mean": float(rows[:, 1].var()),
        "bins": bins,
        "rounds": len(rounds),
        "gains": [gains(rounds, cost) for cost in COSTS],
    }


def draw(found: dict[str, dict], path: Path) -> None:
    """The reliability plot: accepted against estimated, one panel per temperature, with the number of slots below."""
    color = OF_METHODS["hyperdflash+markov+confidence"]
    figure = Figure(figsize=(8, 4.6), dpi=120, layout="constrained")
    upper, lower = figure.subplots(2, 2, sharex=True, height_ratios=(3, 1))
    for axes, count, (temperature, part) in zip(upper, lower, found.items(), strict=True):
        estimated, accepted, slots = zip(
            *((b["estimated"], b["accepted"], b["slots"]) for b in part["bins"]), strict=True
        )
        axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
        axes.plot(estimated, accepted, color=color, marker="o", clip_on=False)
        axes.set(title=f"temperature {temperature}, error {part['calibration_error']:.3f}", xlim=(0, 1), ylim=(0, 1))
        axes.set_ylabel("accepted")
        count.bar(estimated, slots, width=0.06, color=color)
        count.set(xlabel="estimated", ylabel="slots")
        axes.grid(alpha=0.25)
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="folder of a drafter with draft_confidence")
    parser.add_argument("output", type=Path)
    parser.add_argument("--num-prompts", type=int, default=30, help="of every domain")
    args = parser.parse_args()
    if not HyperDFlashConfig.from_pretrained(args.drafter).draft_confidence:
        parser.error(f"{args.drafter} has no confidence head: give a drafter with draft_confidence")
    torch.set_num_threads(1)
    target, tokenizer = load_target(str(TINY / "target"), None, "float32")
    drafter = load_drafter(args.drafter, None, "float32", target)
    drafter.config.verify_cost = 0
    found = {
        f"{temperature:g}": summary(run_rounds(target, tokenizer, drafter, temperature, args.num_prompts))
        for temperature in (0.0, 1.0)
    }
    args.output.mkdir(parents=True, exist_ok=True)
    write_atomically(args.output / "calibration.json", (json.dumps(found, indent=1) + "\n").encode())
    draw(found, args.output / "calibration.png")
    for temperature, part in found.items():
        print(f"temperature {temperature}: error {part['calibration_error']:.3f} on {part['slots']:,} slots")


if __name__ == "__main__":
    main()
