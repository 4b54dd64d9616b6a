"""The residual paths of given token sequences, taken out of the target's forwards and written as one shard.

A forward holds several requests end to end. Which rows are whose is read from the forward's own inputs: a request
starts where the position is 0, and its token ids say which sequence it is. What does not match a wanted sequence is
left alone; a sequence that was cut in pieces is missing at the end, and named. Rows of padding, position 0 every one,
look like sequences of one token, which no plan has: an anchor needs a token before it and one behind.

Legend: T tokens, m residual paths, D hidden.
"""

import os
from pathlib import Path

import torch
from safetensors.torch import save


class RowCapture:
    """Sequences that are wanted, and the paths of those that a forward has shown."""

    def __init__(self, num_paths: int):
        self.num_paths, self.wanted, self.found = num_paths, set(), {}

    def start(self, rows: list[list[int]]) -> None:
        """Want these sequences, and forget all others."""
        self.wanted, self.found = set(map(tuple, rows)), {}

    def take(self, input_ids: torch.Tensor, positions: torch.Tensor, paths: torch.Tensor) -> None:
        """Keep the wanted rows of a forward: `(T,)`, `(T,)` and `(T, m * D)`, on any device."""
        if not self.wanted:
            return
        ids, places = input_ids.tolist(), positions.tolist()
        starts = [i for i, place in enumerate(places) if place == 0]
        for start, stop in zip(starts, [*starts[1:], len(places)], strict=False):
            row = tuple(ids[start:stop])
            if row in self.wanted and row not in self.found and places[start:stop] == list(range(len(row))):
                self.found[row] = paths[start:stop].to("cpu", torch.bfloat16, copy=True)

    def shard(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        """`context` `(T, m, D)` of all rows in their order, and `offsets` (rows + 1).

        Raises `ValueError` that says which rows were not seen whole, or are not finite.
        """
        missing = [i for i, row in enumerate(rows) if tuple(row) not in self.found]
        if missing:
            raise ValueError(
                f"{len(missing)} of {len(rows)} sequences never went through the target in one piece, the first of "
                f"them number {missing[0]} of the shard ({len(rows[missing[0]])} tokens): is max_num_batched_tokens "
                "too small, or did another class serve the target?"
            )
        parts = [self.found[tuple(row)] for row in rows]
        if broken := [i for i, part in enumerate(parts) if not part.isfinite().all()]:
            raise ValueError(f"the residual of sequence {broken[0]} of the shard holds NaN or infinite values")
        lengths = torch.tensor([0, *map(len, rows)])
        return {"context": torch.cat(parts).unflatten(-1, (self.num_paths, -1)), "offsets": lengths.cumsum(0)}


class FeatureWorker:
    """What vLLM's worker is asked for, by name (`worker_extension_cls`). All workers hold the same residual; the first
    keeps it. What goes wrong is returned: an error would leave vLLM's processes as a plain one with a traceback."""

    def start_features(self, rows: list[list[int]]) -> str | None:
        """Before the sequences are run."""
        if not hasattr(self.get_model(), "capture"):
            return "another class than the plug-in's serves the target: does VLLM_PLUGINS leave hyperdflash out?"
        if self.rank == 0:
            self.get_model().capture.start(rows)

    def write_features(self, file: str, mark: str, rows: list[list[int]]) -> str | None:
        """After that: write the shard, whole or not at all."""
        if self.rank == 0:
            try:
                tensors = self.get_model().capture.shard(rows)
                write_whole(Path(file), save(tensors, {"shard": mark}))
            except (ValueError, OSError) as error:
                return str(error)


def write_whole(file: Path, content: bytes) -> None:
    """To a temporary name, synced, then renamed."""
    partial = file.with_name(f".{file.name}.partial")
    with partial.open("wb") as handle:
        handle.write(content)
        handle.flush()
        os.fsync(handle.fileno())
    partial.replace(file)
