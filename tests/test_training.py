"""Blocks and loss, by hand; and that a block in training is the block that decoding drafts from."""

import math

import pytest
import torch
from tiny_v4 import random_ids, tiny_drafter, tiny_target

from hyperdflash.generation_hyperdflash import ResidualTap
from hyperdflash.training.blocks import draw_anchors, make_blocks
from hyperdflash.training.losses import drafter_loss, slot_weights


def test_slot_k_is_trained_on_the_token_k_behind_the_anchor():
    """Every token unique: labels, teacher positions and block positions are read off.

    https://github.com/sgl-project/sglang-jax/pull/1619
    """
    ids = torch.arange(100, 112)[None]
    blocks = make_blocks(ids, torch.ones_like(ids), torch.tensor([[3, 9]]), block_size=4, mask_token_id=7, window=None)
    assert blocks.input_ids.tolist() == [[103, 7, 7, 7, 109, 7, 7, 7]]
    assert blocks.labels.tolist() == [[[104, 105, 106], [110, 111, -100]]]
    assert blocks.teacher_positions[0, 0].tolist() == [3, 4, 5]  # the head at a + k - 1 predicts a + k
    assert blocks.position_ids[0, 12:].tolist() == [3, 4, 5, 6, 9, 10, 11, 12]


def test_a_block_sees_the_context_before_its_anchor_and_itself():
    ids = torch.arange(8)[None]
    blocks = make_blocks(ids, torch.ones_like(ids), torch.tensor([[2, 5]]), block_size=2, mask_token_id=7, window=4)
    visible = (blocks.attention_mask[0, 0] == 0).int().tolist()
    assert visible == [
        [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0],  # anchor 2
        [1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0],  # its slot at 3
        [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1],  # anchor 5: window 4 reaches back to 2
        [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1],  # its slot at 6: back to 3
    ]


def test_labels_end_with_the_supervised_span():
    """Behind the end of an answer, or of the sequence, there is nothing to draft."""
    ids, mask = torch.arange(10)[None], torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1]])
    anchors = torch.tensor([[1, 3, 6, 9, -1]])
    labels = make_blocks(ids, mask, anchors, block_size=4, mask_token_id=0, window=None).labels[0]
    assert labels.tolist() == [[2, 3, 4], [4, -100, -100], [7, 8, 9], [-100] * 3, [-100] * 3]


def test_every_legal_anchor_is_drawn_and_no_other():
    """https://github.com/NVIDIA/Model-Optimizer/pull/1211"""
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 0]])
    generator = torch.Generator().manual_seed(0)
    drawn = [set(), set(), set()]
    for _ in range(200):
        for row, anchors in enumerate(draw_anchors(mask, 2, generator).tolist()):
            drawn[row] |= set(anchors)
    assert drawn == [{1, 4, 6}, {6, -1}, {-1}]  # position 0 has no context


@pytest.mark.parametrize("length", range(1, 7))
def test_sequences_shorter_than_a_block_train(length):
    ids = torch.arange(length)[None]
    anchors = draw_anchors(torch.ones_like(ids), 8, torch.Generator().manual_seed(0))
    blocks = make_blocks(ids, torch.ones_like(ids), anchors, block_size=4, mask_token_id=0, window=None)
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
    with ResidualTap(target, drafter.config) as tap:
        target(ids, use_cache=False)
        residual = tap.take()
    anchors = [1, 2, 7, 8, 9, 20, 31, 38]
    blocks = make_blocks(
        ids,
        torch.ones_like(ids),
        torch.tensor([anchors]),
        block_size=5,
        mask_token_id=drafter.config.mask_token_id,
        window=window,
    )
    hidden = drafter(
        target.model.embed_tokens(blocks.input_ids), residual, blocks.attention_mask, blocks.position_ids
    ).last_hidden_state
    trained = target.lm_head(hidden).view(len(anchors), 5, -1)[:, 1:]

    from transformers import DynamicCache

    cache, start = DynamicCache(config=drafter.config), 0
    for i, anchor in enumerate(anchors):
        noise_ids = blocks.input_ids.view(len(anchors), 5)[i : i + 1]
        drafted = drafter.draft(residual[:, start:anchor], noise_ids, anchor, 4, target, cache)
        torch.testing.assert_close(drafted, trained[i], atol=1e-5, rtol=0)
        start = anchor


def test_loss_equals_a_float64_reference():
    torch.manual_seed(0)
    student, teacher = torch.randn(6, 3, 11), torch.randn(6, 2, 11)
    labels = torch.randint(11, (6, 3))
    labels[0, 2] = labels[1, 1] = labels[1, 2] = labels[2, :] = -100
    out = drafter_loss(student, teacher, labels, gamma=4.0, alpha=0.2, temperature=2.0, num_kl_slots=2)
    ce = weight = 0.0
    for n in range(6):
        for k in range(3):
            if labels[n, k] != -100:
                w = math.exp(-k / 4)
                ce -= w * float(student[n, k].double().log_softmax(-1)[labels[n, k]])
                weight += w
    kl = 0.0
    for k in range(2):
        rows = [n for n in range(6) if labels[n, k] != -100]
        for n in rows:
            p = (teacher[n, k].double() / 2).softmax(-1)
            q = (student[n, k].double() / 2).log_softmax(-1)
            kl += float((p * (p.log() - q)).sum()) / len(rows)
    kl *= 2.0**2 / 2
    assert float(out["ce"]) == pytest.approx(ce / weight, abs=1e-5)
    assert float(out["kl"]) == pytest.approx(kl, abs=1e-5)
    assert float(out["loss"]) == pytest.approx(ce / weight + 0.2 * kl, abs=1e-5)
    assert out["num_valid"].tolist() == [5, 4, 3]


def test_no_valid_slot_gives_a_zero_loss_with_finite_gradients():
    """https://github.com/microsoft/LMOps/issues/38 https://github.com/NVIDIA-NeMo/Automodel/pull/3797"""
    student = torch.randn(2, 3, 5, requires_grad=True)
    labels = torch.full((2, 3), -100)
    out = drafter_loss(student, torch.randn(2, 2, 5), labels, gamma=4.0, alpha=0.1, temperature=1.0, num_kl_slots=2)
    out["loss"].backward()
    assert float(out["loss"]) == 0
    assert student.grad.abs().sum() == 0


def test_a_block_with_fewer_slots_than_the_kl_term_has():
    student, labels = torch.randn(4, 1, 5), torch.tensor([[1], [2], [-100], [3]])
    out = drafter_loss(student, torch.randn(4, 2, 5), labels, gamma=4.0, alpha=0.1, temperature=1.0, num_kl_slots=2)
    assert torch.isfinite(out["loss"])


def test_gamma_zero_weighs_all_slots_alike():
    assert slot_weights(3, 0).tolist() == [1, 1, 1]
    assert slot_weights(3, 4.0).tolist() == pytest.approx([1, math.exp(-1 / 4), math.exp(-2 / 4)])
