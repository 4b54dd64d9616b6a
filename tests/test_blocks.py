"""Blocks and anchors, by hand; and that a block in training is the block that decoding drafts from."""

import pytest
import torch
from tiny_v4 import random_ids, tiny_drafter, tiny_target

from hyperdflash.generation_hyperdflash import DraftRequest
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.blocks import anchor_seed, attention_masks, draw_anchors, make_blocks


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


@pytest.mark.slow
@torch.no_grad()
def test_flex_attention_gives_what_a_dense_mask_gives():
    """Forward only: torch has no backward of flex attention on the CPU."""
    target = tiny_target()
    types = ["sliding_attention", "full_attention"]
    drafter = tiny_drafter(target, block_size=4, sliding_window=8, layer_types=types)
    ids = random_ids(48)
    with ResidualTap(target, drafter.config.tapped_layer_ids) as tap:
        target(ids, use_cache=False)
        residual = tap.take()
    anchors = torch.tensor([[3, 9, 10, 30, -1]])
    blocks = make_blocks(ids, torch.ones_like(ids), anchors, block_size=4, mask_token_id=63)
    outputs = {}
    for implementation in ("eager", "sdpa", "flex_attention"):
        drafter.set_attn_implementation(implementation)
        outputs[implementation] = drafter(
            target.model.embed_tokens(blocks.input_ids), residual, masks_of(drafter, blocks, 48), blocks.position_ids
        ).last_hidden_state
    torch.testing.assert_close(outputs["sdpa"], outputs["eager"], atol=1e-5, rtol=0)
    torch.testing.assert_close(outputs["flex_attention"], outputs["eager"], atol=1e-5, rtol=0)
