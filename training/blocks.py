"""Blocks for training: anchors drawn on supervised tokens, many blocks side by side in one drafter forward.

Legend: B batch, T sequence, A anchors, K block (anchor included).
"""

from dataclasses import dataclass

import torch


@dataclass
class Blocks:
    """Blocks of a batch, laid out one after the other: block token `j` belongs to anchor `j // K`, slot `j % K`.

    Attributes:
        input_ids (`(B, A * K)`): the anchor token, then mask tokens.
        position_ids (`(B, T + A * K)`): absolute positions of the context, then of the blocks.
        attention_mask (`(B, 1, A * K, T + A * K)`, additive): a slot sees the context strictly before its anchor,
        within
            the window, and its own block.
        labels (`(B, A, K - 1)`): the tokens that slots 1..K-1 predict, -100 where there is none.
        teacher_positions (`(B, A, K - 1)`): where the target's head predicts the same token (paper, section 2.3).
    """

    input_ids: torch.LongTensor
    position_ids: torch.LongTensor
    attention_mask: torch.Tensor
    labels: torch.LongTensor
    teacher_positions: torch.LongTensor


def draw_anchors(loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator) -> torch.LongTensor:
    """Up to `num_anchors` anchors a sequence, without repetition, among positions whose next token is supervised.

    Args:
        loss_mask (`torch.BoolTensor` of shape `(B, T)`): tokens that count as targets.

    Returns:
        `torch.LongTensor` of shape `(B, A)`; -1 where a sequence has fewer legal anchors.
    """
    legal = torch.zeros_like(loss_mask, dtype=torch.bool)
    legal[:, :-1] = loss_mask[:, 1:].bool()
    legal[:, 0] = False  # a block needs at least one position of context
    scores = torch.rand(legal.shape, generator=generator).masked_fill(~legal, -1)
    values, anchors = scores.topk(min(num_anchors, legal.shape[1]), dim=1)
    return anchors.masked_fill(values < 0, -1)


def make_blocks(input_ids, loss_mask, anchors, *, block_size: int, mask_token_id: int, window: int | None) -> Blocks:
    """Lay out one block for every anchor; blocks of anchor -1 have no labels.

    Args:
        input_ids (`(B, T)`), loss_mask (`(B, T)`), anchors (`(B, A)`): as in `draw_anchors`.
        window (`int`, *optional*): the drafter's sliding window; None for full attention.
    """
    B, T = input_ids.shape
    A, K = anchors.shape[1], block_size
    valid, anchors = anchors >= 0, anchors.clamp(min=0)
    slots = anchors.unsqueeze(-1) + torch.arange(K)  # (B, A, K) absolute positions
    inside = slots[..., 1:] < T
    labels = input_ids.gather(1, slots[..., 1:].clamp(max=T - 1).flatten(1)).view(B, A, K - 1)
    supervised = loss_mask.bool().gather(1, slots[..., 1:].clamp(max=T - 1).flatten(1)).view(B, A, K - 1)
    # A slot counts while every token since the anchor is supervised: behind a gap there is nothing to draft.
    supervised = (supervised & inside & valid.unsqueeze(-1)).long().cumprod(-1).bool()

    block_ids = torch.full((B, A, K), mask_token_id)
    block_ids[..., 0] = input_ids.gather(1, anchors)
    positions = slots.flatten(1)
    context = torch.arange(T).expand(B, T)
    sees_context = context[:, None, :] < anchors.repeat_interleave(K, dim=1).unsqueeze(-1)  # (B, A*K, T)
    if window is not None:
        sees_context &= context[:, None, :] > positions.unsqueeze(-1) - window
    owner = torch.arange(A * K) // K
    sees_block = (owner[:, None] == owner[None]).expand(B, -1, -1)
    visible = torch.cat([sees_context, sees_block], dim=-1)
    mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    return Blocks(
        input_ids=block_ids.flatten(1),
        position_ids=torch.cat([context, positions], dim=1),
        attention_mask=mask.unsqueeze(1),
        labels=labels.masked_fill(~supervised, -100),
        teacher_positions=(slots[..., 1:] - 1).clamp(max=T - 1),
    )
