"""Blocks for training: anchors drawn on the target's tokens, many blocks side by side in one drafter forward.

The trainer packs a batch: the contexts of all samples one after the other, then all their blocks, as one sequence
without padding and without blocks that have no label. A slot sees its own sample alone.

Legend: B batch, T sequence, A anchors, K block (anchor included), S slots that predict (K - 1, or K where the anchor
predicts too), N blocks of all samples, C context positions of all samples.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

FLEX_BLOCK = 128  # positions: flex attention works on tiles of this size


@dataclass
class Blocks:
    """Blocks of a batch, laid out one after the other: block token `j` belongs to anchor `j // K`, slot `j % K`.

    Attributes:
        anchors (`(B, A)`): positions; -1 for a block that does not exist.
        input_ids (`(B, A * K)`): the anchor token, then mask tokens.
        position_ids (`(B, T + A * K)`): absolute positions of the context, then of the blocks.
        labels (`(B, A, S)`): the tokens behind the anchor, which the last S slots predict, -100 where there is none.
        teacher_positions (`(B, A, S)`): where the target's head predicts the same token (paper, section 2.3).
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
    num_labels: int | None = None,
) -> Blocks:
    """Lay out one block for every anchor; blocks of anchor -1 have no labels.

    Args:
        input_ids (`(B, T)`), loss_mask (`(B, T)`), anchors (`(B, A)`): as in `draw_anchors`.
        num_labels (`int`, *optional*): S, by default every slot but the anchor's. With as many as the block has slots,
            the anchor's predicts the token behind it.
    """
    B, T = input_ids.shape
    A, K = anchors.shape[1], block_size
    S = K - 1 if num_labels is None else num_labels
    start = anchors.clamp(min=0)  # a block of anchor -1 reads position 0, and gets no labels
    slots = start.unsqueeze(-1) + torch.arange(K)  # (B, A, K) absolute positions
    predicted = start.unsqueeze(-1) + torch.arange(1, S + 1)  # (B, A, S)
    # Slots past the end read the last token, and are dropped from the labels below
    ahead = predicted.clamp(max=T - 1).flatten(1)
    labels = input_ids.gather(1, ahead).view(B, A, S)
    supervised = loss_mask.bool().gather(1, ahead).view(B, A, S)
    # A slot counts while every token since the anchor is supervised: past a gap there is nothing to draft.
    supervised &= (predicted < T) & (anchors >= 0).unsqueeze(-1)
    supervised = supervised.long().cumprod(-1).bool()
    block_ids = torch.full((B, A, K), mask_token_id)
    block_ids[..., 0] = input_ids.gather(1, start)
    return Blocks(
        anchors=anchors,
        input_ids=block_ids.flatten(1),
        position_ids=torch.cat([torch.arange(T).expand(B, -1), slots.flatten(1)], dim=1),
        labels=labels.masked_fill(~supervised, -100),
        # The target predicts a token from the position before it
        teacher_positions=(predicted - 1).clamp(max=T - 1),
    )


def previous_ids(blocks: "Blocks | PackedBlocks") -> torch.Tensor:
    """The true token before the one that a slot predicts, as `input_ids`: the anchor, then the labels."""
    *shape, S = blocks.labels.shape
    by_block = blocks.input_ids.view(*shape, -1)  # (..., K)
    # An anchor that predicts nothing has an entry that is never read; where a label is missing, any id does
    anchor = by_block[..., :1].expand(*shape, by_block.shape[-1] - S + 1)
    ids = torch.cat([anchor, blocks.labels[..., :-1].clamp(min=0)], dim=-1)
    return ids.view_as(blocks.input_ids)


# -------------------------------------------------------------------------------------------------------- one sequence


@dataclass
class PackedBlocks:
    """The blocks of a batch that have labels, and the context that they see, as one sequence.

    Attributes:
        anchors (`(N,)`): positions in the block's own sample; -1 for padding.
        samples (`(N,)`): the block's sample, as an index in the batch.
        input_ids (`(1, N * K)`): as in `Blocks`.
        position_ids (`(1, C + N * K)`): positions in the sample, of the context and of the blocks.
        context_samples (`(C,)`): the sample of each position of the context; -1 for padding.
        labels (`(N, S)`), teacher_positions (`(N, S)`): as in `Blocks`.
        num_anchors (`list[int]`), context_lengths (`list[int]`): of each sample, without padding.
    """

    anchors: torch.LongTensor
    samples: torch.LongTensor
    input_ids: torch.LongTensor
    position_ids: torch.LongTensor
    context_samples: torch.LongTensor
    labels: torch.LongTensor
    teacher_positions: torch.LongTensor
    num_anchors: list[int] = field(default_factory=list)
    context_lengths: list[int] = field(default_factory=list)


def pack(blocks: Blocks, pad_to: int = 1) -> PackedBlocks:
    """The batch as one sequence, whose context positions and whose blocks are padded to multiples of `pad_to`.

    There is always a block, and a position of context: DDP needs the drafter's forward in every process.
    """
    B, A, _ = blocks.labels.shape
    K = blocks.input_ids.shape[1] // A
    exists = blocks.anchors >= 0  # (B, A): what `draw_anchors` draws has a label
    exists[0, 0] |= not exists.any()
    samples, columns = exists.nonzero(as_tuple=True)  # (N,), sample after sample
    anchors = blocks.anchors[samples, columns]
    # A block sees what is before its anchor: what is behind the last one, nobody sees
    lengths = blocks.anchors.amax(1).clamp(min=0)
    lengths[0] = max(int(lengths[0]), int(not lengths.any()))
    context_samples = torch.arange(B).repeat_interleave(lengths)  # (C,)
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()])
    slots = anchors.clamp(min=0).unsqueeze(1) + torch.arange(K)  # (N, K)
    more_context = -len(context_samples) % pad_to
    more_blocks = -len(anchors) % pad_to
    slots = F.pad(slots, (0, 0, 0, more_blocks))
    return PackedBlocks(
        anchors=F.pad(anchors, (0, more_blocks), value=-1),
        samples=F.pad(samples, (0, more_blocks)),
        input_ids=F.pad(blocks.input_ids.view(B, A, -1)[samples, columns], (0, 0, 0, more_blocks)).view(1, -1),
        position_ids=torch.cat([F.pad(positions, (0, more_context)), slots.flatten()])[None],
        context_samples=F.pad(context_samples, (0, more_context), value=-1),
        labels=F.pad(blocks.labels[samples, columns], (0, 0, 0, more_blocks), value=-100),
        teacher_positions=F.pad(blocks.teacher_positions[samples, columns], (0, 0, 0, more_blocks)),
        num_anchors=exists.sum(1).tolist(),
        context_lengths=lengths.tolist(),
    )


# ----------------------------------------------------------------------------------------------------------- attention


def attention_masks(
    anchors: torch.LongTensor, length: int, config: PreTrainedConfig, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The additive mask of every layer type of a drafter, `(B, 1, A * K, T + A * K)`: a slot sees the context strictly
    before its block's anchor (within the window of a sliding layer) and its own block; never another block.

    Args:
        anchors (`(B, A)`): on the device that the masks are wanted on.
        length: context positions T.
        config: the drafter's.
    """
    return {
        layer_type: _dense_mask(anchors, length, config.block_size, window, dtype)
        for layer_type, window in _windows(config).items()
    }


def packed_masks(packed: PackedBlocks, config: PreTrainedConfig) -> "dict[str, BlockMask | SampleMasks]":
    """What `attention_masks` says, for a packed batch: `BlockMask`s for flex attention, else [`SampleMasks`]."""
    build = _block_mask if config._attn_implementation == "flex_attention" else SampleMasks
    return {layer_type: build(packed, config.block_size, window) for layer_type, window in _windows(config).items()}


def _windows(config: PreTrainedConfig) -> dict[str, int | None]:
    windows = {"full_attention": None, "sliding_attention": config.sliding_window}
    return {layer_type: windows[layer_type] for layer_type in sorted(set(config.layer_types))}


def _sees_context(
    anchor: torch.Tensor, query_position: torch.Tensor, key_position: torch.Tensor, window: int | None
) -> torch.Tensor:
    """The rule for a position of the context of the same sample; the tensors broadcast."""
    seen = key_position < anchor  # never for anchor -1
    return seen if window is None else seen & (key_position > query_position - window)


def _dense_mask(
    anchors: torch.LongTensor,
    length: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    window_moves: bool = True,
) -> torch.Tensor:
    A, device = anchors.shape[1], anchors.device
    query = torch.arange(A * block_size, device=device)  # (A*K,)
    anchor = anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)  # (B, A*K, 1)
    position = anchor + (query % block_size)[:, None] if window_moves else anchor - 1
    context = _sees_context(anchor, position, torch.arange(length, device=device), window)  # (B, A*K, T)
    # A block sees itself in both directions, even one that does not exist, so that every query has a key
    block = (query // block_size)[:, None] == query // block_size
    visible = torch.cat([context, block.expand(len(anchors), -1, -1)], dim=2)
    mask = torch.zeros(visible.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)


def _block_mask(packed: PackedBlocks, block_size: int, window: int | None) -> BlockMask:
    length, num_queries = len(packed.context_samples), packed.input_ids.shape[1]
    anchors, samples, context_samples = packed.anchors, packed.samples, packed.context_samples
    positions = packed.position_ids[0]

    def visible(b, h, query, key):
        block, key_block = query // block_size, (key - length) // block_size
        position = key.clamp(max=length - 1)  # of the context; the blocks' own keys are decided by `key_block`
        context = _sees_context(anchors[block], anchors[block] + query % block_size, positions[position], window)
        context = context & (context_samples[position] == samples[block]) & (key < length)
        return context | ((key >= length) & (key_block == block))

    # Compiled, the mask is never held as a dense one
    device = anchors.device
    return create_block_mask(visible, 1, None, num_queries, length + num_queries, device, _compile=anchors.is_cuda)


class SampleMasks:
    """The masks of a packed batch for [`attend_by_sample`], one sample at a time.

    Attributes:
        parts (`list[tuple]`): for each sample with blocks, the slices of its queries, of its context's keys and of its
            blocks' keys, and the additive mask `(1, 1, A * K, T + A * K)` of these.

    Args:
        window_moves: a slot sees `window` positions up to itself; else the whole block sees `window` positions before
            its anchor (DSpark).
    """

    def __init__(self, packed: PackedBlocks, block_size: int, window: int | None, window_moves: bool = True):
        self.parts, start, query, length = [], 0, 0, len(packed.context_samples)
        for num_context, num_anchors in zip(packed.context_lengths, packed.num_anchors, strict=True):
            if num_anchors:
                blocks = slice(query, query + num_anchors * block_size)
                anchors = packed.anchors[None, query // block_size : query // block_size + num_anchors]
                mask = _dense_mask(anchors, num_context, block_size, window, torch.float32, window_moves)
                keys = slice(length + blocks.start, length + blocks.stop)
                self.parts.append((blocks, slice(start, start + num_context), keys, mask))
                query = blocks.stop
            start += num_context


@torch.compiler.disable  # the slices differ from step to step
def attend_by_sample(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, heads, N * K, hd)
    key: torch.Tensor,  # (1, KV heads, C + N * K, hd)
    value: torch.Tensor,
    attention_mask: SampleMasks | torch.Tensor | None,
    *,
    attend: Callable,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention of a packed batch, `(1, N * K, heads, hd)`: each sample by itself, with a dense mask of its own. With
    another mask, as in decoding, it is `attend` itself."""
    if not isinstance(attention_mask, SampleMasks):
        return attend(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for queries, context, blocks, mask in attention_mask.parts:
        k, v = (torch.cat([x[:, :, context], x[:, :, blocks]], dim=2) for x in (key, value))
        if attend is sdpa_attention_forward:
            mask = mask.to(query.dtype)
        outputs.append(attend(module, query[:, :, queries], k, v, mask, **kwargs)[0])
    return torch.cat(outputs, dim=1), None


# What a run's `attention` is called in the drafter's config. On a CPU, torch's fused attention takes twice as long as
# eager under a dense mask
AttentionInterface.register("packed_eager", partial(attend_by_sample, attend=eager_attention_forward))
AttentionInterface.register("packed_sdpa", partial(attend_by_sample, attend=sdpa_attention_forward))
ATTENTIONS = {"eager": "packed_eager", "sdpa": "packed_sdpa", "flex_attention": "flex_attention"}
