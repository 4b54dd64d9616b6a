"""300 seeded cases, two thirds of them nightly: assisted greedy decoding gives plain decoding's ids and cache.

One case: `python -m pytest tests/test_lossless_fuzz.py -k "seed-17"`.
"""

import functools
import random

import pytest
import torch
from tiny_v4 import (
    ALWAYS,
    CSA,
    HCA,
    SLIDING,
    assert_same_state,
    greedy,
    nightly,
    random_ids,
    scripted_drafter,
    tiny_drafter,
    tiny_target,
)
from transformers import DynamicCache

NUM_CASES = 300

# Layers, window, compression rates of CSA and HCA: each type alone and mixed, windows shorter and longer than the
# rates and than a block.
POOL = (
    ((SLIDING,), 2, 4, 8),
    ((SLIDING, SLIDING), 5, 4, 8),
    ((CSA,), 2, 2, 8),
    ((CSA, CSA), 8, 4, 8),
    ((CSA,), 12, 5, 8),
    ((HCA,), 3, 4, 4),
    ((HCA, HCA), 8, 4, 8),
    ((HCA,), 6, 4, 16),
    ((SLIDING, CSA, HCA), 8, 4, 8),
    ((HCA, CSA), 4, 2, 5),
    ((CSA, SLIDING, HCA), 11, 3, 6),
    ((HCA, SLIDING), 7, 4, 3),
)
PROCESSORS = ({}, {}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2})


@functools.cache
def pooled_target(index):
    layer_types, window, csa, hca = POOL[index]
    return tiny_target(layer_types, seed=index, window=window, csa=csa, hca=hca)


def random_pattern(rng, block_size):
    """How many leading drafts are right, by round: all, none, the first j, no drafts at all, or a mix of these."""
    kind = rng.choice(["always", "never", "first", "empty", "mix", "mix", "mix"])
    j = rng.randrange(block_size)
    if kind == "mix":
        rounds = [
            rng.choice([ALWAYS, 0, None, rng.randrange(block_size), rng.randrange(block_size)]) for _ in range(64)
        ]
        return lambda r: rounds[r]
    return {"always": ALWAYS, "never": 0, "first": j, "empty": None}[kind]


CASES = [seed if seed < NUM_CASES // 3 else nightly(seed) for seed in range(NUM_CASES)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", CASES, ids=lambda seed: f"seed-{seed}-")
def test_assisted_greedy_decoding_is_plain_greedy_decoding(seed):
    """Same ids, and the returned cache is that of a forward over all ids but the last.

    https://github.com/huggingface/transformers/issues/30413 https://github.com/huggingface/transformers/pull/45643
    """
    rng = random.Random(seed)
    target = pooled_target(seed % len(POOL))
    block_size, max_new_tokens = rng.randint(2, 9), rng.randint(1, 40)
    prompt = random_ids(rng.choice([rng.randint(1, 12), rng.randint(1, 60)]), seed=seed)
    options = rng.choice(PROCESSORS)
    plain = greedy(target, prompt, max_new_tokens, **options)
    want = plain
    if rng.random() < 0.5:
        new_ids = plain[0, prompt.shape[1] :].tolist()
        eos = rng.choice(new_ids)
        want = plain[:, : prompt.shape[1] + new_ids.index(eos) + 1]
        options = {**options, "eos_token_id": rng.choice([eos, [63, eos]]) if 63 not in new_ids else eos}
    if rng.random() < 0.15:  # the drafter's own drafts
        drafter = tiny_drafter(target, block_size=block_size)
    else:
        drafter = scripted_drafter(target, plain, random_pattern(rng, block_size), block_size=block_size)
    if rng.random() < 0.3:
        options = {**options, "num_assistant_tokens": rng.randint(0, block_size - 1)}
    got = greedy(target, prompt, max_new_tokens, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert got.sequences.tolist() == want.tolist()
    fresh = DynamicCache(config=target.config)
    if want.shape[1] > 1:
        with torch.no_grad():
            target(want[:, :-1], cache=fresh, use_cache=True)
    assert_same_state(got.cache, fresh)
