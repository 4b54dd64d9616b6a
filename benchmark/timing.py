"""Where the time of a call goes, measured by hooks on the forwards of the target and its drafter.

    clock = Clock(target, drafter)
    with clock.running():
        clock.reset()
        target.generate(prompt, assistant_model=drafter)
    clock.verify_s, clock.draft_s, clock.outside_s      # seconds of every round

`timed_call` makes one call and returns everything that a benchmark records of it.

On accelerators every clock reading waits for the queued work, so that it is the work that is timed.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..generation.comparison import accelerators, time_at_rest
from ..generation_hyperdflash import SpeculativeStats, num_leading
from ..target_hyperdflash import RewindableSlidingLayer


class Clock:
    """Seconds inside the target's forward, the drafter's (including its heads and the target's embedding and LM head,
    which it shares), and `crop`.

    Args:
        target: the target.
        drafter (*optional*): a HyperDFlash drafter, or an MTP or DSpark module; None for plain decoding.

    Attributes (lists have one entry per step, which runs from the end of a target's forward to the end of the next):
        step_s, verify_s, draft_s, outside_s (`list[float]`): the whole step, and in it the target's forward, the
            drafter's with embedding and LM head, and the rest. The prefill is not a step.
        draft_by_round (`list[float]`): each forward of the drafter alone.
        crop_s (`float`): time in `crop`, within `timing_crop`.
    """

    def __init__(self, target: nn.Module, drafter: nn.Module | None = None):
        self.target, self.drafter = target, drafter
        # A drafter calls the target's embedding and LM head outside the target's forward: that is drafting time
        self._around_draft = [target.get_input_embeddings(), target.get_output_embeddings()]
        if drafter is not None:
            self._around_draft += [module for name, module in drafter.named_children() if name == "markov_head"]
        self._devices = accelerators(target, *([] if drafter is None else [drafter]))
        self.reset()

    def reset(self) -> None:
        """Forget everything; call it before each call that is timed."""
        self.crop_s, self.draft_by_round = 0.0, []
        self.step_s, self.verify_s, self.draft_s, self.outside_s = [], [], [], []
        self._starts, self._in_target, self._inside_s, self._last_end = {}, False, 0.0, None

    @contextmanager
    def running(self) -> Iterator["Clock"]:
        """Keep hooks on the modules within a `with`."""
        modules = [self.target, *([] if self.drafter is None else [self.drafter]), *self._around_draft]
        handles = [
            handle
            for module in modules
            for handle in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave),
            )
        ]
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def timing_crop(self) -> Iterator[None]:
        """Time every layer's `crop`; apart from `running`'s figures, which the extra clock readings would add to."""
        crop = RewindableSlidingLayer.crop

        def timed_crop(layer, tokens_to_remove):
            start = time.perf_counter()
            crop(layer, tokens_to_remove)
            self.crop_s += time.perf_counter() - start

        RewindableSlidingLayer.crop = timed_crop
        try:
            yield
        finally:
            RewindableSlidingLayer.crop = crop

    def _enter(self, module: nn.Module, args: tuple) -> None:
        # Within the target's forward its embedding and head are part of its time, and waiting would add to it
        if not self._in_target:
            self._starts[module] = time_at_rest(self._devices)
            self._in_target = module is self.target

    def _leave(self, module: nn.Module, args: tuple, output) -> None:
        if self._in_target and module is not self.target:
            return
        end = time_at_rest(self._devices)
        seconds = end - self._starts[module]
        if module is self.target:
            self._in_target = False
            if self._last_end is not None:  # the first forward is the prefill
                self.step_s.append(end - self._last_end)
                self.verify_s.append(seconds)
                self.draft_s.append(self._inside_s)
                self.outside_s.append(end - self._last_end - seconds - self._inside_s)
            self._last_end, self._inside_s = end, 0.0
        else:
            self._inside_s += seconds
            if module is self.drafter:
                self.draft_by_round.append(seconds)


class Timestamps:
    """A streamer that notes when the first tokens and the end came, and passes the tokens to `on_tokens`."""

    def __init__(self, on_tokens: Callable[[list[int]], None] | None = None):
        self.on_tokens = on_tokens
        self.is_prompt = True
        self.first = self.last = None
        self.num_first = 0

    def put(self, value) -> None:
        if self.is_prompt:
            self.is_prompt = False
        else:
            self.put_round(value.flatten().tolist(), [], 0)

    def put_round(self, new_ids: list[int], draft_ids: list[int], num_accepted: int) -> None:
        if self.first is None:
            self.first, self.num_first = time.perf_counter(), len(new_ids)
        if self.on_tokens is not None:
            self.on_tokens(new_ids)

    def end(self) -> None:
        self.last = time.perf_counter()


class LookupRounds:
    """Counts the rounds of prompt lookup, as transformers' own loop does not report them.

    Drafts are the tokens that a forward got after the last one; the stream then repeats the accepted ones. As in our
    own loop, the prefill is not a round, and drafts beyond the length limit do not count.
    """

    def __init__(self, target: nn.Module, max_new_tokens: int):
        self.target, self.room = target, max_new_tokens
        self.stats, self._drafts = SpeculativeStats(), None

    def __enter__(self):
        self._handle = self.target.register_forward_pre_hook(self._see, with_kwargs=True)
        return self

    def __exit__(self, *exc):
        self._handle.remove()

    def _see(self, module, args, kwargs):
        is_prefill = self._drafts is None
        self._drafts = [] if is_prefill else kwargs["input_ids"][0, 1:].tolist()

    def on_tokens(self, new_ids: list[int]) -> None:
        drafts = self._drafts[: self.room - 1]  # the target's own token takes the last place
        self.room -= len(new_ids)
        if drafts:
            agree = [a == b for a, b in zip(new_ids, drafts, strict=False)]
            self.stats.num_drafts.append(len(drafts))
            self.stats.num_accepted.append(num_leading(agree))


def timed_call(
    target: nn.Module, options: dict, ids: list[int], *, max_new_tokens: int, temperature: float, seed: int
) -> dict:
    """One `generate` call of a batch of one, with the `options` of a method (`methods.py`).

    Returns its figures under the names of a record. `decoding_seconds` are those from the first token to the end, and
    `num_timed_tokens` the tokens of that time. `step_seconds`, `verify_seconds` and `draft_seconds` are sums over the
    `num_steps` steps after the prefill.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    input_ids = torch.tensor([ids], device=target.device)
    assistant = options.get("assistant_model")
    clock = Clock(target, assistant)
    with ExitStack() as stack:
        stack.enter_context(clock.running())
        lookup = None
        if "prompt_lookup_num_tokens" in options:
            lookup = stack.enter_context(LookupRounds(target, max_new_tokens))
        timestamps = Timestamps(lookup and lookup.on_tokens)
        torch.manual_seed(seed)
        output = target.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            streamer=timestamps,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            **(sampling if temperature > 0 else {"do_sample": False}),
            **options,
        )
    new_ids = output.sequences[0, len(ids) :].tolist()
    stats = lookup.stats if lookup else output.speculation if assistant is not None else None
    return {
        "num_prompt_tokens": len(ids),
        "num_new_tokens": len(new_ids),
        "num_timed_tokens": len(new_ids) - timestamps.num_first,
        "decoding_seconds": timestamps.last - timestamps.first,
        "num_steps": len(clock.step_s),
        "step_seconds": sum(clock.step_s),
        "verify_seconds": sum(clock.verify_s),
        "draft_seconds": sum(clock.draft_s),
        "num_drafts": stats and stats.num_drafts,
        "num_accepted": stats and stats.num_accepted,
        "new_ids": new_ids,
    }
