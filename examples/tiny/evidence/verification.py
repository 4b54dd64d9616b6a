"""What block verification keeps more of than verification token by token, when sampling.

    python examples/tiny/evidence/verification.py

Decodes the prompts of `examples/tiny/chats.jsonl` at temperature 1 and works out, for the drafts of every round, the
expected number kept by either: the same drafts, so chance does not decide. Prints the table of `docs/decoding.md`.
"""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hyperdflash import HyperDFlashModel, encode_with_mask, generation_hyperdflash
from hyperdflash.generation.mtp import load_mtp
from hyperdflash.generation_hyperdflash import _ratios, block_verification

TINY = Path(__file__).resolve().parents[1]
NEW_TOKENS = 64
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def expected_drafts(probs: torch.Tensor, draft_probs: torch.Tensor, drafts: torch.LongTensor) -> tuple[float, float]:
    """Drafts kept on average, token by token and as a block; arguments as in `block_verification`."""
    ratios = _ratios(probs, draft_probs, drafts).clamp(max=1)
    chances, _ = block_verification(probs, draft_probs, drafts)
    all_fail = (1 - chances).flip(0).cumprod(0).flip(0)  # that the prefix ends before draft i
    return float(ratios.cumprod(0).sum()), float((1 - all_fail).sum())


def measure(target, drafter, prompts: list[list[int]]) -> np.ndarray:
    """Rounds, and drafts kept token by token and as a block, of each prompt: `(prompts, 3)`."""
    rounds, own = [], generation_hyperdflash._Loop.judge_samples

    def judge(loop, scores, drafts, draft_probs):
        if drafts is not None and len(drafts):
            rounds.append(expected_drafts(scores.softmax(-1), draft_probs, drafts))
        return own(loop, scores, drafts, draft_probs)

    generation_hyperdflash._Loop.judge_samples = judge
    try:
        sums = []
        for seed, prompt in enumerate(prompts):
            rounds.clear()
            torch.manual_seed(seed)
            target.generate(torch.tensor([prompt]), assistant_model=drafter, max_new_tokens=NEW_TOKENS, **SAMPLING)
            sums.append([len(rounds), *np.array(rounds).reshape(-1, 2).sum(0)])
        return np.array(sums)
    finally:
        generation_hyperdflash._Loop.judge_samples = own


def taus(sums: np.ndarray) -> tuple[float, float]:
    """tau token by token and as a block, pooled over rounds."""
    rounds, by_token, by_block = sums.sum(0)
    return 1 + by_token / rounds, 1 + by_block / rounds


def main() -> None:
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TINY / "target")
    chats = [json.loads(line)["messages"] for line in (TINY / "chats.jsonl").read_text().split("\n") if line]
    prompts = [encode_with_mask(messages, tokenizer, add_generation_prompt=True)[0] for messages in chats]
    drafters = {
        name: HyperDFlashModel.from_pretrained(TINY / name, dtype=torch.float32)
        for name in ("drafter-paper", "drafter")
    }
    drafters["drafter"].config.verify_cost = 0  # all drafts are verified
    drafters["MTP (6)"] = load_mtp(TINY / "target", target.config, max_drafts=6)
    print(
        "| drafter | rounds | tau, token by token | tau, block | gain, 95% over prompts |\n|---|---:|---:|---:|---:|"
    )
    for name, drafter in drafters.items():
        sums = measure(target, drafter, prompts)
        by_token, by_block = taus(sums)
        rng = np.random.default_rng(0)
        resampled = [taus(sums[rng.integers(len(sums), size=len(sums))]) for _ in range(2000)]
        low, high = np.percentile([100 * (b / a - 1) for a, b in resampled], [2.5, 97.5])
        gain = f"{100 * (by_block / by_token - 1):.1f}% ({low:.1f} to {high:.1f})"
        print(f"| {name} | {int(sums[:, 0].sum())} | {by_token:.3f} | {by_block:.3f} | {gain} |", flush=True)


if __name__ == "__main__":
    main()
