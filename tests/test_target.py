"""The target's side of training: what is tapped, what the teacher says, and the frozen parts on disk."""

import torch
from tiny_v4 import random_ids, tiny_drafter, tiny_target
from transformers import DynamicCache

from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.target import OnlineFeatures, TargetHead


@torch.no_grad()
def test_the_feature_is_the_residual_that_the_target_collapses():
    """Shape (B, T, m, D), and norm(hc_head(feature)) is the target's last hidden state: in training's extraction, and
    in what decoding taps step by step with a cache.

    https://github.com/vllm-project/vllm/pull/42704 https://github.com/microsoft/onnxruntime-genai/pull/2538
    """
    target = tiny_target()
    config = tiny_drafter(target).config
    ids = random_ids(20)
    features = OnlineFeatures(target, config)({"input_ids": ids})
    last = target.model(ids, use_cache=False).last_hidden_state
    assert features.context_hidden_states.shape == (1, 20, 2, 32)
    assert features.residual is features.context_hidden_states
    torch.testing.assert_close(target.model.norm(target.model.hc_head(features.residual)), last, atol=1e-5, rtol=0)

    cache = DynamicCache(config=target.config)
    with ResidualTap(target) as tap:
        for i in (slice(0, 7), *(slice(i, i + 1) for i in range(7, 20))):
            target(ids[:, i], cache=cache, use_cache=True)
        decoded = tap.take()
    torch.testing.assert_close(decoded, features.residual, atol=1e-4, rtol=0)


@torch.no_grad()
def test_tapped_layers_come_with_their_paths_averaged_beside_the_residual():
    target = tiny_target()
    config = tiny_drafter(target, context_source="hidden_layers", target_layer_ids=[0, 2]).config
    ids = random_ids(12)
    features = OnlineFeatures(target, config)({"input_ids": ids})
    layers = target.model(ids, use_cache=False, output_hidden_states=[1]).hidden_states[1]  # behind layer 0
    assert features.context_hidden_states.shape == (1, 12, 1, 64)
    assert features.residual.shape == (1, 12, 2, 32)
    torch.testing.assert_close(features.context_hidden_states[:, :, 0, :32], layers.mean(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        features.context_hidden_states[:, :, 0, 32:], features.residual.mean(2), atol=1e-5, rtol=0
    )


@torch.no_grad()
def test_padding_on_the_right_changes_no_feature_of_a_token():
    """https://github.com/vllm-project/speculators/issues/279"""
    target = tiny_target()
    features = OnlineFeatures(target, tiny_drafter(target).config)
    rows = [random_ids(n, seed=n)[0] for n in (5, 9, 3, 12)]
    batch = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    together = features({"input_ids": batch}).residual
    for i, row in enumerate(rows):
        alone = features({"input_ids": row[None]}).residual[0]
        torch.testing.assert_close(together[i, : len(row)], alone, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_teachers_are_the_targets_distribution_and_the_head_on_averaged_paths():
    target = tiny_target()
    ids = random_ids(10)
    features = OnlineFeatures(target, tiny_drafter(target).config)({"input_ids": ids})
    head = TargetHead.from_target(target)
    exact = head.teacher_hidden(features.residual, "hc_head") @ head.lm_head.T
    torch.testing.assert_close(exact, target(ids, use_cache=False).logits, atol=1e-4, rtol=0)
    pooled = head.teacher_hidden(features.residual, "mean_pool")
    paths = features.residual[0, 3]
    average = (paths[0] + paths[1]) / 2
    expected = average / (average.square().mean() + target.config.rms_norm_eps).sqrt() * target.model.norm.weight
    torch.testing.assert_close(pooled[0, 3], expected, atol=1e-5, rtol=0)
