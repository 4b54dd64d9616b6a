"""Speculative sampling draws from exactly the distribution that plain sampling draws from.

Two kinds of target: a real DeepSeek-V4, whose joint distribution of a few new tokens is computed exactly, and a table
of next-token probabilities behind the target's interface, fast enough for thousands of tokens a case. Seeds are fixed;
a case fails when a chi-square test gives its counts a probability below 1 in 10,000.
"""

import functools
import itertools
import math

import pytest
import torch
from tiny_v4 import (
    CSA,
    HCA,
    SLIDING,
    ScriptedDrafter,
    nightly,
    random_ids,
    tiny_config,
    tiny_drafter,
    tiny_drafter_config,
    tiny_dspark,
    tiny_target,
)
from transformers import DeepseekV4ForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    EpsilonLogitsWarper,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from hyperdflash.generation.dspark import DeepseekV4DSpark
from hyperdflash.generation.mtp import DeepseekV4MTP
from hyperdflash.generation_hyperdflash import _Loop

V = 5
LEAST = 1e-4


# -------------------------------------------------------------------------------------------------------- statistics


def p_value(groups) -> float:
    """Chi-square probability of `(counts, probabilities)` groups; cells of fewer than 5 expected counts are merged."""
    statistic, dof = 0.0, 0
    for counts, probs in groups:
        counts, expected = counts.double().flatten(), probs.double().flatten() * counts.sum()
        assert not counts[expected < 1e-9].any(), "a token of probability zero was drawn"
        small = expected < 5
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        kept = expected > 0
        statistic += float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
        dof += int(kept.sum()) - 1
    assert dof > 0
    return float(torch.special.gammaincc(torch.tensor(dof / 2).double(), torch.tensor(statistic / 2).double()))


def chain_p_values(ids: torch.LongTensor, transition: torch.Tensor) -> tuple[float, float]:
    """Of all transitions of a chain `(T,)`, and of its disjoint triples given their first token."""
    pairs = torch.zeros(V, V).index_put((ids[:-1], ids[1:]), torch.tensor(1.0), accumulate=True)
    first, second, third = ids[: len(ids) // 3 * 3].view(-1, 3).unbind(1)
    triples = torch.zeros(V, V, V).index_put((first, second, third), torch.tensor(1.0), accumulate=True)
    joint = transition[:, :, None] * transition[None]
    return (
        p_value((pairs[a], transition[a]) for a in range(V) if pairs[a].sum() >= 20),
        p_value((triples[a], joint[a]) for a in range(V) if triples[a].sum() >= 20),
    )


def test_the_chi_square_test_knows_right_from_wrong():
    """By hand: 4 degrees of freedom and a statistic of 9.4877 are a probability of 5%."""
    probs = torch.full((5,), 0.2)
    gap = math.sqrt(9.4877 * 20 / 2)
    assert p_value([(torch.tensor([20 + gap, 20 - gap, 20, 20, 20]), probs)]) == pytest.approx(0.05, abs=1e-4)
    draws = torch.multinomial(probs, 5000, True, generator=torch.Generator().manual_seed(0))
    assert p_value([(draws.bincount(minlength=5), probs)]) > LEAST
    assert p_value([(draws.bincount(minlength=5), torch.tensor([0.23, 0.21, 0.2, 0.19, 0.17]))]) < LEAST


# ------------------------------------------------------------------------------------------------------ table target


class TableTarget(DeepseekV4ForCausalLM):
    """Next-token logits are the last token's row of a table `(V, V)`. Cache and hc_head see every position."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, logits_to_keep=0, **kwargs):
        zeros = torch.zeros(1, input_ids.shape[1], self.config.hc_mult, self.config.hidden_size)
        keys = zeros[:, None, :, 0, : self.config.head_dim]
        cache.layers[0].update(keys, keys)
        self.model.hc_head(zeros)
        logits = self.table[input_ids]
        return MoeCausalLMOutputWithPast(logits=logits[:, -logits_to_keep:], cache=cache)


@functools.cache
def table_target():
    torch.manual_seed(0)
    target = TableTarget(tiny_config((SLIDING,), vocab_size=V, max_position_embeddings=10**5)).eval()
    target.table = 1.3 * torch.randn(V, V)
    return target


class TableDrafter(ScriptedDrafter):
    """Draft logits of slot k are row `(k, anchor)` of `tables`; every `skips`-th block proposes half as many."""

    def draft(self, request):
        num_drafts = request.num_drafts
        self.rounds += 1
        if self.skips and self.rounds % self.skips == 0:
            num_drafts //= 2
        return self.tables[:num_drafts, int(request.noise_ids[0, 0])]


def table_drafter(target, kind, *, block_size=4, skips=0):
    """`right`: the target's own probabilities, each slot's given the anchor alone. `wrong`: on its least likely token.
    `random`: another table. `point`: always token 1."""
    torch.manual_seed(1)
    drafter = TableDrafter(tiny_drafter_config(target, block_size=block_size)).eval()
    transition = target.table.softmax(-1)
    powers = torch.stack([torch.linalg.matrix_power(transition, k + 1) for k in range(block_size - 1)])
    drafter.tables = {
        "right": powers.log(),
        "wrong": 8.0 * torch.nn.functional.one_hot(transition.argmin(-1), V).float().expand(block_size - 1, V, V),
        "random": 1.3 * torch.randn(block_size - 1, V, V, generator=torch.Generator().manual_seed(2)),
        "point": torch.log(torch.nn.functional.one_hot(torch.tensor(1), V).float()).expand(block_size - 1, V, V),
    }[kind]
    drafter.rounds, drafter.skips = 0, skips
    return drafter


class BansNext(LogitsProcessor):
    """Looks at the prefix: forbids the token that follows the last one in the alphabet, and prefers token 0."""

    def __call__(self, input_ids, scores):
        scores = scores + 0.7 * (torch.arange(V) == 0)
        return scores.index_fill(1, (input_ids[0, -1:] + 1) % V, -float("inf"))


FILTERS = {
    "none": ({"top_k": 0}, []),
    "top-k": ({"top_k": 3}, [TopKLogitsWarper(3)]),
    "top-p": ({"top_k": 0, "top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "cold top-k and top-p": (
        {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4), TopPLogitsWarper(0.9)],
    ),
    "hot min-p": (
        {"temperature": 1.8, "top_k": 0, "min_p": 0.2},
        [TemperatureLogitsWarper(1.8), MinPLogitsWarper(0.2)],
    ),
    "typical": ({"top_k": 0, "typical_p": 0.7}, [TypicalLogitsWarper(0.7)]),
    "epsilon": ({"top_k": 0, "epsilon_cutoff": 0.15}, [EpsilonLogitsWarper(0.15)]),
}
OTHERS = [name for name in FILTERS if name not in ("none", "cold top-k and top-p")]


def exact_transition(target, warpers, *, bans=False):
    """Row a: plain sampling's probabilities after token a."""
    scores = target.table.clone()
    if bans:  # a user's processor comes before the filters
        scores = torch.cat([BansNext()(torch.tensor([[a]]), scores[a : a + 1]) for a in range(V)])
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(-1)


def chain(target, num_tokens, seed, **kwargs):
    """One long sampled sequence, its first token included."""
    torch.manual_seed(seed)
    return target.generate(torch.tensor([[2]]), do_sample=True, max_new_tokens=num_tokens, **kwargs)


def assert_chain_of(transition, ids):
    pairs, triples = chain_p_values(ids, transition)
    assert pairs > LEAST
    assert triples > LEAST


@pytest.mark.slow
@pytest.mark.parametrize("name", FILTERS)
def test_plain_sampling_passes_the_same_test(name):
    """The exact probabilities that the cases below compare with are plain sampling's."""
    options, warpers = FILTERS[name]
    ids = chain(table_target(), 1500, 0, **options)[0]
    assert_chain_of(exact_transition(table_target(), warpers), ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", [nightly("none"), "cold top-k and top-p"])
def test_a_markov_head_and_a_confidence_head_keep_the_distribution(name):
    """What is accepted against is the biased and filtered distribution that the drafts were drawn from."""
    options, warpers = FILTERS[name]
    target = table_target()
    heads = {"draft_head": "markov", "markov_rank": 4, "draft_confidence": True, "verify_cost": 0.1}
    drafter = tiny_drafter(target, **heads)
    for weight in (drafter.markov_head.markov_w1, drafter.markov_head.markov_w2, drafter.confidence_head.proj.weight):
        torch.nn.init.normal_(weight)
    out = chain(target, 1200, 4, assistant_model=drafter, return_dict_in_generate=True, **options)
    assert len(set(out.speculation.num_drafts)) > 1
    assert 1.2 < out.speculation.acceptance_length < 3
    assert_chain_of(exact_transition(target, warpers), out.sequences[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cold top-k and top-p", nightly("none")])
def test_the_native_mtp_module_keeps_the_distribution(name):
    options, warpers = FILTERS[name]
    target = table_target()
    torch.manual_seed(3)
    mtp = DeepseekV4MTP(target.config, max_drafts=2).eval()
    torch.nn.init.normal_(target.lm_head.weight)  # the table's logits do not pass through it, the drafts' do
    out = chain(target, 1000, 5, assistant_model=mtp, return_dict_in_generate=True, **options)
    assert 1.2 < out.speculation.acceptance_length < 2.8
    assert_chain_of(exact_transition(target, warpers), out.sequences[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "verify_cost"), [nightly("cold top-k and top-p", None), ("none", 0.3), nightly("none", None)]
)
def test_a_dspark_module_keeps_the_distribution(name, verify_cost, monkeypatch):
    """Also when its confidence head, which reads the drafts before a slot, decides whether the slot is drafted."""
    monkeypatch.setattr(DeepseekV4DSpark, "tapped_layer_ids", None)  # a table runs no layers
    options, warpers = FILTERS[name]
    target = table_target()
    dspark = tiny_dspark(target, block_size=3, num_stages=1)
    dspark.verify_cost = verify_cost
    for weight in (target.lm_head.weight, *dspark.markov_head.parameters(), *dspark.confidence_head.parameters()):
        torch.nn.init.normal_(weight)
    out = chain(target, 900, 6, assistant_model=dspark, return_dict_in_generate=True, **options)
    if verify_cost is not None:  # in the middle of the text
        assert len(set(out.speculation.num_drafts[:-3])) > 1
    assert 1.2 < out.speculation.acceptance_length < 3.5
    assert_chain_of(exact_transition(target, warpers), out.sequences[0])


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("none", "cold top-k and top-p") for kind in ("right", "wrong", "random")]
    + [pytest.param(name, "wrong", marks=pytest.mark.slow) for name in OTHERS]
    + [nightly(name, kind) for name in OTHERS for kind in ("right", "random")],
)
def test_sampled_chain_has_the_targets_transitions(name, kind):
    """Filters apply to target and drafts alike; single tokens and triples across block edges come out right.

    https://github.com/huggingface/transformers/issues/32867
    """
    options, warpers = FILTERS[name]
    target = table_target()
    drafter = table_drafter(target, kind)
    ids = chain(target, 2000, 1, assistant_model=drafter, **options)[0]
    assert len(ids) == 2001
    assert_chain_of(exact_transition(target, warpers), ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("none", "wrong"), ("cold top-k and top-p", "wrong"), ("cold top-k and top-p", "random")]
    + [nightly("none", "right"), nightly("none", "random"), nightly("cold top-k and top-p", "right")],
)
def test_processor_that_looks_at_the_prefix_keeps_the_distribution(name, kind):
    """The target's probabilities are processed, the drafts' are not. https://github.com/ml-explore/mlx-lm/issues/1175"""
    options, warpers = FILTERS[name]
    target = table_target()
    ids = chain(
        target,
        2000,
        3,
        assistant_model=table_drafter(target, kind),
        logits_processor=LogitsProcessorList([BansNext()]),
        **options,
    )[0]
    assert_chain_of(exact_transition(target, warpers, bans=True), ids)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 9])
def test_short_long_and_shrinking_blocks_keep_the_distribution(block_size):
    """Also when every third block proposes fewer drafts, or none."""
    target = table_target()
    for skips in (0, 3):
        drafter = table_drafter(target, "random", block_size=block_size, skips=skips)
        ids = chain(target, 2000, 3, assistant_model=drafter, top_k=0)[0]
        assert_chain_of(exact_transition(target, []), ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", nightly("top-k"), "cold top-k and top-p"])
def test_drafts_are_accepted_as_often_as_they_can_be(name):
    """The first draft is accepted with probability sum(min(p, q)): a test that rejects more is slow, not lossy."""
    options, warpers = FILTERS[name]
    target = table_target()
    transition = exact_transition(target, warpers)
    for kind in ("right", "random", "wrong"):
        drafter = table_drafter(target, kind)
        drafter.config.verification = "token"  # a block keeps more than the overlap of its first slot
        q = drafter.tables[0].clone()
        for warper in warpers:
            q = warper(None, q)
        ideal = torch.minimum(transition, q.softmax(-1)).sum(-1)
        own, anchors = drafter.draft, []

        def draft(request, own=own, anchors=anchors):
            anchors.append(int(request.noise_ids[0, 0]))
            return own(request)

        drafter.draft = draft
        out = chain(target, 1500, 4, assistant_model=drafter, return_dict_in_generate=True, **options)
        expected = ideal[anchors]
        rounds = len(out.speculation.num_accepted)
        accepted = sum(n >= 1 for n in out.speculation.num_accepted)
        assert rounds == len(anchors)
        deviation = math.sqrt(float((expected * (1 - expected)).clamp(min=0).sum()) + 1e-3)
        assert abs(accepted - float(expected.sum())) < 4 * deviation + 0.5, kind
        if kind == "right":
            assert accepted == rounds


@pytest.mark.slow
def test_point_mass_drafter_does_not_bias_a_coin():
    """Probabilities 0.6 and 0.4, every draft is token 1: 5,000 tokens hold 40% of it, within three standard errors.

    https://github.com/huggingface/transformers/issues/32867
    """
    torch.manual_seed(0)
    target = TableTarget(tiny_config((SLIDING,), vocab_size=V, max_position_embeddings=10**5)).eval()
    target.table = torch.tensor([0.6, 0.4, 0.0, 0.0, 0.0]).log().expand(V, V).clone()
    drafter = table_drafter(target, "point")
    out = chain(target, 5000, 5, assistant_model=drafter, top_k=0, return_dict_in_generate=True)
    new = out.sequences[0, 1:]
    assert set(new.tolist()) == {0, 1}
    assert abs(float((new == 1).float().mean()) - 0.4) < 3 * math.sqrt(0.6 * 0.4 / 5000)
    assert out.speculation.per_position_acceptance_rates[0] == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drafts_are_drawn_and_judged_with_the_same_float32_probabilities(dtype, monkeypatch):
    """Of a bf16 drafter too, after temperature and filters; every drawn token has positive mass.

    https://github.com/deepseek-ai/DeepSpec/issues/31
    """
    drawn, judged, logits = [], [], []
    choose, accept = _Loop.choose_drafts, _Loop.accept

    def spy_choose(self, draft_logits):
        drafts = choose(self, draft_logits)
        drawn.append((draft_logits, drafts.clone(), self.draft_probs[-1]))  # `drafts` lies in the loop's buffer of ids
        return drafts

    def spy_accept(self, outputs, drafts, draft_probs, first=False):
        if drafts is not None and len(drafts):
            judged.append((drafts.clone(), draft_probs))
        return accept(self, outputs, drafts, draft_probs, first)

    monkeypatch.setattr(_Loop, "choose_drafts", spy_choose)
    monkeypatch.setattr(_Loop, "accept", spy_accept)
    target = tiny_target((SLIDING, SLIDING), vocab_size=V)
    drafter = tiny_drafter(target).to(dtype)
    own = drafter.draft
    drafter.draft = lambda *args: logits.append(own(*args)) or logits[-1]
    torch.manual_seed(0)
    prompt = random_ids(4, vocab_size=V)
    target.generate(prompt, do_sample=True, temperature=0.6, top_k=3, max_new_tokens=60, assistant_model=drafter)
    assert len(drawn) == len(judged) == len(logits) > 15
    for (seen, drafts, probs), (judged_drafts, judged_probs), draft_logits in zip(drawn, judged, logits, strict=True):
        assert torch.equal(judged_drafts, drafts)
        assert torch.equal(judged_probs, probs)
        assert seen.dtype == probs.dtype == draft_logits.dtype == torch.float32
        want = TopKLogitsWarper(3)(None, TemperatureLogitsWarper(0.6)(None, draft_logits)).softmax(-1)
        torch.testing.assert_close(probs, want, atol=1e-6, rtol=0)
        assert (probs[range(len(drafts)), drafts] > 0).all()
        assert ((probs > 0).sum(-1) == 3).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, nightly(torch.float32)])
def test_chain_with_a_real_drafters_drafts(dtype):
    """Drafts from the network itself, in both precisions. https://github.com/deepseek-ai/DeepSpec/issues/31"""
    target = table_target()
    drafter = tiny_drafter(target).to(dtype)
    ids = chain(target, 1500, 6, assistant_model=drafter, top_k=0)[0]
    assert_chain_of(exact_transition(target, []), ids)


# ------------------------------------------------------------------------------------------------------- real target


@functools.cache
def small_target():
    """Four tokens, compressed layers of both kinds, probabilities that depend on the whole prefix."""
    target = tiny_target((CSA, HCA), vocab_size=4, seed=3)
    with torch.no_grad():
        target.lm_head.weight.mul_(2.0)
    return target


def exact_joint(target, prompt, warpers):
    """Probabilities of new tokens 2 to 4 `(4, 4, 4)`, summed over the first, by teacher forcing all continuations."""
    continuations = torch.tensor(list(itertools.product(range(4), repeat=4)))
    sequences = torch.cat([prompt.expand(len(continuations), -1), continuations], dim=1)
    with torch.no_grad():
        logits = torch.cat([target(part).logits for part in sequences.split(64)])[:, prompt.shape[1] - 1 : -1]
    scores = logits.flatten(0, 1).float()
    for warper in warpers:
        scores = warper(None, scores)
    probs = scores.softmax(-1).view(-1, 4, 4).gather(-1, continuations[..., None])[..., 0].prod(-1)
    assert float(probs.sum()) == pytest.approx(1, abs=1e-4)
    return probs.view(4, 4, 4, 4).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("none", "right"), nightly("top-k", "wrong"), nightly("top-p", "random")])
def test_joint_distribution_of_three_tokens_is_the_targets(name, kind):
    """Three hundred seeded calls on a real DeepSeek-V4; after the first token a block of three drafts is judged.

    https://github.com/huggingface/transformers/issues/32867
    """
    options, warpers = FILTERS[name]
    target, prompt = small_target(), random_ids(6, vocab_size=4)
    joint = exact_joint(target, prompt, warpers)
    assert 0.02 < float(joint.max()) < 0.6
    torch.manual_seed(1)
    drafter = ScriptedDrafter(tiny_drafter_config(target)).eval()
    fixed = {"random": 1.5 * torch.randn(3, 4), "wrong": torch.tensor([0.0, 4.0, 0.0, 0.0]).expand(3, 4)}
    with torch.no_grad():
        after = {a: target(torch.cat([prompt, torch.tensor([[a]])], 1)).logits[0, -1:].float() for a in range(4)}

    def draft(request):
        if kind != "right":
            return fixed[kind][: request.num_drafts]
        # Right at slot 1 of the first block, any guess behind it.
        return torch.cat([after[int(request.noise_ids[0, 0])], fixed["random"]])[: request.num_drafts]

    drafter.draft = draft
    counts = torch.zeros(4, 4, 4)
    torch.manual_seed(7)
    num_accepted = []
    for _ in range(300):
        out = target.generate(
            prompt,
            do_sample=True,
            max_new_tokens=5,
            assistant_model=drafter,
            return_dict_in_generate=True,
            **options,
        )
        counts[tuple(out.sequences[0, 7:10].tolist())] += 1
        num_accepted.append(out.speculation.num_accepted[0])
    assert set(num_accepted) >= ({1, 2, 3} if kind == "right" else {0, 1})  # every branch was taken
    assert p_value([(counts, joint)]) > LEAST
