"""Conversations whose answers the tiny target will write anew: what its drafter is trained on.

    python examples/tiny/prompts.py        # then `hyperdflash data regenerate`, see the Makefile's `tiny`

Of every domain 5,000 training documents, three of five for greedy answers and two for sampled ones, and 40 others for
the evaluations during training. Held-out documents are not touched: `evaluate.py` alone decodes them. Writes
`build/prompts/{greedy,sampled,valid}-{domain}.jsonl`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from data import DOMAINS, MAX_PROMPT_LENGTH
from transformers import AutoTokenizer

from hyperdflash import encode_with_mask

HERE = Path(__file__).resolve().parent
SIZES = {"greedy": 3000, "sampled": 2000, "valid": 40}


def cut(messages: list[dict], tokenizer, rng: np.random.Generator) -> list[dict] | None:
    """The conversation up to one of its answers, None if what comes before that is too long."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    last = rng.choice(answers)
    prompt, _ = encode_with_mask(messages[:last], tokenizer, add_generation_prompt=True)
    return messages[: last + 1] if len(prompt) <= MAX_PROMPT_LENGTH else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=HERE / "build")
    parser.add_argument("--target", type=Path, default=HERE / "target")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    (args.build / "prompts").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        lines = (args.build / f"train-{domain}.jsonl").read_text(encoding="utf-8").splitlines()
        order = iter(rng.permutation(len(lines)))
        for name, size in SIZES.items():
            conversations = []
            while len(conversations) < size:
                messages = cut(json.loads(lines[next(order)])["messages"], tokenizer, rng)
                if messages is not None:
                    conversations.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
            (args.build / "prompts" / f"{name}-{domain}.jsonl").write_text("".join(conversations), encoding="utf-8")


if __name__ == "__main__":
    main()
