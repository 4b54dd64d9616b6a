"""Blocks for training: anchors drawn on the target's tokens, many blocks side by side in one drafter forward.

Legend: B batch, T sequence, A anchors, K block (anchor included).
"""

import hashlib
from dataclasses import dataclass

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PreTrainedConfig


@dataclass
class Blocks:
    """Blocks of a batch, laid out one after the other: block token `j` belongs to anchor `j // K`, slot `j % K`.

    Attributes:
        anchors (`(B, A)`): positions; -1 for a block that does not exist.
        input_ids (`(B, A * K)`): the anchor token, then mask tokens.
        position_ids (`(B, T + A * K)`): absolute positions of the context, then of the blocks.
        labels (`(B, A, K - 1)`): the tokens that slots 1..K-1 predict, -100 where there is none.
        teacher_positions (`(B, A, K - 1)`): where the target's head predicts the same token (paper, section 2.3).
    """

    anchors: torch.LongTensor
    input_ids: torch.LongTensor
    position_ids: torch.LongTensor
    labels: torch.LongTensor
    teacher_positions: torch.LongTensor


def anchor_seed(seed: int, step: int, sample_id: int) -> int:
    """Seed of one sample's anchors at one optimizer step: independent of batch, process and history."""
    digest = hashlib.blake2b(f"{seed} {step} {sample_id}".encode(), digest_size=8)
    return int.from_bytes(digest.digest()) >> 1  # 63 bits: torch takes signed 64-bit seeds


def draw_anchors(loss_mask: torch.Tensor, num_anchors: int, seeds: list[int]) -> torch.LongTensor:
    """Up to `num_anchors` anchors a sequence, in order and without repetition.

    As in decoding, where the anchor is the last token that the target chose, an anchor is a supervised token; the next
    token must be supervised too, and a block needs a position of context.

    Args:
        loss_mask (`torch.Tensor` of shape `(B, T)`): 1 for the target's tokens. What is drawn for a row does not
            depend on its padding.
        seeds: one for each row, as `anchor_seed` gives them.

    Returns:
        `torch.LongTensor` of shape `(B, A)`, A at least 1 and at most `num_anchors`; -1 where a row has fewer.
    """
    supervised = loss_mask.bool()
    legal = supervised[:, :-1] & supervised[:, 1:]  # (B, T - 1)
    legal[:, :1] = False  # position 0 has no context
    rows = []
    for row, seed in zip(legal, seeds, strict=True):
        positions = row.nonzero()[:, 0]
        # A generator per row: what one sample draws does not depend on the others of its batch
        order = torch.randperm(len(positions), generator=torch.Generator().manual_seed(seed))
        rows.append(positions[order[:num_anchors]].sort().values)
    # At least one column: DDP needs the drafter's forward in every process, even where no sample has an anchor
    anchors = torch.full((len(rows), max(1, *map(len, rows))), -1)
    for i, row in enumerate(rows):
        anchors[i, : len(row)] = row
    return anchors


def make_blocks(
    input_ids: torch.LongTensor,
    loss_mask: torch.Tensor,
    anchors: torch.LongTensor,
    *,
    block_size: int,
    mask_token_id: int,
    context_length: int | None = None,
) -> Blocks:
    """Lay out one block for every anchor; blocks of anchor -1 have no labels.

    Args:
        input_ids (`(B, T)`), loss_mask (`(B, T)`), anchors (`(B, A)`): as in `draw_anchors`.
        context_length: positions of the context that the blocks will follow, where it is padded to more than T.
    """
    B, T = input_ids.shape
    A, K = anchors.shape[1], block_size
    start = anchors.clamp(min=0)  # a block of anchor -1 reads position 0, and gets no labels
    slots = start.unsqueeze(-1) + torch.arange(K)  # (B, A, K) absolute positions
    # Slots past the end read the last token, and are dropped from the labels below
    ahead = slots[..., 1:].clamp(max=T - 1).flatten(1)
    labels = input_ids.gather(1, ahead).view(B, A, K - 1)
    supervised = loss_mask.bool().gather(1, ahead).view(B, A, K - 1)
    # A slot counts while every token since the anchor is supervised: past a gap there is nothing to draft.
    supervised &= (slots[..., 1:] < T) & (anchors >= 0).unsqueeze(-1)
    supervised = supervised.long().cumprod(-1).bool()
    block_ids = torch.full((B, A, K), mask_token_id)
    block_ids[..., 0] = input_ids.gather(1, start)
    return Blocks(
        anchors=anchors,
        input_ids=block_ids.flatten(1),
        position_ids=torch.cat([torch.arange(context_length or T).expand(B, -1), slots.flatten(1)], dim=1),
        labels=labels.masked_fill(~supervised, -100),
        # The target predicts a token from the position before it
        teacher_positions=(slots[..., 1:] - 1).clamp(max=T - 1),
    )


def previous_ids(blocks: Blocks) -> torch.LongTensor:
    """The true token before each slot's, `(B, A * K)`: the anchor for slot 1, then the labels."""
    B, A, S = blocks.labels.shape
    anchor = blocks.input_ids.view(B, A, S + 1)[..., :1]
    # The anchor's own entry is never read; where a label is missing, any id does
    return torch.cat([anchor, anchor, blocks.labels[..., :-1].clamp(min=0)], dim=-1).flatten(1)


def attention_masks(
    anchors: torch.LongTensor, length: int, config: PreTrainedConfig, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor | BlockMask]:
    """The mask of every layer type of a drafter: a slot sees the context strictly before its block's anchor (within
    the window of a sliding layer) and its own block; never another block.

    Args:
        anchors (`(B, A)`): on the device that the masks are wanted on.
        length: context positions T.
        config: the drafter's; with `flex_attention` the masks are `BlockMask`s, else additive and of shape
            `(B, 1, A * K, T + A * K)`.
    """
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    build = _block_mask if config._attn_implementation == "flex_attention" else _dense_mask
    return {
        layer_type: build(anchors, length, config.block_size, windows[layer_type], dtype)
        for layer_type in sorted(set(config.layer_types))
    }


def _visible(
    anchor: torch.Tensor,
    query_position: torch.Tensor,
    query_block: torch.Tensor,
    key: torch.Tensor,
    length: int,
    block_size: int,
    window: int | None,
) -> torch.Tensor:
    """The rule, for tensors that broadcast; `anchor` is -1 for a block that does not exist."""
    context = (key < length) & (key < anchor)  # never for anchor -1
    if window is not None:
        context = context & (key > query_position - window)
    # A block sees itself in both directions, even one that does not exist, so that every query has a key
    return context | ((key >= length) & ((key - length) // block_size == query_block))


def _dense_mask(
    anchors: torch.LongTensor, length: int, block_size: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    A = anchors.shape[1]
    query = torch.arange(A * block_size, device=anchors.device)  # (A*K,)
    anchor = anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)  # (B, A*K, 1)
    position = anchor + (query % block_size)[:, None]
    key = torch.arange(length + A * block_size, device=anchors.device)  # (T + A*K,)
    visible = _visible(anchor, position, (query // block_size)[:, None], key, length, block_size, window)
    mask = torch.zeros(visible.shape, dtype=dtype, device=anchors.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


def _block_mask(
    anchors: torch.LongTensor, length: int, block_size: int, window: int | None, dtype: torch.dtype
) -> BlockMask:
    B, A = anchors.shape

    def visible(b, h, query, key):
        anchor = anchors[b, query // block_size]
        position = anchor + query % block_size
        return _visible(anchor, position, query // block_size, key, length, block_size, window)

    num_queries = A * block_size
    keys = length + num_queries
    # Compiled, the mask is never held as a dense one
    return create_block_mask(visible, B, None, num_queries, keys, device=anchors.device, _compile=anchors.is_cuda)
