"""The paper's loss: cross-entropy on every slot plus KL to the target on the first ones (section 2.3).

The logits of all slots never exist at once: the LM head, both terms and their gradients are computed for a few slots
at a time, during the forward. That is possible because the loss is a plain sum over slots, and every slot's share is
known beforehand (`counts`).

Legend: N blocks, S slots that predict, P slots with KL, D hidden, V vocabulary, R rank of the Markov head.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# Larger states and logits are clamped: no sum overflows, and no difference of infinities becomes NaN
STATE_LIMIT, LOGIT_LIMIT = 1e15, 1e30


class LossOutput(NamedTuple):
    """Attributes:
    loss (`torch.Tensor`, scalar): the share of these blocks in the loss; carries the gradient.
    ce (`(N, S)`), kl (`(N, P)`): by slot, unweighted, 0 where a slot has no label.
    correct (`(N, S)`, bool): the most likely token is the label.
    overlap (`(N, S)`, or None): with `verifier_hidden`, the probability `sum min(p, q)` that a sampled draft is
        accepted.
    """

    loss: torch.Tensor
    ce: torch.Tensor
    kl: torch.Tensor
    correct: torch.Tensor
    overlap: torch.Tensor | None = None


def slot_weights(num_slots: int, gamma: float, device: torch.device | None = None) -> torch.Tensor:
    """`w_k = exp(-(k - 1) / gamma)` for slots 1..num_slots; `gamma` 0 weighs all alike."""
    slots = torch.arange(num_slots, dtype=torch.float32, device=device)
    return torch.exp(-slots / gamma) if gamma else torch.ones_like(slots)


def drafter_loss(
    hidden: torch.Tensor,
    labels: torch.LongTensor,
    lm_head: torch.Tensor,
    teacher_hidden: torch.Tensor,
    *,
    gamma: float,
    alpha: float,
    temperature: float,
    counts: torch.Tensor | None = None,
    chunk_size: int = 256,
    markov_states: torch.Tensor | None = None,
    markov_w2: torch.Tensor | None = None,
    verifier_hidden: torch.Tensor | None = None,
    l1: float = 0.0,
) -> LossOutput:
    """`(1 - l1) * CE + l1 * L1 + alpha * KL` with exact denominators.

    `CE = sum w_k ce / sum w_k counts_k` and `KL = T^2 / P * sum_k (sum kl_k / counts_k)`, the teacher first:
    `KL(p_k || q_k)`, both softened by `T`. `L1` has the weights of `CE`, and the distance `sum |p - q|` of the
    probabilities of drafter and verifier. Finite, with a finite gradient, for any finite input.

    Args:
        hidden (`(N, S, D)`): the drafter's output for the slots that predict.
        labels (`(N, S)`): -100 where a slot has no label.
        lm_head (`(V, D)`): the target's, frozen.
        teacher_hidden (`(N, P, D)`): normed states of the target that predict the same tokens as the first P slots.
        gamma, alpha, temperature: decay of the slot weights, weight of the KL term, and T_KD.
        counts (`(S,)`, *optional*): valid slots of the whole accumulation window in all processes, which make the loss
            a share of that window's; by default those of `labels`.
        chunk_size: slots whose logits exist at the same time.
        markov_states (`(N, S, R)`, *optional*), markov_w2 (`(V, R)`): a Markov head's, whose bias both terms see; they
            get gradients too.
        verifier_hidden (`(N, S, D)`, *optional*): normed states of the target that predict the same tokens as all
            slots, for `overlap` and `l1`.
        l1: the share of the cross-entropy that the distance takes (DSpark, arXiv 2607.05147: 0.9).
    """
    num_slots, num_kl_slots = labels.shape[1], teacher_hidden.shape[1]
    if counts is None:
        counts = (labels != -100).sum(0)
    counts = counts.to(hidden.device, torch.float32)
    weights = slot_weights(num_slots, gamma, hidden.device)  # made there: a copy would wait for the device
    ce_scale = weights / (weights * counts).sum().clamp(min=1e-8)  # (S,)
    # T^2 makes up for softening, which divides the gradient by it (Hinton et al., 2015)
    kl_scale = alpha * temperature**2 / max(num_kl_slots, 1) / counts[:num_kl_slots].clamp(min=1)  # (P,)
    # Saves the teacher's logits
    if alpha == 0:
        teacher_hidden = teacher_hidden[:, :0]
    learned = [x for x in (hidden, markov_states, markov_w2) if x is not None]
    fixed = _Fixed(
        labels=labels,
        lm_head=lm_head,
        teacher_hidden=teacher_hidden,
        verifier_hidden=verifier_hidden,
        ce_scale=(1 - l1) * ce_scale,
        l1_scale=l1 * ce_scale if l1 else None,
        kl_scale=kl_scale,
        temperature=temperature,
        blocks_per_chunk=max(1, chunk_size // num_slots),
        needs_grad=torch.is_grad_enabled() and any(x.requires_grad for x in learned),
    )
    with torch.autocast(hidden.device.type, enabled=False):  # the head works in its own dtype, as in decoding
        return LossOutput(*_HeadLoss.apply(hidden, markov_states, markov_w2, fixed))


def confidence_loss(
    logits: torch.Tensor, output: LossOutput, labels: torch.LongTensor, count: torch.Tensor | int
) -> torch.Tensor:
    """Binary cross-entropy of the estimated acceptances, greedy and sampled, each over the slots that it would reach.

    A greedy draft is accepted where it is the label, a sampled one with the probability `overlap`.

    Args:
        logits (`(N, S, 2)`): of the confidence head.
        output: of `drafter_loss` with `verifier_hidden`.
        labels (`(..., S)`): -100 where a slot has no label.
        count: what the sum is divided by, of the whole window: valid slots.
    """
    rates = torch.stack([output.correct.float(), output.overlap], dim=-1)
    reached = (labels != -100).view(output.correct.shape).unsqueeze(-1).repeat(1, 1, 2).float()
    # With the probability that decoding gets to the slot: all before it are accepted
    reached[:, 1:] *= rates[:, :-1].cumprod(1)
    loss = F.binary_cross_entropy_with_logits(logits.float(), rates, reduction="none")
    return (loss * reached).sum() / torch.as_tensor(count).clamp(min=1)


class _Fixed(NamedTuple):
    """Inputs of the loss that get no gradient; shapes as in `drafter_loss`."""

    labels: torch.LongTensor
    lm_head: torch.Tensor
    teacher_hidden: torch.Tensor
    verifier_hidden: torch.Tensor | None
    ce_scale: torch.Tensor  # (S,): what one slot's cross-entropy counts in the loss
    l1_scale: torch.Tensor | None  # (S,): what one slot's distance counts
    kl_scale: torch.Tensor  # (P,): what one slot's KL counts
    temperature: float
    blocks_per_chunk: int
    needs_grad: bool


class _HeadLoss(torch.autograd.Function):
    """Loss and its gradients by `hidden` and the Markov head, in one pass over chunks of blocks.

    Autograd would keep the logits of all slots until the backward. Here each chunk's gradient is computed while its
    logits exist, and the backward only scales it.
    """

    @staticmethod
    def forward(
        ctx,
        hidden: torch.Tensor,  # (N, S, D)
        markov_states: torch.Tensor | None,  # (N, S, R)
        markov_w2: torch.Tensor | None,  # (V, R)
        fixed: _Fixed,
    ) -> tuple[torch.Tensor | None, ...]:
        labels, lm_head, temperature = fixed.labels, fixed.lm_head, fixed.temperature
        (N, S), P = labels.shape, fixed.teacher_hidden.shape[1]
        ce, kl = fixed.ce_scale.new_zeros(N, S), fixed.ce_scale.new_zeros(N, P)
        correct = torch.zeros_like(labels, dtype=torch.bool)
        overlap = ce.new_zeros(ce.shape) if fixed.verifier_hidden is not None else None
        grad, grad_states, grad_w2 = (
            torch.zeros_like(x) if fixed.needs_grad and x is not None else None
            for x in (hidden, markov_states, markov_w2)
        )
        w2 = markov_w2.to(lm_head.dtype) if markov_w2 is not None else None
        for start in range(0, N, fixed.blocks_per_chunk):
            rows = slice(start, start + fixed.blocks_per_chunk)
            # 1. Logits of the chunk, with the Markov head's bias: (n, S, V)
            valid = labels[rows] != -100
            logits = _logits(hidden[rows], lm_head)
            if w2 is not None:
                logits += _logits(markov_states[rows], w2)
            # 2. Cross-entropy. The softmax is kept unnormalised: its buffer becomes the gradient's below
            target = labels[rows].clamp(min=0).unsqueeze(-1)  # -100 is not an index; `valid` drops those slots
            highest, choice = logits.max(-1)
            softmax = (logits - highest.unsqueeze(-1)).exp_()
            total = softmax.sum(-1)
            ce[rows] = (highest + total.log() - logits.gather(-1, target)[..., 0]) * valid
            correct[rows] = (choice == target[..., 0]) & valid
            if overlap is not None:
                verifier = _logits(fixed.verifier_hidden[rows], lm_head).softmax(-1)
                overlap[rows] = torch.minimum(verifier, softmax / total.unsqueeze(-1)).sum(-1) * valid
            # 3. KL(p || q) of the first P slots, both softened
            if P:
                log_p = (_logits(fixed.teacher_hidden[rows], lm_head) / temperature).log_softmax(-1)
                log_q = (logits[:, :P] / temperature).log_softmax(-1)
                p = log_p.exp()
                kl[rows] = (log_p.sub_(log_q).mul_(p)).sum(-1) * valid[:, :P]
            # 4. The gradient: q - one_hot(label) of the cross-entropy, (q - p) / T of the KL, and the distance's, by
            # logits, then by what the logits came from
            if fixed.needs_grad:
                grad_logits = softmax.div_(total.unsqueeze(-1))
                if fixed.l1_scale is not None:
                    # L1 is 2 (1 - overlap), and the overlap grows with q where q is below p
                    pulled = grad_logits * (grad_logits < verifier)
                    grad_l1 = 2 * (grad_logits * pulled.sum(-1, keepdim=True) - pulled)
                    grad_l1 *= (fixed.l1_scale * valid).unsqueeze(-1)
                grad_logits.scatter_add_(-1, target, -torch.ones_like(target, dtype=logits.dtype))
                grad_logits *= (fixed.ce_scale * valid).unsqueeze(-1)
                if fixed.l1_scale is not None:
                    grad_logits += grad_l1
                if P:
                    scale = (fixed.kl_scale / temperature * valid[:, :P]).unsqueeze(-1)
                    grad_logits[:, :P] += log_q.exp_().sub_(p).mul_(scale)
                grad_logits = grad_logits.to(lm_head.dtype)
                grad[rows] = grad_logits @ lm_head
                if w2 is not None:
                    grad_states[rows] = grad_logits @ w2
                    grad_w2 += grad_logits.flatten(0, 1).T @ markov_states[rows].to(lm_head.dtype).flatten(0, 1)
        loss = (ce * fixed.ce_scale).sum() + (kl * fixed.kl_scale[:P]).sum()
        if fixed.l1_scale is not None:
            loss += (2 * (1 - overlap) * (labels != -100) * fixed.l1_scale).sum()
        ctx.save_for_backward(grad, grad_states, grad_w2)
        ctx.mark_non_differentiable(ce, kl, correct, *([] if overlap is None else [overlap]))
        return loss, ce, kl, correct, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss: torch.Tensor, *_) -> tuple[torch.Tensor | None, ...]:
        # Stored for a loss of 1: the factors of GradScaler and of the processes arrive here
        grads = [None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors]
        return *grads, None


def _logits(hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """`(..., D)` -> `(..., V)` in fp32."""
    states = hidden.clamp(-STATE_LIMIT, STATE_LIMIT).to(lm_head.dtype)
    return F.linear(states, lm_head).float().clamp_(-LOGIT_LIMIT, LOGIT_LIMIT)
