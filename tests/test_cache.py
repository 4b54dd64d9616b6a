"""Rewindable V4 cache layers: a rewound cache is the cache of a run that never wrote the removed positions."""

import copy

import pytest
import torch
from tiny_v4 import CSA, HCA, MIXED, SLIDING, assert_same_state, nightly, random_ids, tiny_target
from transformers import DynamicCache, StaticCache

from hyperdflash.target_hyperdflash import RewindableSlidingLayer, make_rewindable

STACKS = {"mixed": MIXED, "sliding": (SLIDING, SLIDING), "csa": (CSA, CSA), "hca": (HCA, HCA)}
# Exhaustive tests: layers of all types in one stack, where the state of each is compared; each type alone is nightly
ALONE = [nightly(name) for name in STACKS if name != "mixed"]


def new_cache(model):
    return make_rewindable(DynamicCache(config=model.config), model.config)


@torch.no_grad()
def forward(model, cache, ids):
    return model(ids, cache=cache, use_cache=True).logits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stack", "longest", "written"),
    [("mixed", 17, (1, 3, 7)), *(nightly(name, 30, (1, 2, 3, 5, 7)) for name in STACKS)],
    ids=lambda value: str(value),
)
def test_rewind_equals_fresh_run_at_every_length(stack, longest, written):
    """Every prompt length up to twice the window and the rates, or 30 (nightly), k tokens written in one forward and
    every r of them taken back: same state, same next logits.

    https://github.com/huggingface/transformers/pull/45643 https://github.com/huggingface/transformers/pull/44893
    """
    model = tiny_target(STACKS[stack])
    ids = random_ids(48)
    for length in range(1, longest + 1):
        base = new_cache(model)
        forward(model, base, ids[:, :length])
        for k in written:
            for r in range(k + 1):
                cache = copy.deepcopy(base)
                cache.activate_past_recording()
                wrong = (ids[:, length : length + k] + 1) % 60
                forward(model, cache, torch.cat([ids[:, length : length + k - r], wrong[:, k - r :]], dim=1))
                cache.crop(-r)
                fresh = copy.deepcopy(base)
                if k > r:
                    forward(model, fresh, ids[:, length : length + k - r])
                assert_same_state(cache, fresh)
                position = length + k - r
                got = forward(model, cache, ids[:, position : position + 2])
                want = forward(model, fresh, ids[:, position : position + 2])
                torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("stack", ["mixed", *ALONE])
@pytest.mark.parametrize("window", [nightly(2), 3, nightly(8)])
def test_several_forwards_then_one_rewind(stack, window):
    """Records of several forwards add up, and everything recorded can go at once."""
    model = tiny_target(STACKS[stack], window=window)
    ids = random_ids(60)
    for length in (1, 4, 7, 9, 16):
        for chunks in ((1, 1, 1), (3, 4), (5, 1, 8), (9, 9)):
            total = sum(chunks)
            for r in (0, 1, 2, total // 2, total):
                cache, fresh = new_cache(model), new_cache(model)
                forward(model, cache, ids[:, :length])
                cache.activate_past_recording()
                done = length
                for chunk in chunks:
                    forward(model, cache, ids[:, done : done + chunk])
                    done += chunk
                cache.crop(-r)
                forward(model, fresh, ids[:, :length])
                if total > r:
                    forward(model, fresh, ids[:, length : length + total - r])
                assert_same_state(cache, fresh)


@pytest.mark.parametrize("stack", STACKS)
def test_window_edge(stack):
    """Lengths around the window: rewinding nothing still trims to window - 1 positions, and the next step is as fresh.

    https://github.com/huggingface/transformers/pull/47447
    """
    model = tiny_target(STACKS[stack], window=8)
    ids = random_ids(30)
    for length in range(6, 11):
        for r in (0, 1, 3):
            cache, fresh = new_cache(model), new_cache(model)
            forward(model, cache, ids[:, :length])
            cache.activate_past_recording()
            forward(model, cache, ids[:, length : length + 3])
            cache.crop(-r)
            assert all(layer.keys.shape[-2] <= 7 for layer in cache.layers)
            forward(model, fresh, ids[:, : length + 3 - r])
            step = ids[:, length + 3 - r : length + 4 - r]
            torch.testing.assert_close(forward(model, cache, step), forward(model, fresh, step), atol=1e-4, rtol=0)


def test_rewinding_more_than_recorded_is_refused():
    """It raises; it never returns wrong logits. https://github.com/huggingface/transformers/pull/47447"""
    model = tiny_target()
    cache = new_cache(model)
    forward(model, cache, random_ids(12))
    with pytest.raises(RuntimeError, match="cannot take back 1 positions: 0 were recorded"):
        cache.crop(-1)
    cache.activate_past_recording()
    forward(model, cache, random_ids(3))
    with pytest.raises(RuntimeError, match="cannot take back 4 positions: 3 were recorded"):
        cache.crop(-4)
    with pytest.raises(ValueError, match="negative number"):
        cache.crop(2)


def test_overlap_returns_to_the_earlier_window_bit_for_bit():
    """Rejecting exactly the tokens that closed a CSA window restores the carried slice, also to none at all.

    https://github.com/ROCm/ATOM/issues/664
    """
    model = tiny_target((CSA, CSA))
    ids = random_ids(16)
    for length, entries in ((3, 0), (7, 1), (11, 2)):
        cache = new_cache(model)
        forward(model, cache, ids[:, :length])
        layer = cache.layers[0]
        before = copy.deepcopy(layer.overlap_kv), copy.deepcopy(layer.overlap_gate)
        cache.activate_past_recording()
        forward(model, cache, ids[:, length : length + 1])
        assert layer.entry_count == {"compressor": entries + 1, "indexer": entries + 1}
        cache.crop(-1)
        for states_now, states_before in zip((layer.overlap_kv, layer.overlap_gate), before, strict=True):
            for name in ("compressor", "indexer"):
                if entries:
                    assert torch.equal(states_now[name], states_before[name])
                else:
                    assert states_now[name] is None


@pytest.mark.slow
@pytest.mark.parametrize("rewindable", [True, False])
@pytest.mark.parametrize("stack", STACKS)
def test_stepwise_decoding_equals_one_forward(stack, rewindable):
    """One by one, in chunks, and at once: the same logits at every position, with our layers and with the library's.

    https://github.com/ml-explore/mlx-lm/pull/1189
    """
    model = tiny_target(STACKS[stack])
    ids = random_ids(40)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
    for chunk in (1, 3, 4, 5, 8, 9):
        cache = new_cache(model) if rewindable else DynamicCache(config=model.config)
        logits = torch.cat([forward(model, cache, part) for part in ids.split(chunk, dim=1)], dim=1)
        torch.testing.assert_close(logits, full, atol=1e-4, rtol=0)


def test_without_recording_nothing_more_is_stored_than_the_library_stores():
    model = tiny_target()
    ours, stock = new_cache(model), DynamicCache(config=model.config)
    for part in random_ids(50).split(7, dim=1):
        torch.testing.assert_close(forward(model, ours, part), forward(model, stock, part), atol=0, rtol=0)
    assert_same_state(ours, stock, tolerance=0)


def test_cache_filled_by_library_layers_is_adopted():
    """A cache made by a plain forward becomes rewindable with what it holds."""
    model = tiny_target()
    ids = random_ids(40)
    cache = DynamicCache(config=model.config)
    forward(model, cache, ids[:, :21])
    make_rewindable(cache, model.config)
    cache.activate_past_recording()
    forward(model, cache, ids[:, 21:28])
    cache.crop(-4)
    fresh = new_cache(model)
    forward(model, fresh, ids[:, :24])
    assert_same_state(cache, fresh)


def test_reorder_select_repeat_and_reset_reach_every_state_tensor():
    """https://github.com/huggingface/transformers/issues/34232"""
    model = tiny_target()
    a, b = random_ids(21, seed=1), random_ids(21, seed=2)
    both, swapped = new_cache(model), new_cache(model)
    forward(model, both, torch.cat([a, b]))
    forward(model, swapped, torch.cat([b, a]))
    both.reorder_cache(torch.tensor([1, 0]))
    assert_same_state(both, swapped)
    both.batch_select_indices(torch.tensor([1]))
    alone = new_cache(model)
    forward(model, alone, a)
    assert_same_state(both, alone)
    alone.batch_repeat_interleave(2)
    twice = new_cache(model)
    forward(model, twice, torch.cat([a, a]))
    assert_same_state(alone, twice)
    alone.reset()
    forward(model, alone, b)
    other = new_cache(model)
    forward(model, other, b)
    assert_same_state(alone, other)


def test_reorder_in_the_middle_of_a_record_can_still_be_rewound():
    model = tiny_target()
    a, b = random_ids(25, seed=1), random_ids(25, seed=2)
    cache, fresh = new_cache(model), new_cache(model)
    forward(model, cache, torch.cat([a, b])[:, :18])
    cache.activate_past_recording()
    forward(model, cache, torch.cat([a, b])[:, 18:25])
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-5)
    forward(model, fresh, torch.cat([b, a])[:, :20])
    assert_same_state(cache, fresh)


def test_deepcopy_of_a_half_filled_cache_evolves_alone():
    model = tiny_target()
    ids = random_ids(30)
    cache = new_cache(model)
    forward(model, cache, ids[:, :13])
    cache.activate_past_recording()
    forward(model, cache, ids[:, 13:17])
    twin = copy.deepcopy(cache)
    forward(model, twin, ids[:, 17:25])
    cache.crop(-2)
    fresh = new_cache(model)
    forward(model, fresh, ids[:, :15])
    assert_same_state(cache, fresh)


def test_storage_does_not_grow_with_rounds():
    """Window, raw rows and record stay bounded; only entries grow.

    https://github.com/huggingface/transformers/pull/47447
    """
    model = tiny_target()
    cache = new_cache(model)
    forward(model, cache, random_ids(10))
    cache.activate_past_recording()
    for step in range(100):
        forward(model, cache, random_ids(7, seed=step))
        cache.crop(-(step % 7))
        for layer in cache.layers:
            assert layer.keys.shape[-2] <= 7
            assert layer.keys.untyped_storage().nbytes() <= (7 + 7) * 16 * 4
            for buffer in getattr(layer, "buffer_kv", {}).values():
                assert buffer.shape[1] < layer.compress_rate
                assert buffer.untyped_storage().nbytes() <= (layer.compress_rate + 7) * 2 * 16 * 4
            assert not getattr(layer, "_rows", {})
            assert not getattr(layer, "_slices", {})


def test_caches_that_cannot_rewind_are_refused_by_name():
    model = tiny_target()
    with pytest.raises(ValueError, match="got a StaticCache"):
        make_rewindable(StaticCache(config=tiny_target((SLIDING,)).config, max_cache_len=32), model.config)
    with pytest.raises(ValueError, match="2 layers, DeepSeek-V4's config has 3"):
        make_rewindable(DynamicCache(config=tiny_target((SLIDING, SLIDING)).config), model.config)
    recording = DynamicCache(config=model.config)
    recording.activate_past_recording()
    forward(model, recording, random_ids(5))
    with pytest.raises(ValueError, match="start from a new cache"):
        make_rewindable(recording, model.config)


def test_other_models_keep_the_librarys_layers():
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

    assert not any(issubclass(cls, RewindableSlidingLayer) for cls in DYNAMIC_LAYER_TYPE_MAPPING.values())
