"""Compare a plain and a speculative run: where their ids part, and what was gained."""

import math
import time

import torch

from ..generation_hyperdflash import SpeculativeStats

# Forwards of one token and of a block round differently: by up to 1.3e-5 in a logit of the tiny target in fp32, and
# 0.13 in bf16, and the gap of two logits moves by up to twice that. Where two tokens' gap is at most this, rounding
# may explain that the other came. In fp32 so small a gap is too rare for a wrong token to hide behind it. In bf16 it
# proves nothing either way (a random target's logits move by more than 0.5): there the loop is held, exactly, against
# the target's own forwards of the same shapes (tests/audit.py).
TIE_GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


def timed_greedy(target, input_ids: torch.LongTensor, max_new_tokens: int, drafter=None, streamer=None):
    """One greedy `generate` call, with or without a drafter; returns its output and the seconds it took."""
    start = time.perf_counter()
    output = target.generate(
        input_ids,
        assistant_model=drafter,
        streamer=streamer,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
    )
    return output, time.perf_counter() - start


@torch.no_grad()
def first_difference(target, plain: torch.LongTensor, other: torch.LongTensor) -> tuple[int, float] | None:
    """Where two greedy runs part, and the gap of the two tokens there, by the target's own logits.

    Args:
        plain, other (`torch.LongTensor` of shape `(1, T)`): sequences with the same prompt, on any device.

    Returns:
        None when they are equal; else the position, and by how much the lower of the two tokens' logits is below the
        target's best one: at rounding level when a tie explains the difference. The gap is infinite, as no tie
        explains it, when one run only ends earlier or the logits are NaN.
    """
    length = min(plain.shape[1], other.shape[1])
    different = (plain[0, :length] != other[0, :length]).nonzero()
    if not len(different):
        return None if plain.shape == other.shape else (length, math.inf)
    position = int(different[0])
    prefix = plain[:, :position].to(target.device)
    logits = target(prefix, use_cache=False, logits_to_keep=1).logits[0, -1].float()
    tokens = [int(run[0, position]) for run in (plain, other)]
    gap = float(logits.max() - logits[tokens].min())
    return position, math.inf if math.isnan(gap) else gap


def describe(stats: SpeculativeStats) -> str:
    """One line: rounds, tau, accepted drafts, and acceptance by position."""
    rates = " ".join(f"{rate:.2f}" for rate in stats.per_position_acceptance_rates)
    return (
        f"{len(stats.num_drafts)} rounds, acceptance length (tau) {stats.acceptance_length:.2f}, "
        f"accepted drafts {stats.accepted_drafts:.2f} per round, by position {rates or '-'}"
    )


def accelerators(*models) -> set[torch.device]:
    """The accelerators that hold weights of the models; offloaded weights are computed with on the current one."""
    devices = {parameter.device for model in models for parameter in model.parameters()}
    found = {device for device in devices if device.type not in ("cpu", "meta")}
    if torch.device("meta") in devices and (current := torch.accelerator.current_accelerator(check_available=True)):
        found.add(current)
    return found


def time_at_rest(devices: set[torch.device]) -> float:
    """`time.perf_counter`, once the accelerators have done the work handed to them."""
    for device in devices:
        torch.accelerator.synchronize(device)
    return time.perf_counter()
