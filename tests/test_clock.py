"""Seconds of a call's parts: that the clock waits for every accelerator, and only where it must."""

from types import SimpleNamespace

import pytest
import torch
from tiny_v4 import greedy, random_ids, tiny_drafter, tiny_target

from hyperdflash.benchmark import timing as module
from hyperdflash.benchmark.timing import Clock
from hyperdflash.generation.comparison import accelerators, time_at_rest
from hyperdflash.generation.trace_recorder import RoundRecorder


def on(*devices):
    """A model with one weight on each device."""
    weights = [SimpleNamespace(device=torch.device(device)) for device in devices]
    return SimpleNamespace(parameters=lambda: weights)


@pytest.fixture
def waits(monkeypatch):
    """The devices that were waited for."""
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    return waits


def test_a_sharded_target_is_waited_for_on_all_its_devices(waits):
    devices = accelerators(on("cpu", "cuda:0", "cuda:1"), on("cuda:2", "cuda:0"))
    time_at_rest(devices)
    assert sorted(map(str, waits)) == ["cuda:0", "cuda:1", "cuda:2"]


def test_offloaded_weights_are_computed_with_on_the_current_accelerator(waits, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    assert accelerators(on("meta", "meta")) == {torch.device("cuda")}
    assert accelerators(on("cpu")) == set()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert accelerators(on("meta")) == set()


def test_the_recorder_of_rounds_waits_as_the_clock_does(waits, monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    monkeypatch.setattr("hyperdflash.generation.trace_recorder.accelerators", lambda *models: {torch.device("cuda:1")})
    with RoundRecorder(target, drafter, None):
        greedy(target, random_ids(4), 4, assistant_model=drafter)
    assert len(waits) > 4
    assert set(waits) == {torch.device("cuda:1")}


def test_inside_the_targets_forward_nothing_is_waited_for(monkeypatch):
    """Its embedding and head are hooked for the drafter's sake; two waits more a token would slow down plain decoding
    more than drafted."""
    target, readings = tiny_target(), []
    own = module.time_at_rest
    monkeypatch.setattr(module, "time_at_rest", lambda devices: readings.append(None) or own(devices))
    clock = Clock(target)
    with clock.running():
        greedy(target, random_ids(4), 5)
    assert len(clock.step_s) == 4
    assert len(readings) == 2 * 5
    drafter = tiny_drafter(target)
    clock = Clock(target, drafter)
    with clock.running():
        readings.clear()
        out = greedy(target, random_ids(4), 12, assistant_model=drafter, return_dict_in_generate=True)
    rounds = len(out.speculation.num_drafts)
    assert len(clock.draft_by_round) == rounds
    assert len(readings) == 2 * (1 + len(clock.step_s)) + 6 * rounds  # embedding, drafter and head of every draft
    assert sum(clock.draft_s) > sum(clock.draft_by_round)
