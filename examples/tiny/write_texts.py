"""Let the tiny target write the texts its drafter is trained on: answers to the prompts of the training split.

    python examples/tiny/write_texts.py                       # all, one process
    python examples/tiny/write_texts.py --shard 0 --shards 2  # one of two processes; finished parts are skipped

Six of ten batches are written greedily, four are sampled at temperature 1. Prompts of equal length share a batch,
since padding would change what DeepSeek-V4 computes. Writes `build/texts/{split}-{part}.npz` with `input_ids`,
`loss_mask` (1 on the target's tokens) and `offsets`.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from data import DOMAINS, load_documents
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hyperdflash.cache_hyperdflash import make_rewindable

HERE = Path(__file__).resolve().parent
MAX_NEW_TOKENS = {"code": 192, "math": 128, "chat": 64}
BATCH_SIZE, BATCHES_PER_PART = 96, 8


def make_prompts(build: Path, split: str, tokenizer, num_prompts: int, seed: int = 0) -> list[tuple[str, np.ndarray]]:
    """`num_prompts` of every domain: a document up to the header of one of its answers, at most 256 tokens."""
    rng = np.random.default_rng(seed)
    header_end = tokenizer.convert_tokens_to_ids("</think>")
    prompts = []
    for domain in DOMAINS:
        documents = load_documents(build, split, domain)
        for i in rng.permutation(len(documents))[:num_prompts]:
            ends = np.flatnonzero(documents[i] == header_end)
            prompt = documents[i][: rng.choice(ends) + 1] if len(ends) else documents[i][:0]
            if 0 < len(prompt) <= 256:
                prompts.append((domain, prompt))
    return prompts


def make_batches(prompts: list, seed: int = 0) -> list[list]:
    """Batches of one domain and one prompt length, in a seeded random order."""
    groups: dict = {}
    for domain, prompt in prompts:
        groups.setdefault((domain, len(prompt)), []).append((domain, prompt))
    batches = [group[i : i + BATCH_SIZE] for group in groups.values() for i in range(0, len(group), BATCH_SIZE)]
    np.random.default_rng(seed).shuffle(batches)
    return batches


@torch.no_grad()
def write(target, batch, greedy: bool) -> list[tuple[np.ndarray, int]]:
    """Answers as (ids, prompt length), each cut behind its end-of-text token. Finished rows leave the batch."""
    domain, prompt_length = batch[0][0], len(batch[0][1])
    ids = torch.tensor(np.stack([prompt for _, prompt in batch]))
    cache = make_rewindable(DynamicCache(config=target.config), target.config)
    rows, new = [], ids
    for _ in range(MAX_NEW_TOKENS[domain]):
        logits = target(new, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        new = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits.softmax(-1), 1)
        ids = torch.cat([ids, new], dim=1)
        ended = new[:, 0] == target.config.eos_token_id
        if ended.any():
            rows += [(row, prompt_length) for row in ids[ended].numpy()]
            ids, new = ids[~ended], new[~ended]
            if not len(ids):
                break
            cache.batch_select_indices((~ended).nonzero()[:, 0])
    return rows + [(row, prompt_length) for row in ids.numpy()]


def save(rows: list[tuple[np.ndarray, int]], file: Path) -> None:
    offsets = np.cumsum([0, *(len(ids) for ids, _ in rows)])
    mask = np.concatenate([np.arange(len(ids)) >= prompt_length for ids, prompt_length in rows])
    partial = file.with_name(f"{file.stem}.partial.npz")
    np.savez(
        partial, input_ids=np.concatenate([ids for ids, _ in rows]).astype(np.uint16), loss_mask=mask, offsets=offsets
    )
    partial.rename(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=HERE / "build")
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--prompts", type=int, default=5000, help="prompts of every domain")
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--shards", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    (args.build / "texts").mkdir(parents=True, exist_ok=True)
    for split, num_prompts in (("train", args.prompts), ("heldout", 24)):
        batches = make_batches(make_prompts(args.build, split, tokenizer, num_prompts))
        parts = [batches[i : i + BATCHES_PER_PART] for i in range(0, len(batches), BATCHES_PER_PART)]
        mine = range(args.shard, len(parts), args.shards)
        for part in tqdm(mine, desc=f"{split} parts"):
            file = args.build / "texts" / f"{split}-{part:04d}.npz"
            if file.exists():
                continue
            torch.manual_seed(part)
            rows = [row for i, batch in enumerate(parts[part]) for row in write(target, batch, i % 5 < 3)]
            save(rows, file)


if __name__ == "__main__":
    main()
