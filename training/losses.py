"""The paper's loss: cross-entropy on every slot plus KL to the target on the first ones (section 2.3)."""

import torch
import torch.nn.functional as F


def slot_weights(num_slots: int, gamma: float) -> torch.Tensor:
    """`w_k = exp(-(k - 1) / gamma)` for slots 1..num_slots; `gamma` 0 weighs all alike."""
    slots = torch.arange(num_slots, dtype=torch.float32)
    return torch.exp(-slots / gamma) if gamma else torch.ones(num_slots)


def drafter_loss(
    student, teacher, labels, *, gamma: float, alpha: float, temperature: float, num_kl_slots: int
) -> dict:
    """`L = CE + alpha * KL` with exact denominators.

    Args:
        student (`torch.Tensor` of shape `(N, S, V)`): draft logits of slots 1..S of N blocks.
        teacher (`torch.Tensor` of shape `(N, num_kl_slots, V)`): the target's logits for the same tokens.
        labels (`torch.LongTensor` of shape `(N, S)`): -100 where a slot has no label.
        gamma, alpha, temperature: slot decay, weight of the KL term, and T_KD.

    Returns:
        `dict`: `loss`, `ce`, `kl`, and by slot `num_correct` and `num_valid` (sums and counts, `(S,)`).
    """
    num_kl_slots = min(num_kl_slots, labels.shape[1])
    valid = labels != -100
    weights = slot_weights(labels.shape[1], gamma).to(student.device) * valid
    ce = F.cross_entropy(student.float().flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    ce = (ce * weights).sum() / weights.sum().clamp(min=1e-8)
    kl = student.new_zeros((), dtype=torch.float32)
    for k in range(num_kl_slots):
        p = F.log_softmax(teacher[:, k].float() / temperature, dim=-1)
        q = F.log_softmax(student[:, k].float() / temperature, dim=-1)
        by_block = F.kl_div(q, p, log_target=True, reduction="none").sum(-1) * valid[:, k]
        kl = kl + by_block.sum() / valid[:, k].sum().clamp(min=1)
    kl = kl * temperature**2 / max(num_kl_slots, 1)
    with torch.no_grad():
        correct = (student.argmax(-1) == labels) & valid
    return {
        "loss": ce + alpha * kl,
        "ce": ce.detach(),
        "kl": kl.detach(),
        "num_correct": correct.sum(0),
        "num_valid": valid.sum(0),
    }
