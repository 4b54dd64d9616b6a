"""The loss against a plain one in fp64, at its limits, and how much memory it takes."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from live_memory import LiveMemory
from torch._subclasses.fake_tensor import FakeTensorMode

from hyperdflash.training.losses import drafter_loss, slot_weights
from hyperdflash.training.metrics import slot_sums, summarize

OPTIONS = {"gamma": 4.0, "alpha": 0.2, "temperature": 2.0}


def make_case(num_blocks=6, num_slots=3, num_kl_slots=2, width=8, vocab_size=11, *, scale=1.0, dtype=torch.float32):
    """hidden, labels, lm_head, teacher_hidden; some slots without a label, one block without any."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_blocks, num_slots, width, generator=generator) * scale
    teacher = torch.randn(num_blocks, num_kl_slots, width, generator=generator) * scale
    lm_head = torch.randn(vocab_size, width, generator=generator)
    labels = torch.randint(vocab_size, (num_blocks, num_slots), generator=generator)
    labels[0, 2:] = labels[1, 1:] = labels[2, :] = -100
    return hidden.to(dtype).requires_grad_(), labels, lm_head.to(dtype), teacher.to(dtype)


def naive_loss(hidden, labels, lm_head, teacher, *, gamma, alpha, temperature):
    """The formula of section 2.3 with every logit at once, in the dtype of its inputs, through autograd."""
    num_slots, num_kl_slots = labels.shape[1], teacher.shape[1]
    student, teacher = hidden @ lm_head.T, teacher @ lm_head.T
    ce = weight = 0.0
    for k in range(num_slots):
        valid = labels[:, k] != -100
        w = math.exp(-k / gamma) if gamma else 1.0
        ce = ce - w * student[valid, k].log_softmax(-1).gather(-1, labels[valid, k, None]).sum()
        weight += w * int(valid.sum())
    kl = 0.0
    for k in range(num_kl_slots):
        valid = labels[:, k] != -100
        log_p = (teacher[valid, k] / temperature).log_softmax(-1)
        log_q = (student[valid, k] / temperature).log_softmax(-1)
        kl = kl + (log_p.exp() * (log_p - log_q)).sum() / max(int(valid.sum()), 1)
    kl = kl * temperature**2 / max(num_kl_slots, 1)
    return ce / max(weight, 1e-8) + alpha * kl


def as_double(hidden, labels, lm_head, teacher):
    return hidden.detach().double().requires_grad_(), labels, lm_head.double(), teacher.double()


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 1000])
@pytest.mark.parametrize("options", [OPTIONS, {"gamma": 0.0, "alpha": 1.0, "temperature": 0.5}])
def test_loss_and_gradient_equal_a_float64_reference_for_any_chunk(chunk_size, options):
    case = make_case()
    out = drafter_loss(*case, **options, chunk_size=chunk_size)
    (out.loss * 3).backward()
    reference = as_double(*case)
    expected = naive_loss(*reference, **options)
    (expected * 3).backward()
    assert float(out.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    torch.testing.assert_close(case[0].grad.double(), reference[0].grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize("l1", [0.9, 1.0])
def test_the_distance_to_the_verifier_takes_its_share_of_the_cross_entropy(chunk_size, l1):
    """Loss and gradients, a Markov head's included, against autograd in fp64."""
    case, reference = make_case(), as_double(*make_case())
    generator = torch.Generator().manual_seed(1)
    verifier, states, w2 = (torch.randn(size, generator=generator) for size in ((6, 3, 8), (6, 3, 4), (11, 4)))
    found, expected = (
        [x.detach().clone().to(dtype).requires_grad_() for x in (states, w2)]
        for dtype in (torch.float32, torch.float64)
    )
    out = drafter_loss(
        *case, **OPTIONS, chunk_size=chunk_size, l1=l1, verifier_hidden=verifier,
        markov_states=found[0], markov_w2=found[1],
    )  # fmt: skip
    out.loss.backward()
    hidden, labels, lm_head, teacher = reference
    student = hidden @ lm_head.T + expected[0] @ expected[1].T
    valid = labels != -100
    weights = torch.exp(-torch.arange(3) / OPTIONS["gamma"]).double() * valid
    distance = ((verifier.double() @ lm_head.T).softmax(-1) - student.softmax(-1)).abs().sum(-1)
    ce = -student.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss = (weights * ((1 - l1) * ce + l1 * distance)).sum() / weights.sum()
    log_p, log_q = ((x[:, :2] / 2.0).log_softmax(-1) for x in (teacher @ lm_head.T, student))
    kl = (log_p.exp() * (log_p - log_q)).sum(-1) * valid[:, :2]
    loss = loss + OPTIONS["alpha"] * 4 / 2 * (kl.sum(0) / valid[:, :2].sum(0)).sum()
    loss.backward()
    assert float(out.loss.detach()) == pytest.approx(float(loss.detach()), abs=1e-5)
    for got, want in zip((case[0], *found), (hidden, *expected), strict=True):
        torch.testing.assert_close(got.grad.double(), want.grad, atol=1e-6, rtol=1e-4)


def test_kl_by_hand():
    """Two blocks, P = 2, T = 2: T^2 / P times the sum over slots of the mean over blocks; teacher first.

    https://github.com/neuralmagic/sparseml/pull/592
    """
    lm_head = torch.eye(2)
    teacher = torch.tensor([[[2.0, 0.0], [0.0, 0.0]], [[0.0, 4.0], [0.0, 0.0]]])
    hidden = torch.tensor([[[0.0, 0.0], [2.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]], requires_grad=True)
    labels = torch.zeros(2, 2, dtype=torch.long)

    def kl(p, q):
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    def soft(x):  # softmax of (x, 0) at temperature 2
        return (math.exp(x / 2) / (1 + math.exp(x / 2)), 1 / (1 + math.exp(x / 2)))

    half = (0.5, 0.5)
    first = (kl(soft(2), half) + kl(soft(-4), half)) / 2
    second = (kl(half, soft(2)) + 0) / 2
    expected = 4 / 2 * (first + second)
    assert kl(half, soft(2)) != pytest.approx(kl(soft(2), half))  # the direction shows
    whole = drafter_loss(hidden, labels, lm_head, teacher, gamma=0, alpha=1.0, temperature=2.0)
    ce_only = drafter_loss(hidden, labels, lm_head, teacher, gamma=0, alpha=0.0, temperature=2.0)
    assert float(whole.loss - ce_only.loss) == pytest.approx(expected, abs=1e-5)
    for doubled in (
        drafter_loss(*(x.repeat(2, 1, 1) if x.ndim == 3 else x.repeat(2, 1) for x in (hidden, labels)), lm_head,
                     teacher.repeat(2, 1, 1), gamma=0, alpha=1.0, temperature=2.0),
        drafter_loss(torch.cat([hidden, hidden * 9]), torch.cat([labels, torch.full_like(labels, -100)]), lm_head,
                     torch.cat([teacher, -teacher]), gamma=0, alpha=1.0, temperature=2.0),
    ):  # fmt: skip
        assert float(doubled.loss) == pytest.approx(float(whole.loss), abs=1e-6)


def test_alpha_zero_is_cross_entropy_alone_bit_for_bit():
    """https://github.com/neuralmagic/sparseml/pull/592"""
    hidden, labels, lm_head, teacher = make_case()
    off = drafter_loss(hidden, labels, lm_head, teacher, gamma=4.0, alpha=0.0, temperature=2.0)
    none = drafter_loss(hidden, labels, lm_head, teacher[:, :0], gamma=4.0, alpha=0.2, temperature=2.0)
    assert torch.equal(off.loss, none.loss)
    assert torch.equal(*(torch.autograd.grad(out.loss, hidden)[0] for out in (off, none)))


@pytest.mark.parametrize("temperature", [0.05, 4.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_give_a_finite_loss_near_the_reference(temperature, dtype):
    """Logits in +-80, softened and sharpened; a teacher row that excludes a token altogether.

    https://github.com/MakazhanAlpamys/Soup/issues/719
    """
    generator = torch.Generator().manual_seed(0)
    student = (torch.rand(6, 3, 11, generator=generator) * 160 - 80).to(dtype)
    teacher = (torch.rand(6, 2, 11, generator=generator) * 160 - 80).to(dtype)
    labels = torch.randint(11, (6, 3), generator=generator)
    lm_head = torch.eye(11, dtype=dtype)  # logits are the states themselves
    case = (student.requires_grad_(), labels, lm_head, teacher)
    options = {"gamma": 4.0, "alpha": 0.15, "temperature": temperature}
    out = drafter_loss(*case, **options)
    out.loss.backward()
    expected = float(naive_loss(*as_double(*case), **options))
    assert float(out.loss.detach()) == pytest.approx(expected, rel=1e-3)
    assert torch.isfinite(student.grad).all()

    infinite = lm_head.float().clone()
    excluded = teacher.float().clone()
    excluded[:, :, 3] = -float("inf")
    infinite_case = (student.detach().float().requires_grad_(), labels, infinite, excluded.nan_to_num(neginf=-3e38))
    out = drafter_loss(*infinite_case, **options)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(infinite_case[0].grad).all()


@pytest.mark.parametrize("scale", [1e10, 1e30, 1e38])
def test_loss_and_gradient_are_finite_for_any_finite_state(scale):
    case = make_case(scale=scale)
    out = drafter_loss(*case, gamma=4.0, alpha=0.15, temperature=0.05)
    out.loss.backward()
    assert torch.isfinite(out.loss)
    assert torch.isfinite(case[0].grad).all()


def test_the_head_works_in_its_own_dtype_under_autocast():
    """Accuracy and teacher are those of decoding, where nothing is cast."""
    plain = make_case(scale=5.0)
    mixed = make_case(scale=5.0)
    out = drafter_loss(*plain, **OPTIONS)
    out.loss.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = drafter_loss(*mixed, **OPTIONS)
    cast.loss.backward()
    assert torch.equal(cast.loss, out.loss)
    assert torch.equal(mixed[0].grad, plain[0].grad)


def test_no_valid_slot_gives_a_zero_loss_with_zero_gradients():
    """https://github.com/NVIDIA-NeMo/Automodel/pull/3797"""
    hidden, labels, lm_head, teacher = make_case()
    out = drafter_loss(hidden, torch.full_like(labels, -100), lm_head, teacher, **OPTIONS)
    out.loss.backward()
    assert float(out.loss.detach()) == 0
    assert hidden.grad.abs().sum() == 0


def test_kl_without_a_valid_slot_leaves_the_cross_entropy():
    """https://github.com/microsoft/LMOps/issues/38"""
    hidden, labels, lm_head, teacher = make_case()
    labels[:] = -100
    labels[0, 2] = 5
    out = drafter_loss(hidden, labels, lm_head, teacher, **OPTIONS)
    assert float(out.kl.sum()) == 0
    alone = F.cross_entropy((hidden[0, 2] @ lm_head.T)[None], torch.tensor([5]))
    assert float(out.loss.detach()) == pytest.approx(float(alone.detach()), abs=1e-5)


def test_shares_of_a_window_add_up_to_the_loss_of_the_whole():
    """With the window's counts, micro-batches add: loss and gradient do not depend on the cut."""
    hidden, labels, lm_head, teacher = make_case()
    whole = drafter_loss(hidden, labels, lm_head, teacher, **OPTIONS)
    counts = (labels != -100).sum(0)
    parts = [
        drafter_loss(hidden[rows], labels[rows], lm_head, teacher[rows], **OPTIONS, counts=counts)
        for rows in (slice(0, 1), slice(1, 5), slice(5, 6))
    ]
    assert float(sum(part.loss for part in parts)) == pytest.approx(float(whole.loss), abs=1e-6)
    grads = (
        torch.autograd.grad(sum(part.loss for part in parts), hidden)[0],
        torch.autograd.grad(whole.loss, hidden)[0],
    )
    torch.testing.assert_close(*grads, atol=1e-7, rtol=1e-5)


def test_slot_weights_decay_and_gamma_zero_weighs_all_alike():
    assert slot_weights(3, 0).tolist() == [1, 1, 1]
    assert slot_weights(3, 4.0).tolist() == pytest.approx([1, math.exp(-1 / 4), math.exp(-2 / 4)])


@pytest.mark.parametrize("gamma", [0.0, 0.5, 4.0])
def test_acceptance_figures_are_a_hand_count_whatever_the_weights(gamma):
    """Three blocks of three slots: all right; right, wrong, right; right and cut short.

    https://github.com/verl-project/verl-SpeCo/pull/62
    """
    labels = torch.tensor([[[0, 1, 2], [0, 1, 2], [0, -100, -100]]])
    said = torch.tensor([[0, 1, 2], [0, 3, 2], [0, 1, 2]])
    hidden, lm_head = F.one_hot(said, 4).float(), torch.eye(4)
    out = drafter_loss(hidden, labels[0], lm_head, hidden[:, :2], gamma=gamma, alpha=0.1, temperature=1.0)
    sums = slot_sums(out, labels[0], torch.zeros(3, dtype=torch.long), 1)[0]
    figures = summarize(sums, gamma=gamma, alpha=0.1, temperature=1.0, num_kl_slots=2)
    assert [figures[f"slot_accuracy_{k}"] for k in (1, 2, 3)] == pytest.approx([3 / 3, 1 / 2, 2 / 2])
    assert [figures[f"acceptance_rate_{k}"] for k in (1, 2, 3)] == pytest.approx([1, 1 / 2, 1 / 2])
    assert figures["expected_acceptance_length"] == pytest.approx(1 + 1 + 1 / 2 + 1 / 2)
    assert figures["loss"] == pytest.approx(float(out.loss), abs=1e-6)
    assert figures["kl"] == pytest.approx(0, abs=1e-6)


# ------------------------------------------------------------------------------------------------------------- memory

V4_FLASH = {"num_blocks": 512, "num_slots": 6, "num_kl_slots": 2, "width": 4096, "vocab_size": 129280}
SCALED = {"num_blocks": 64, "num_slots": 6, "num_kl_slots": 2, "width": 64, "vocab_size": 8192}


def tensors(num_blocks, num_slots, num_kl_slots, width, vocab_size, dtype=torch.bfloat16):
    hidden = torch.zeros(num_blocks, num_slots, width, dtype=dtype, requires_grad=True)
    labels = torch.zeros(num_blocks, num_slots, dtype=torch.long)
    return (
        hidden,
        labels,
        torch.zeros(vocab_size, width, dtype=dtype),
        torch.zeros(num_blocks, num_kl_slots, width, dtype=dtype),
    )


def usual_loss(hidden, labels, lm_head, teacher):
    """What one would write: all logits, the library's losses, autograd."""
    student = F.linear(hidden, lm_head).float()
    taught = F.linear(teacher, lm_head).float()
    ce = F.cross_entropy(student.flatten(0, 1), labels.flatten())
    kl = F.kl_div(student[:, :2].log_softmax(-1), taught.log_softmax(-1), log_target=True, reduction="batchmean")
    return ce + 0.15 * kl


def chunked_loss(hidden, labels, lm_head, teacher):
    """At the default's chunks: a twelfth of the slots of 512 anchors."""
    options = {"gamma": 4.0, "alpha": 0.15, "temperature": 1.0, "chunk_size": labels.numel() // 12}
    assert options["chunk_size"] == 256 or len(labels) != 512
    return drafter_loss(hidden, labels, lm_head, teacher, **options).loss


def peak_bytes(loss, case) -> int:
    with LiveMemory() as memory:
        loss(*case).backward()
    return memory.peak


def test_loss_at_v4_flash_shapes_takes_an_eighth_of_the_usual_memory():
    """Counted on fake tensors, which allocate nothing: forward and backward, 512 anchors of a block of 7."""
    with FakeTensorMode():
        usual, chunked = (peak_bytes(loss, tensors(**V4_FLASH)) for loss in (usual_loss, chunked_loss))
    assert usual > 4 * 2**30
    assert chunked * 8 <= usual, f"{chunked / 2**30:.2f} GiB of {usual / 2**30:.2f} GiB"


def test_counted_memory_is_real_memory():
    """The same count on real tensors, scaled down, is what it is on fake ones."""
    real = peak_bytes(chunked_loss, tensors(**SCALED))
    with FakeTensorMode():
        assert peak_bytes(chunked_loss, tensors(**SCALED)) == pytest.approx(real, rel=0.02)
        usual = peak_bytes(usual_loss, tensors(**SCALED))
    assert real < usual


REAL_RUN = """
import re, sys
import test_losses as t

def peak():  # of this process alone; ru_maxrss would start from the parent's
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

loss = getattr(t, sys.argv[1])
loss(*t.tensors(2, 6, 2, 64, 128)).backward()  # what is loaded at the first use
case = t.tensors(**t.MIDDLE)
before = peak()
loss(*case).backward()
print(peak() - before)
"""
MIDDLE = {"num_blocks": 512, "num_slots": 6, "num_kl_slots": 2, "width": 64, "vocab_size": 32768}


@pytest.mark.nightly  # what is counted is tested above, in seconds
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of one process is read from Linux's /proc"
)
def test_a_real_process_grows_by_what_was_counted():
    """Peak resident memory at 512 anchors and a vocabulary of 32,768, within a tenth of the count."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed is given back, not kept in a heap
    for loss in (usual_loss, chunked_loss):
        run = [sys.executable, "-c", REAL_RUN, loss.__name__]
        grown = int(subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout)
        with FakeTensorMode():
            counted = peak_bytes(loss, tensors(**MIDDLE))
        assert grown == pytest.approx(counted, rel=0.1), (loss.__name__, grown, counted)
