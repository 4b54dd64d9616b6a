"""Block verification, by enumeration: every path of drafts, every place where the kept prefix may end.

.venv/bin/python -m pytest tests/test_block_verification.py
"""

from itertools import product

import pytest
import torch
from tiny_v4 import greedy, nightly, random_ids, tiny_drafter, tiny_target

from hyperdflash.generation_hyperdflash import block_verification

V = 3
DRAFTS = 3


def random_tables(generator, sharpness: float, num: int) -> dict[tuple, torch.Tensor]:
    """A distribution over V tokens after each prefix of at most `num` tokens, fp64."""
    prefixes = [p for n in range(num + 1) for p in product(range(V), repeat=n)]
    rows = sharpness * torch.randn(len(prefixes), V, generator=generator, dtype=torch.float64)
    return dict(zip(prefixes, rows.softmax(-1), strict=True))


def joint_law(p: dict, q: dict, num_drafts) -> torch.Tensor:
    """Of the first DRAFTS + 1 tokens of one round and plain decoding after it, `(V,) * (DRAFTS + 1)`.

    `num_drafts(drafts)` says how many drafts are proposed, given the drafts before.
    """
    law = torch.zeros((V,) * (DRAFTS + 1), dtype=torch.float64)
    for drafts in product(range(V), repeat=DRAFTS):
        n = num_drafts(drafts)
        drawn = torch.stack([q[drafts[:i]][drafts[i]] for i in range(DRAFTS)]).prod()
        if n == 0:
            ends = [(1.0, 0, p[()])]
        else:
            rows_p = torch.stack([p[drafts[:i]] for i in range(n + 1)])
            rows_q = torch.stack([q[drafts[:i]] for i in range(n)])
            chances, weights = block_verification(rows_p, rows_q, torch.tensor(drafts[:n]))
            ends, later = [(chances[-1], n, rows_p[n])], 1 - chances[-1]
            for i in range(n - 1, -1, -1):  # the last success counts, so the later ones failed
                rest = (weights[i] * rows_p[i] - rows_q[i]).clamp(min=0)
                chance = chances[i - 1] if i else 1.0
                own = rest / rest.sum() if rest.sum() > 0 else rows_p[i]
                ends.append((later * chance, i, own))
                later = later * (1 - chance)
        for weight, kept, own in ends:
            for token in range(V):
                begun = (*drafts[:kept], token)
                for tail in product(range(V), repeat=DRAFTS + 1 - len(begun)):
                    path, chance = begun, drawn * weight * own[token]
                    for following in tail:
                        chance = chance * p[path][following]
                        path = (*path, following)
                    law[path] += chance
    return law


def target_law(p: dict) -> torch.Tensor:
    law = torch.zeros((V,) * (DRAFTS + 1), dtype=torch.float64)
    for path in product(range(V), repeat=DRAFTS + 1):
        law[path] = torch.stack([p[path[:i]][path[i]] for i in range(DRAFTS + 1)]).prod()
    return law


def independent(q: dict) -> dict:
    """Each slot's distribution given nothing of the drafts before it."""
    return {prefix: q[(0,) * len(prefix)] for prefix in q}


def one_hot(q: dict) -> dict:
    return {prefix: torch.nn.functional.one_hot(row.argmax(), V).double() for prefix, row in q.items()}


@pytest.mark.slow
@pytest.mark.parametrize("sharpness", [0.3, 4.0, nightly(1.0)])
@pytest.mark.parametrize("kind", ["sequential", "independent", "one-hot", "the target's own"])
@pytest.mark.parametrize("number", ["all", "two", "one", "by the first draft", "none after token 0"])
def test_the_joint_law_of_a_rounds_tokens_is_the_targets(kind, sharpness, number):
    generator = torch.Generator().manual_seed(0)
    counts = {
        "all": lambda drafts: 3,
        "two": lambda drafts: 2,
        "one": lambda drafts: 1,
        "by the first draft": lambda drafts: 1 + drafts[0],  # whether slots 2 and 3 are used depends on draft 1
        "none after token 0": lambda drafts: 1 if drafts[0] == 0 else 3,
    }
    for _ in range(2):
        p = random_tables(generator, 1.0, DRAFTS)
        q = random_tables(generator, sharpness, DRAFTS)
        q = {"independent": independent(q), "one-hot": one_hot(q), "the target's own": p}.get(kind, q)
        torch.testing.assert_close(joint_law(p, q, counts[number]), target_law(p), rtol=0, atol=1e-9)


def test_a_number_of_drafts_that_depends_on_the_last_of_them_is_not_exact():
    """Why `propose` must not decide on a draft by its own token: the enumeration notices."""
    generator = torch.Generator().manual_seed(0)
    p, q = random_tables(generator, 1.0, DRAFTS), random_tables(generator, 1.0, DRAFTS)
    law = joint_law(p, q, lambda drafts: 3 if drafts[2] else 2)
    assert (law - target_law(p)).abs().max() > 0.005


def kept(p: dict, q: dict, by_block: bool) -> float:
    """The expected number of drafts kept."""
    total = 0.0
    for drafts in product(range(V), repeat=DRAFTS):
        drawn = torch.stack([q[drafts[:i]][drafts[i]] for i in range(DRAFTS)]).prod()
        rows_p = torch.stack([p[drafts[:i]] for i in range(DRAFTS + 1)])
        rows_q = torch.stack([q[drafts[:i]] for i in range(DRAFTS)])
        if by_block:
            chances, _ = block_verification(rows_p, rows_q, torch.tensor(drafts))
            fail = (1 - chances).flip(0).cumprod(0).flip(0)  # that i and all later ones fail
            total += float(drawn * (1 - fail).sum())
        else:
            ratio = (rows_p[range(DRAFTS), drafts] / rows_q[range(DRAFTS), drafts]).clamp(max=1)
            total += float(drawn * ratio.cumprod(0).sum())
    return total


def test_a_block_keeps_more_drafts_than_token_by_token_and_as_many_of_one_hot_ones():
    generator = torch.Generator().manual_seed(1)
    gains = []
    for _ in range(20):
        p, q = random_tables(generator, 1.0, DRAFTS), random_tables(generator, 1.0, DRAFTS)
        gains.append(kept(p, q, True) - kept(p, q, False))
        assert kept(p, one_hot(q), True) == pytest.approx(kept(p, one_hot(q), False), abs=1e-12)
    assert min(gains) > -1e-12
    assert sum(gains) / len(gains) > 0.03


def test_one_draft_is_judged_as_by_token_verification():
    p, q = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]]), torch.tensor([[0.5, 0.4, 0.1]])
    for draft, chance in ((0, 0.4), (1, 1.0), (2, 1.0)):
        chances, weights = block_verification(p, q, torch.tensor([draft]))
        assert chances.tolist() == pytest.approx([chance])
        assert weights.tolist() == pytest.approx([1.0, chance])


def test_greedy_ids_and_rounds_do_not_depend_on_the_verification():
    target, prompt = tiny_target(), random_ids(9)
    outputs = []
    for verification in ("block", "token"):
        drafter = tiny_drafter(target, verification=verification)
        outputs.append(greedy(target, prompt, 24, assistant_model=drafter, return_dict_in_generate=True))
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    assert outputs[0].speculation == outputs[1].speculation
