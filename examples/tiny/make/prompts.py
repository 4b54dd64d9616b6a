"""Conversations whose answers the tiny target will write anew: what it is post-trained on, and its drafter trained.

    python examples/tiny/make/prompts.py        # then `hyperdflash data regenerate`, see `make tiny-texts`

Of every domain 5,000 training documents for the drafter, three of five for greedy answers and two for sampled ones,
40 others for the evaluations during training, and 3,000 others for `post_train.py`:
`build/prompts/{greedy,sampled,valid,post}-{domain}.jsonl`. And 40 held-out documents up to one of their answers, which
nothing is trained or chosen on: `build/prompts/heldout/{domain}.jsonl`, for `hyperdflash benchmark --prompts`.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from batching import DOMAINS, MAX_PROMPT_LENGTH
from transformers import AutoTokenizer

from hyperdflash import encode_with_mask

TINY = Path(__file__).resolve().parents[1]
SIZES = {"greedy": 3000, "sampled": 2000, "valid": 40, "post": 3000}


HELD_OUT = 40


def cut(messages: list[dict], tokenizer, rng: np.random.Generator) -> list[dict] | None:
    """The conversation up to one of its answers, None if what comes before that is too long."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    last = rng.choice(answers)
    prompt, _ = encode_with_mask(messages[:last], tokenizer, add_generation_prompt=True)
    return messages[: last + 1] if len(prompt) <= MAX_PROMPT_LENGTH else None


def cut_all(file: Path, tokenizer, rng: np.random.Generator) -> Iterator[list[dict]]:
    """The file's conversations in a random order, each cut."""
    lines = file.read_text(encoding="utf-8").strip().split("\n")  # splitlines() also cuts at U+2028 inside a text
    for i in rng.permutation(len(lines)):
        messages = cut(json.loads(lines[i])["messages"], tokenizer, rng)
        if messages is not None:
            yield messages


def write(file: Path, conversations: list[list[dict]]) -> None:
    lines = [json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in conversations]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=TINY / "build")
    parser.add_argument("--target", type=Path, default=TINY / "target")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        conversations = cut_all(args.build / f"train-{domain}.jsonl", tokenizer, rng)
        for name, size in SIZES.items():
            write(args.build / "prompts" / f"{name}-{domain}.jsonl", [next(conversations) for _ in range(size)])
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        conversations = cut_all(args.build / f"heldout-{domain}.jsonl", tokenizer, rng)
        prompts = [next(conversations)[:-1] for _ in range(HELD_OUT)]
        write(args.build / "prompts" / "heldout" / f"{domain}.jsonl", prompts)


if __name__ == "__main__":
    main()
