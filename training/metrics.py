"""Figures of training and evaluation: sums and counts, divided once at the end.

Legend: B samples, N blocks, S slots.
"""

import torch

from .losses import LossOutput, slot_weights

# Rows of a sums tensor, each with one entry per slot
VALID, CORRECT, REACHED, ACCEPTED, CE, KL = range(6)


def slot_sums(
    output: LossOutput, labels: torch.LongTensor, samples: torch.LongTensor, num_samples: int
) -> torch.Tensor:
    """Sums over the blocks of each sample, `(B, 6, S)` in fp64: valid slots, correct ones, those whose earlier slots
    were all correct, those correct among these, cross-entropy, KL.

    Args:
        output: of `drafter_loss`.
        labels (`(N, S)`): -100 where a slot has no label.
        samples (`(N,)`), num_samples: the sample of each block, below B.
    """
    valid = labels != -100
    accepted = output.correct.long().cumprod(-1).bool()  # (N, S)
    # A slot is reached where all earlier drafts of its block were right
    reached = valid.clone()
    reached[..., 1:] &= accepted[..., :-1]
    # KL has P columns, the other figures S
    kl = torch.zeros_like(output.ce)
    kl[:, : output.kl.shape[1]] = output.kl
    rows = torch.stack((valid, output.correct, reached, accepted, output.ce, kl), dim=1).double()  # (N, 6, S)
    return rows.new_zeros(num_samples, *rows.shape[1:]).index_add_(0, samples, rows)


def summarize(sums: torch.Tensor, *, gamma: float, alpha: float, temperature: float, num_kl_slots: int) -> dict:
    """Figures of `(6, S)` sums.

    `expected_acceptance_length` is 1 plus the sum of cumulative products of the conditional rates: of each slot among
    the blocks whose earlier slots were all right, as in a round of decoding. Slot weights do not matter here.
    """
    sums = sums.double().cpu()
    num_slots = sums.shape[1]
    weights = slot_weights(num_slots, gamma).double()
    ce = float((weights * sums[CE]).sum() / (weights * sums[VALID]).sum().clamp(min=1e-8))
    by_slot = (sums[KL] / sums[VALID].clamp(min=1))[:num_kl_slots]
    kl = float(temperature**2 * by_slot.sum() / max(len(by_slot), 1))
    # Conditional rates first, so that blocks cut short by the end of a text count in the slots that they have
    rates = (sums[ACCEPTED] / sums[REACHED].clamp(min=1)).cumprod(0)
    accuracy = sums[CORRECT] / sums[VALID].clamp(min=1)
    return {
        "loss": ce + alpha * kl,
        "ce": ce,
        "kl": kl,
        "expected_acceptance_length": 1 + float(rates.sum()),
        **{f"slot_accuracy_{k + 1}": float(value) for k, value in enumerate(accuracy)},
        **{f"acceptance_rate_{k + 1}": float(value) for k, value in enumerate(rates)},
    }


def figure_names(num_slots: int) -> list[str]:
    """The names that `summarize` gives to a drafter's figures."""
    sums = torch.zeros(6, num_slots)
    return list(summarize(sums, gamma=0.0, alpha=0.0, temperature=1.0, num_kl_slots=0))
