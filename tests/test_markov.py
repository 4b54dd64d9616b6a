"""The heads on top of a block: the Markov head biases a slot's logits by the token chosen before it, in training as in
decoding; the confidence head decides how many drafts are verified, and changes nothing else."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_v4 import greedy, random_ids, tiny_drafter, tiny_target

from hyperdflash.generation_hyperdflash import num_worth_verifying
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.blocks import make_blocks, previous_ids
from hyperdflash.training.losses import LossOutput, confidence_loss, drafter_loss, slot_weights


def markov_drafter(target, *, gate=False, std=1.0, **kwargs) -> HyperDFlashModel:
    """A random drafter whose bias decides as much as its logits."""
    drafter = tiny_drafter(target, draft_head="markov", markov_rank=8, markov_gate=gate, **kwargs)
    torch.nn.init.normal_(drafter.markov_head.markov_w1, std=std)
    torch.nn.init.normal_(drafter.markov_head.markov_w2, std=std)
    return drafter


def test_a_new_head_changes_no_logit():
    target = tiny_target()
    drafter = tiny_drafter(target, draft_head="markov", markov_rank=8)
    hidden = torch.randn(3, target.config.hidden_size)
    head = drafter.markov_head
    assert not head.bias(head.states(torch.tensor([1, 2, 3]), hidden)).any()
    assert drafter.markov_head.markov_w1.any()


@pytest.mark.parametrize("gate", [False, True])
def test_the_bias_is_low_rank_and_weighed_by_the_gate(gate):
    drafter = markov_drafter(tiny_target(), gate=gate)
    head, hidden = drafter.markov_head, torch.randn(2, 32)
    row = head.markov_w1[[5, 9]]
    if gate:
        row = row * torch.sigmoid(hidden @ head.gate.weight.T + head.gate.bias)
    states = head.states(torch.tensor([5, 9]), hidden)
    torch.testing.assert_close(states, row)
    torch.testing.assert_close(head.bias(states), row @ head.markov_w2.T)


def test_previous_ids_are_the_anchor_and_then_the_labels():
    ids = torch.tensor([[10, 11, 12, 13, 14, 15]])
    blocks = make_blocks(ids, torch.ones_like(ids), torch.tensor([[1, 3]]), block_size=4, mask_token_id=63)
    assert blocks.labels.tolist() == [[[12, 13, 14], [14, 15, -100]]]
    assert previous_ids(blocks).tolist() == [[11, 11, 12, 13, 13, 13, 14, 15]]


@pytest.mark.parametrize("chunk_size", [3, 1000])
def test_the_loss_and_all_its_gradients_are_autograds(chunk_size):
    torch.manual_seed(0)
    N, S, D, V, R, P = 5, 3, 8, 11, 4, 2
    leaves = [torch.randn(N, S, D), torch.randn(N, S, R), torch.randn(V, R)]
    hidden, states, w2 = (x.requires_grad_() for x in leaves)
    lm_head, teacher = torch.randn(V, D), torch.randn(N, P, D)
    labels = torch.randint(V, (N, S))
    labels[1, 1:] = labels[4] = -100
    options = {"gamma": 4.0, "alpha": 0.3, "temperature": 2.0}
    ours = drafter_loss(
        hidden, labels, lm_head, teacher, **options, chunk_size=chunk_size, markov_states=states, markov_w2=w2
    )
    got = torch.autograd.grad(ours.loss * 3, (hidden, states, w2))

    logits, valid = hidden @ lm_head.T + states @ w2.T, labels != -100
    ce = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    weights = slot_weights(S, 4.0)
    loss = (ce * weights).sum() / (weights * valid.sum(0)).sum()
    p, q = (teacher @ lm_head.T / 2).log_softmax(-1), (logits[:, :P] / 2).log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1) * valid[:, :P]
    loss = loss + 0.3 * 4 / P * (kl.sum(0) / valid[:, :P].sum(0)).sum()
    torch.testing.assert_close(ours.loss, loss)
    for a, b in zip(got, torch.autograd.grad(loss * 3, (hidden, states, w2)), strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(ours.correct, (logits.argmax(-1) == labels) & valid)


@torch.no_grad()
@pytest.mark.parametrize("gate", [False, True])
def test_decoding_chooses_what_training_scores(gate, monkeypatch):
    """Each draft is the most likely token of the logits that training sees with the drafts before it as labels."""
    target = tiny_target()
    drafter = markov_drafter(target, gate=gate, block_size=6)
    rounds, own = [], drafter.propose

    def recording(request, choose):
        drafts = []

        def choose_and_keep(logits):
            drafts.append(choose(logits))
            return drafts[-1]

        own(request, choose_and_keep)
        rounds.append((request.ids.clone(), torch.cat(drafts).clone(), request.noise_ids.clone()))

    monkeypatch.setattr(drafter, "propose", recording)
    greedy(target, random_ids(9), 20, assistant_model=drafter)
    assert len(rounds) > 5
    for ids, drafts, noise_ids in rounds:
        with ResidualTap(target) as tap:
            target(ids[:, :-1], use_cache=False)
            residual = tap.take()
        anchor = noise_ids[:, :1]
        previous = torch.cat([anchor, anchor, drafts[None]], dim=1)[:, : noise_ids.shape[1]]
        previous = F.pad(previous, (0, noise_ids.shape[1] - previous.shape[1]))
        out = drafter(target.model.embed_tokens(noise_ids), residual, previous_ids=previous)
        logits = target.lm_head(out.last_hidden_state) + out.markov_states @ drafter.markov_head.markov_w2.T
        assert logits[0, 1 : 1 + len(drafts)].argmax(-1).tolist() == drafts.tolist()


@pytest.mark.parametrize(("confidence", "wanted"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_drafting_waits_for_the_device_once_a_round_at_most(monkeypatch, confidence, wanted, do_sample):
    """A value that reaches Python is what an accelerator would be waited for."""
    target = tiny_target()
    drafter = markov_drafter(target, block_size=7, draft_confidence=confidence, verify_cost=0)
    waits, own = [], drafter.propose

    def counting(method):
        def call(tensor, *args):
            waits[-1] += 1
            return method(tensor, *args)

        return call

    def watched(*args):
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__index__", "__float__"):
                patch.setattr(torch.Tensor, name, counting(getattr(torch.Tensor, name)))
            waits.append(0)
            own(*args)

    monkeypatch.setattr(drafter, "propose", watched)
    torch.manual_seed(0)
    target.generate(
        random_ids(9), assistant_model=drafter, max_new_tokens=20, do_sample=do_sample, eos_token_id=None, top_p=0.9
    )
    assert len(waits) > 2
    assert set(waits[:-1]) == {wanted}


@pytest.mark.slow
@pytest.mark.parametrize("gate", [False, True])
def test_greedy_ids_are_plain_decodings(gate):
    target = tiny_target()
    drafter = markov_drafter(target, gate=gate)
    for length in (1, 7, 8, 20):
        prompt = random_ids(length, seed=length)
        want = greedy(target, prompt, 24)
        assert greedy(target, prompt, 24, assistant_model=drafter).tolist() == want.tolist()


def test_a_checkpoint_from_before_the_heads_has_none_of_their_tensors_and_drafts_as_it_did(tmp_path):
    target = tiny_target()
    plain = tiny_drafter(target)
    plain.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("draft_head", "markov_rank", "markov_gate", "draft_confidence", "verify_cost"):
        del config[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not any("markov" in name or "confidence" in name for name in load_file(tmp_path / "model.safetensors"))
    loaded = HyperDFlashModel.from_pretrained(tmp_path).eval()
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    runs = [target.generate(random_ids(9), assistant_model=drafter, **options) for drafter in (plain, loaded)]
    assert runs[0].sequences.tolist() == runs[1].sequences.tolist()
    assert vars(runs[0].speculation) == vars(runs[1].speculation)


def test_previous_ids_without_a_head_are_refused():
    drafter = tiny_drafter(tiny_target())
    with pytest.raises(ValueError, match="previous_ids are for draft_head 'markov', and this is 'none'"):
        drafter(torch.randn(1, 2, 32), torch.randn(1, 3, 2, 32), previous_ids=torch.tensor([[1, 1]]))


def test_a_head_on_a_frozen_drafter_is_trained_alone():
    torch.manual_seed(0)
    hidden, lm_head, labels = torch.randn(5, 3, 8), torch.randn(11, 8), torch.randint(11, (5, 3))
    states, w2 = torch.randn(5, 3, 4).requires_grad_(), torch.randn(11, 4).requires_grad_()
    options = {"gamma": 4.0, "alpha": 0.0, "temperature": 1.0, "markov_states": states, "markov_w2": w2}
    loss = drafter_loss(hidden, labels, lm_head, hidden[:, :0], **options).loss
    got = torch.autograd.grad(loss, (states, w2))
    logits, weights = hidden @ lm_head.T + states @ w2.T, slot_weights(3, 4.0)
    ce = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * weights
    for a, b in zip(got, torch.autograd.grad(ce.sum() / (weights.sum() * 5), (states, w2)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_saved_head_is_loaded_with_the_drafter(tmp_path):
    drafter = markov_drafter(tiny_target(), gate=True)
    drafter.save_pretrained(tmp_path)
    loaded = HyperDFlashModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in drafter.state_dict().items())


# ---------------------------------------------------------------------------------------------------------- confidence


@pytest.mark.parametrize(
    ("rates", "cost", "want"),
    [
        ([0.9, 0.9, 0.9], 0.0, 3),  # verifying costs nothing
        ([0.9, 0.0, 0.9], 0.0, 3),  # a draft that cannot be accepted costs nothing either
        ([0.0, 0.0, 0.0], 0.5, 1),  # one is drafted at least
        ([0.5, 0.6, 0.4], 0.2, 2),  # 0.3 * 1.2 >= 0.2 * 1.5, then 0.12 * 1.4 < 0.2 * 1.8
        ([0.5, 0.1, 1.0], 0.2, 1),
    ],
)
def test_a_draft_is_made_while_it_raises_the_expected_tokens_a_second(rates, cost, want):
    assert num_worth_verifying(rates, cost) == want
    throughput = [
        (1 + sum(torch.tensor(rates[:n]).cumprod(0).tolist())) / (1 + cost * n) for n in range(1, len(rates) + 1)
    ]
    assert all(a <= b for a, b in zip(throughput[:want], throughput[1:want], strict=False))


def test_overlap_is_the_probability_that_a_sampled_draft_is_accepted():
    torch.manual_seed(0)
    hidden, verifier, lm_head = torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.randn(11, 8)
    states, w2 = torch.randn(3, 2, 4), torch.randn(11, 4)
    labels = torch.randint(11, (3, 2))
    labels[2, 1] = -100
    output = drafter_loss(
        hidden,
        labels,
        lm_head,
        hidden[:, :0],
        gamma=4,
        alpha=0,
        temperature=1,
        chunk_size=2,
        markov_states=states,
        markov_w2=w2,
        verifier_hidden=verifier,
    )
    p, q = (verifier @ lm_head.T).softmax(-1), (hidden @ lm_head.T + states @ w2.T).softmax(-1)
    torch.testing.assert_close(output.overlap, torch.minimum(p, q).sum(-1) * (labels != -100))


def test_confidence_is_learned_where_a_slot_is_reached():
    """Greedy: where all earlier slots are right; sampled: by the probability that all earlier drafts are accepted."""
    logits = torch.tensor([[[0.0], [1.0], [-1.0]], [[2.0], [0.5], [3.0]]]).repeat(1, 1, 2).requires_grad_()
    correct = torch.tensor([[True, False, True], [False, True, True]])
    overlap = torch.tensor([[0.4, 0.25, 1.0], [0.8, 0.6, 0.0]])
    labels = torch.tensor([[5, 5, 5], [5, 5, -100]])
    output = LossOutput(None, None, None, correct, overlap)
    loss = confidence_loss(logits, output, labels, 4)

    def bce(logit, rate):
        return rate * math.log1p(math.exp(-logit)) + (1 - rate) * math.log1p(math.exp(logit))

    greedy = bce(0, 1) + bce(1, 0) + bce(2, 0)
    sampled = bce(0, 0.4) + 0.4 * bce(1, 0.25) + 0.1 * bce(-1, 1) + bce(2, 0.8) + 0.8 * bce(0.5, 0.6)
    assert float(loss.detach()) == pytest.approx((greedy + sampled) / 4)
    (grad,) = torch.autograd.grad(loss, logits)
    assert (grad[..., 0] != 0).tolist() == [[True, True, False], [True, False, False]]
    assert (grad[..., 1] != 0).tolist() == [[True, True, True], [True, True, False]]


def test_the_confidence_head_teaches_the_drafter_nothing():
    target = tiny_target()
    drafter = markov_drafter(target, draft_confidence=True)
    residual, ids = torch.randn(1, 5, 2, 32), torch.randint(60, (1, 4))
    out = drafter(torch.randn(1, 4, 32), residual, previous_ids=ids)
    out.confidence_logits.sum().backward()
    learned = {name for name, p in drafter.named_parameters() if p.grad is not None}
    assert learned == {"confidence_head.proj.weight", "confidence_head.proj.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("head", ["none", "markov"])
def test_confidence_changes_how_many_drafts_are_made_and_no_token(head):
    target = tiny_target()
    drafter = tiny_drafter(
        target, block_size=7, draft_head=head, markov_rank=8, draft_confidence=True, verify_cost=0.1
    )
    torch.nn.init.normal_(drafter.confidence_head.proj.weight, std=1.0)
    numbers = set()
    for length in (1, 8, 20):
        prompt = random_ids(length, seed=length)
        out = greedy(target, prompt, 40, assistant_model=drafter, return_dict_in_generate=True)
        assert out.sequences.tolist() == greedy(target, prompt, 40).tolist()
        numbers |= set(out.speculation.num_drafts)
    assert len(numbers) > 2


def test_greedy_decoding_and_sampling_ask_different_outputs():
    target = tiny_target()
    drafter = markov_drafter(target, draft_confidence=True, verify_cost=0.5)
    with torch.no_grad():
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.copy_(torch.tensor([-20.0, 20.0]))
    prompt = random_ids(8)
    numbers = []
    for do_sample in (False, True):
        out = target.generate(
            prompt, assistant_model=drafter, do_sample=do_sample, max_new_tokens=20, return_dict_in_generate=True
        )
        numbers.append(set(out.speculation.num_drafts[:-1]))
    assert numbers == [{1}, {3}]


@pytest.mark.parametrize("cost", [-1, float("nan")])
def test_a_cost_set_later_is_checked_before_any_work(cost):
    target = tiny_target()
    drafter = markov_drafter(target, draft_confidence=True)
    drafter.config.verify_cost = cost
    with pytest.raises(ValueError, match=f"verify_cost.*{cost}"):
        greedy(target, random_ids(5), 8, assistant_model=drafter)
