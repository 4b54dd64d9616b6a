"""Documents to batches: length-bucketed, right-padded batches of about the same number of tokens.

Reads what `tokenizer.py` wrote: `build/{train,heldout}-{code,math,chat}.npz` with `input_ids` (all documents joined)
and `offsets` (where each starts, and the total length).
"""

from pathlib import Path

import numpy as np
import torch

DOMAINS = ("code", "math", "chat")
MAX_LENGTH = 512
MAX_PROMPT_LENGTH = 256


def load_documents(build: Path, split: str, domain: str, max_length: int = MAX_LENGTH) -> list[np.ndarray]:
    """All documents of one domain and split, each cut to `max_length` tokens."""
    with np.load(build / f"{split}-{domain}.npz") as file:
        ids, offsets = file["input_ids"], file["offsets"]
    return [part[:max_length].astype(np.int64) for part in np.split(ids, offsets[1:-1])]


def make_batches(documents: list[np.ndarray], tokens_per_batch: int, seed: int) -> list[list[np.ndarray]]:
    """Batches of documents of similar length, at most `tokens_per_batch` padded tokens each, in a seeded order."""
    rng = np.random.default_rng(seed)
    order = sorted(rng.permutation(len(documents)), key=lambda i: len(documents[i]) // 16)
    batches, batch = [], []
    for i in order:
        longest = max([len(documents[i]), *map(len, batch)])
        if batch and longest * (len(batch) + 1) > tokens_per_batch:
            batches.append(batch)
            batch = []
        batch.append(documents[i])
    batches.append(batch)
    rng.shuffle(batches)
    return batches


def pad(batch: list[np.ndarray], pad_token_id: int) -> dict[str, torch.Tensor]:
    """One batch as `input_ids` and `labels` (-100 on padding), each `(B, T)`, padded on the right."""
    length = max(map(len, batch))
    input_ids = torch.full((len(batch), length), pad_token_id)
    labels = torch.full((len(batch), length), -100)
    for row, ids in enumerate(batch):
        input_ids[row, : len(ids)] = labels[row, : len(ids)] = torch.from_numpy(ids)
    return {"input_ids": input_ids, "labels": labels}
