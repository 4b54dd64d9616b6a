"""Holds an assisted greedy run against the target's own forwards of the same shapes.

In bf16 a block of several tokens rounds differently from single steps, so plain decoding's ids are no measure of the
loop. This is: every kept token is the argmax of the row that verified it, and the cache is what those forwards wrote.
"""

import torch
from tiny_v4 import assert_same_state
from transformers import DynamicCache

from hyperdflash.target_hyperdflash import make_rewindable


class ForwardAudit:
    """Records the target's forwards inside its `with`; `check` runs them again on a cache of its own."""

    def __init__(self, target):
        self.target, self.forwards = target, []

    def __enter__(self):
        self._handle = self.target.register_forward_hook(self._record, with_kwargs=True)
        return self

    def __exit__(self, *exc):
        self._handle.remove()

    def _record(self, module, args, kwargs, output):
        start = kwargs["cache"].get_seq_length() - kwargs["input_ids"].shape[1]
        ids = kwargs["input_ids"].clone()  # a view of the loop's buffer, where rejected drafts are overwritten
        self.forwards.append((start, {**kwargs, "input_ids": ids}, output.logits[0].clone()))

    @torch.no_grad()
    def check(self, output) -> None:
        """Raises `AssertionError` unless `output` (with its cache) is exactly what the forwards say."""
        ids = output.sequences[0]
        replay = make_rewindable(DynamicCache(config=self.target.config), self.target.config)
        ends = [start for start, _, _ in self.forwards[1:]] + [len(ids) - 1]
        for (start, kwargs, logits), end in zip(self.forwards, ends, strict=True):
            assert start == replay.get_seq_length()
            assert kwargs["input_ids"][0, 0] == ids[start]
            num_rows = kwargs["input_ids"].shape[1]
            again = self.target(**{**kwargs, "cache": replay}).logits[0]
            assert torch.equal(again, logits), f"logits of the forward at {start}"
            kept = ids[start + 1 : end + 1] if len(logits) == num_rows else ids[end : end + 1]
            assert logits[: len(kept)].argmax(-1).tolist() == kept.tolist(), f"tokens of the forward at {start}"
            replay.activate_past_recording()
            replay.crop(end - start - num_rows)
        assert_same_state(output.cache, replay, tolerance=0)
