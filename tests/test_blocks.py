"""Blocks and anchors, by hand; and that a block in training is the block that decoding drafts from."""

import pytest
import torch
from tiny_v4 import random_ids, tiny_drafter, tiny_target
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode

from hyperdflash.generation_hyperdflash import DraftRequest
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.blocks import (
    ATTENTIONS,
    FLEX_BLOCK,
    anchor_seed,
    attention_masks,
    draw_anchors,
    make_blocks,
    pack,
    packed_masks,
    previous_ids,
)


def masks_of(drafter, blocks, length):
    return attention_masks(blocks.anchors, length, drafter.config)


def test_slot_k_is_trained_on_the_token_k_behind_the_anchor():
    """Every token unique: labels, teacher positions and block positions are read off.

    https://github.com/sgl-project/sglang-jax/pull/1619
    """
    ids = torch.arange(100, 112)[None]
    blocks = make_blocks(ids, torch.ones_like(ids), torch.tensor([[3, 9]]), block_size=4, mask_token_id=7)
    assert blocks.input_ids.tolist() == [[103, 7, 7, 7, 109, 7, 7, 7]]
    assert blocks.labels.tolist() == [[[104, 105, 106], [110, 111, -100]]]
    assert blocks.teacher_positions[0, 0].tolist() == [3, 4, 5]  # the head at a + k - 1 predicts a + k
    assert blocks.position_ids[0, 12:].tolist() == [3, 4, 5, 6, 9, 10, 11, 12]


def test_with_a_label_for_every_slot_the_anchor_predicts_the_token_behind_it():
    """As in DSpark: the same block, one label more; and the tokens before those that are predicted."""
    ids = torch.arange(100, 112)[None]
    anchors = torch.tensor([[3, 9]])
    blocks = make_blocks(ids, torch.ones_like(ids), anchors, block_size=4, mask_token_id=7, num_labels=4)
    assert blocks.input_ids.tolist() == [[103, 7, 7, 7, 109, 7, 7, 7]]
    assert blocks.labels.tolist() == [[[104, 105, 106, 107], [110, 111, -100, -100]]]
    assert blocks.teacher_positions[0, 0].tolist() == [3, 4, 5, 6]
    assert blocks.position_ids[0, 12:].tolist() == [3, 4, 5, 6, 9, 10, 11, 12]
    packed = pack(blocks)
    assert packed.position_ids[0].tolist() == [*range(9), 3, 4, 5, 6, 9, 10, 11, 12]
    assert packed.labels.tolist() == blocks.labels[0].tolist()
    for laid_out in (blocks, packed):
        assert previous_ids(laid_out)[0, :6].tolist() == [103, 104, 105, 106, 109, 110]


def test_a_block_sees_the_context_before_its_anchor_and_itself():
    """The window holds on sliding layers only, and a block that is not there sees itself alone."""
    types = ["sliding_attention", "full_attention"]
    config = tiny_drafter(tiny_target(), block_size=2, sliding_window=4, layer_types=types).config
    masks = attention_masks(torch.tensor([[2, 5], [3, -1]]), 8, config)
    visible = {layer_type: (mask == 0)[:, 0].int().tolist() for layer_type, mask in masks.items()}
    assert visible["full_attention"][0][3] == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert visible["full_attention"][1][2] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert visible["sliding_attention"][0] == [
        [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0],  # anchor 2
        [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0],  # its slot at 3
        [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1],  # anchor 5: window 4 reaches back to 2
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1],  # its slot at 6: back to 3
    ]


def test_labels_end_with_the_supervised_span():
    """Behind the end of an answer, or of the sequence, there is nothing to draft."""
    ids, mask = torch.arange(10)[None], torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1]])
    anchors = torch.tensor([[1, 3, 6, 9, -1]])
    labels = make_blocks(ids, mask, anchors, block_size=4, mask_token_id=0).labels[0]
    assert labels.tolist() == [[2, 3, 4], [4, -100, -100], [7, 8, 9], [-100] * 3, [-100] * 3]


def test_every_legal_anchor_is_drawn_and_no_other():
    """An anchor is a token of an answer whose next token is one too; position 0 has no context.

    https://github.com/NVIDIA/Model-Optimizer/pull/1211
    """
    mask = torch.tensor([[1, 1, 1, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0, 0, 0]])
    drawn = [set(), set(), set()]
    for step in range(200):
        for row, anchors in enumerate(draw_anchors(mask, 1, [anchor_seed(0, step, i) for i in range(3)]).tolist()):
            drawn[row] |= set(anchors)
    assert drawn == [{1, 2}, {6}, {-1}]


def test_anchors_depend_on_seed_step_and_sample_and_on_nothing_else():
    """Neither padding nor the other rows of a batch move a sample's anchors."""
    mask = torch.zeros(3, 60)
    mask[0, 5:40], mask[1, 3:50], mask[2, 10:60] = 1, 1, 1
    seeds = [anchor_seed(0, 7, sample) for sample in (4, 5, 6)]
    together = draw_anchors(mask, 8, seeds)
    assert together.tolist() == [
        draw_anchors(mask[i : i + 1, :n], 8, seeds[i : i + 1])[0].tolist() for i, n in ((0, 40), (1, 50), (2, 60))
    ]
    assert (
        len({anchor_seed(*key) for key in [(0, 7, 4), (1, 7, 4), (0, 8, 4), (0, 7, 5), (0, 74, 0), (0, 7, 40)]}) == 6
    )
    assert (together.diff() > 0).all()


@pytest.mark.parametrize("length", range(1, 7))
def test_sequences_shorter_than_a_block_train(length):
    ids = torch.arange(length)[None]
    anchors = draw_anchors(torch.ones_like(ids), 8, [0])
    blocks = make_blocks(ids, torch.ones_like(ids), anchors, block_size=4, mask_token_id=0)
    labels = blocks.labels[blocks.labels != -100]
    assert ((labels > 1) & (labels < length)).all()
    assert len(labels) == sum(min(3, length - 1 - a) for a in anchors.flatten().tolist() if a >= 0)


@torch.no_grad()
@pytest.mark.parametrize("window", [6, 64])
def test_training_blocks_have_the_logits_that_decoding_drafts_from(window):
    """One forward over many blocks, and the decoding path anchor by anchor, agree to 1e-5.

    https://github.com/sgl-project/SpecForge/issues/455
    """
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=5, sliding_window=window)
    ids = random_ids(40)
    with ResidualTap(target, drafter.config.tapped_layer_ids) as tap:
        target(ids, use_cache=False)
        residual = tap.take()
    anchors = [1, 2, 7, 8, 9, 20, 31, 38]
    blocks = make_blocks(
        ids,
        torch.ones_like(ids),
        torch.tensor([anchors]),
        block_size=5,
        mask_token_id=drafter.config.mask_token_id,
    )
    hidden = drafter(
        target.model.embed_tokens(blocks.input_ids), residual, masks_of(drafter, blocks, 40), blocks.position_ids
    ).last_hidden_state
    trained = target.lm_head(hidden).view(len(anchors), 5, -1)[:, 1:]

    from transformers import DynamicCache

    cache, start = DynamicCache(config=drafter.config), 0
    for i, anchor in enumerate(anchors):
        noise_ids = blocks.input_ids.view(len(anchors), 5)[i : i + 1]
        ids = blocks.input_ids[:, :0]  # not read
        drafted = drafter.draft(DraftRequest(residual[:, start:anchor], ids, noise_ids, anchor, 4, target, cache))
        torch.testing.assert_close(drafted, trained[i], atol=1e-5, rtol=0)
        start = anchor


# ------------------------------------------------------------------------------------------------------ packed batches


class Batch:
    """Three samples of unequal length and number of blocks, one without any, and a drafter of both layer types."""

    def __init__(self):
        self.target = tiny_target()
        types = ["sliding_attention", "full_attention"]
        self.drafter = tiny_drafter(self.target, block_size=4, sliding_window=8, layer_types=types).train()
        lengths, anchors = (48, 20, 33), [[3, 9, 10, 30], [5, 12, -1, -1], [-1] * 4]
        self.ids = torch.stack([torch.nn.functional.pad(random_ids(n, seed=n)[0], (0, 48 - n)) for n in lengths])
        mask = torch.stack([(torch.arange(48) < n).long() for n in lengths])
        with torch.no_grad(), ResidualTap(self.target, self.drafter.config.tapped_layer_ids) as tap:
            self.target(self.ids, use_cache=False)
            self.residual = tap.take()
        self.blocks = make_blocks(self.ids, mask, torch.tensor(anchors), block_size=4, mask_token_id=63)

    def learn(self, hidden, labels):
        """Loss and gradients of the slots `(N, K, D)`."""
        logits = hidden[:, 1:] @ self.target.lm_head.weight.detach().T
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        self.drafter.zero_grad()
        loss.backward()
        return loss.detach(), [parameter.grad.clone() for parameter in self.drafter.parameters()]

    def padded(self):
        """As rows of one length with one number of blocks."""
        self.drafter.set_attn_implementation("eager")
        noise = self.target.model.embed_tokens(self.blocks.input_ids).detach()
        masks = attention_masks(self.blocks.anchors, 48, self.drafter.config)
        hidden = self.drafter(noise, self.residual, masks, self.blocks.position_ids).last_hidden_state
        return self.learn(hidden.view(12, 4, -1), self.blocks.labels.flatten(0, 1))

    def packed(self, packed, attention, masks=None):
        self.drafter.set_attn_implementation(ATTENTIONS.get(attention, attention))
        context = self.residual[
            packed.context_samples.clamp(min=0), packed.position_ids[0, : len(packed.context_samples)]
        ]
        noise = self.target.model.embed_tokens(packed.input_ids).detach()
        masks = masks or packed_masks(packed, self.drafter.config)
        hidden = self.drafter(noise, context[None], masks, packed.position_ids).last_hidden_state
        return hidden.view(len(packed.labels), 4, -1), packed.labels


@pytest.fixture(scope="module")
def batch() -> Batch:
    return Batch()


def test_a_packed_batch_has_neither_padding_nor_blocks_without_labels(batch):
    packed = pack(batch.blocks)
    assert packed.anchors.tolist() == [3, 9, 10, 30, 5, 12]
    assert packed.samples.tolist() == [0, 0, 0, 0, 1, 1]
    assert (packed.labels != -100).any(1).all()
    assert packed.context_lengths == [30, 12, 0]  # nobody sees what is behind the last anchor
    assert packed.position_ids[0].tolist()[:42] == [*range(30), *range(12)]
    assert packed.input_ids[0, ::4].tolist() == batch.ids[packed.samples, packed.anchors].tolist()


def test_a_batch_without_any_block_keeps_one_for_the_other_processes(batch):
    blocks = make_blocks(batch.ids, batch.ids * 0, torch.full((3, 2), -1), block_size=4, mask_token_id=63)
    packed = pack(blocks)
    assert packed.anchors.tolist() == [-1]
    assert len(packed.context_samples) == 1
    assert torch.isfinite(batch.packed(packed, "eager")[0]).all()


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_samples_learn_what_padded_rows_learn(batch, attention):
    """Loss and every gradient; the padded rows compute 12 blocks, the packed batch 6."""
    loss, gradients = batch.padded()
    packed_loss, packed_gradients = batch.learn(*batch.packed(pack(batch.blocks), attention))
    torch.testing.assert_close(packed_loss, loss, atol=1e-6, rtol=0)
    for got, expected in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("pad_to", [1, FLEX_BLOCK])
def test_the_rule_of_flex_attention_learns_what_padded_rows_learn(batch, pad_to):
    """torch has no backward of flex attention on a CPU: its rule, written out as a dense mask, in eager attention."""
    packed = pack(batch.blocks, pad_to)
    batch.drafter.set_attn_implementation("flex_attention")
    masks = {}
    for layer_type, mask in packed_masks(packed, batch.drafter.config).items():
        visible = create_mask(mask.mask_mod, 1, 1, *mask.seq_lengths, device="cpu")
        masks[layer_type] = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    loss, gradients = batch.padded()
    packed_loss, packed_gradients = batch.learn(*batch.packed(packed, "eager", masks))
    torch.testing.assert_close(packed_loss, loss, atol=1e-6, rtol=0)
    for got, expected in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


class Operations(TorchDispatchMode):
    """`made`: the name of every operation, and the shape and dtype of what it made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.made.append((func.overloadpacket.__name__, tuple(result.shape), result.dtype))
        return result


@torch.no_grad()
def test_the_context_is_cast_once_for_all_layers_and_joined_behind_the_projections(batch):
    packed, D = pack(batch.blocks), batch.drafter.config.hidden_size
    context, everything = len(packed.context_samples), packed.position_ids.shape[1]
    with torch.autocast("cpu", torch.bfloat16), Operations() as operations:
        batch.packed(packed, "eager")
    assert len(batch.drafter.layers) > 1
    assert operations.made.count(("_to_copy", (1, context, D), torch.bfloat16)) == 1
    assert not any(made[:2] == ("cat", (1, everything, D)) for made in operations.made)


@pytest.mark.nightly
@torch.no_grad()
def test_compiled_flex_attention_gives_what_samples_give_one_by_one(batch):
    """Forward only, for two shapes after each other; the blocks of a batch's padding are left out."""
    for blocks in (
        batch.blocks,
        make_blocks(batch.ids[:1], batch.ids[:1] * 0 + 1, torch.tensor([[7, 8]]), block_size=4, mask_token_id=63),
    ):
        flex, eager = pack(blocks, FLEX_BLOCK), pack(blocks)
        got, expected = batch.packed(flex, "flex_attention")[0], batch.packed(eager, "eager")[0]
        torch.testing.assert_close(got[: len(expected)], expected, atol=1e-5, rtol=0)
