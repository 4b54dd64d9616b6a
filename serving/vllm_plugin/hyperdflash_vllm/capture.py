"""The residual paths of the prompts that a server runs, one file for each, where training's workers look for it.

    FOLDER/TARGET/PROMPT.safetensors     `context` (T, m, D) in bf16 and `input_ids` (T,); the metadata has a `crc32`

TARGET is a hash of the target's hc_head and final norm, PROMPT one of the token ids: whoever knows both knows the
name (`hyperdflash/training/feature_cache.py`, which has the same two functions). A forward holds several requests end
to end. Which rows are whose is read from the forward's own inputs: a prompt starts where the position is 0, and goes
on as long as positions do.

Legend: T tokens, m residual paths, D hidden.
"""

import hashlib
import logging
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import torch
from safetensors.torch import save

logger = logging.getLogger("vllm.hyperdflash")
HASHED = ("hc_head_base", "hc_head_fn", "hc_head_scale", "norm.weight")
WRITERS = 4  # threads


def target_name(tensors: dict[str, torch.Tensor]) -> str:
    """Of a target, by its tensors under their official names, wherever it lies and whatever it is called."""
    digest = hashlib.sha256()
    for name in HASHED:
        # The norm in bf16, as vLLM holds it; hc_head is fp32 everywhere
        tensor = tensors[name].bfloat16() if name == "norm.weight" else tensors[name]
        digest.update(tensor.detach().float().cpu().contiguous().numpy().astype("<f4").tobytes())
    return digest.hexdigest()[:16]


def prompt_name(input_ids: torch.Tensor) -> str:
    """Of a prompt, by its token ids `(T,)`."""
    return hashlib.sha256(input_ids.cpu().numpy().astype("<i4").tobytes()).hexdigest()[:32]


class PromptWriter:
    """Writes the paths of every prompt that goes through the target, in threads: the next forward does not wait.

    A file that exists is left alone. Of what cannot be written the reason stands beside it, in `PROMPT.error`.
    """

    def __init__(self, folder: Path, num_paths: int):
        self.folder, self.num_paths = folder, num_paths
        self.under_way, self.threads = set(), ThreadPoolExecutor(WRITERS)

    def open(self, tensors: dict[str, torch.Tensor]) -> None:
        """The target is known: its folder exists from now on."""
        self.folder = self.folder / target_name(tensors)
        self.folder.mkdir(exist_ok=True)

    def take(self, input_ids: torch.Tensor, positions: torch.Tensor, paths: torch.Tensor) -> None:
        """The prompts of a forward: `(T,)`, `(T,)` and `(T, m * D)`, on any device."""
        input_ids, positions = input_ids.cpu(), positions.cpu()
        # Rows of padding, position 0 every one, look like prompts of one token, of which nothing can be learned
        for start, stop in whole_prompts(positions.tolist()):
            ids = input_ids[start:stop].clone()
            file = self.folder / f"{prompt_name(ids)}.safetensors"
            if file in self.under_way or file.exists():
                continue
            self.under_way.add(file)
            # A copy: the next forward writes into the same buffer
            self.threads.submit(self._write, file, ids, paths[start:stop].to("cpu", torch.bfloat16, copy=True))

    def _write(self, file: Path, ids: torch.Tensor, paths: torch.Tensor) -> None:
        try:
            if not paths.isfinite().all():
                raise ValueError(f"the residual of a prompt of {len(ids)} tokens holds NaN or infinite values")
            context = paths.unflatten(-1, (self.num_paths, -1))
            file.parent.mkdir(exist_ok=True)  # somebody may have cleared the folder
            crc32 = zlib.crc32(context.view(torch.uint8).numpy().data)
            write_whole(file, save({"context": context, "input_ids": ids.int()}, {"crc32": str(crc32)}))
        except (ValueError, OSError) as error:
            logger.error("hyperdflash-vllm: %s was not written: %s", file, error)
            with suppress(OSError):  # perhaps the same full disk: who waits for the file is told to look at the log
                write_whole(file.with_suffix(".error"), str(error).encode())
        finally:
            self.under_way.discard(file)


def whole_prompts(positions: list[int]) -> list[tuple[int, int]]:
    """Where the prompts of at least two tokens start and stop among a forward's rows."""
    starts = [i for i, place in enumerate(positions) if i == 0 or place != positions[i - 1] + 1]
    parts = zip(starts, [*starts[1:], len(positions)], strict=True)
    return [(start, stop) for start, stop in parts if positions[start] == 0 and stop - start > 1]


def write_whole(file: Path, content: bytes) -> None:
    """To a name of its own, as several servers may write the same file, synced, then renamed."""
    partial = file.with_name(f".{file.name}.{uuid4().hex[:8]}.partial")
    try:
        with partial.open("wb") as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
