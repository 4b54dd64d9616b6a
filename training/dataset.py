"""From rows to batches: samples with their stored features, padding, and the order of an epoch.

Legend: B batch, T sequence, m residual paths, D hidden.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

if TYPE_CHECKING:
    import datasets

    from .feature_cache import CachedFeatures

NO_SAMPLE = -1  # fills the last batch of an epoch: a sample without tokens, which adds nothing to loss and gradient


class SampleDataset(Dataset):
    """Rows of `training/data.py` as tensors, with the features of each where they are stored.

    Args:
        rows (`datasets.Dataset`): columns `input_ids`, `loss_mask`, `length`, `source`.
        features (`CachedFeatures`, *optional*): read in the loader's workers.
    """

    def __init__(self, rows: "datasets.Dataset", features: "CachedFeatures | None" = None):
        self.rows, self.features = rows, features

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        """A batch at once, as the DataLoader asks for it: a server is asked for all of its features together."""
        rows = {index: self.rows[index] for index in indices if index != NO_SAMPLE}
        stored = {}
        if self.features is not None:
            loaded = self.features.load([row["input_ids"] for row in rows.values()])
            stored = {NO_SAMPLE: self.features.filler(), **dict(zip(rows, loaded, strict=True))}
        samples = []
        for index in indices:
            # A filler is one token of zeros, with features of the shapes and dtypes that the rest of its batch has
            row = {"input_ids": [0], "loss_mask": [0]} if index == NO_SAMPLE else rows[index]
            ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])  # (T,)
            samples.append({"sample_id": index, "input_ids": ids, "loss_mask": mask, **stored.get(index, {})})
        return samples


class OnCpu:
    """What anchors are drawn from. Not a tuple, whose tensors would be moved to the device and copied back.

    Attributes:
        input_ids, loss_mask (`torch.Tensor` of shape `(B, T)`), sample_ids, lengths (`list[int]`): the batch's.
    """

    def __init__(self, batch: dict[str, torch.Tensor]):
        self.input_ids, self.loss_mask = batch["input_ids"], batch["loss_mask"]
        self.sample_ids, self.lengths = batch["sample_ids"].tolist(), batch["lengths"].tolist()


def collate(samples: list[dict]) -> dict[str, torch.Tensor | OnCpu]:
    """One batch, padded on the right: `input_ids` and `loss_mask` `(B, T)`, `sample_ids` and `lengths` `(B,)`, stored
    features `(B, T, m, D)`; and `on_cpu`, which stays there. Padding is never supervised."""
    batch = {
        "sample_ids": torch.tensor([sample["sample_id"] for sample in samples]),
        # 0 for a filler, whose one token is not of the data
        "lengths": torch.tensor([len(s["input_ids"]) if s["sample_id"] != NO_SAMPLE else 0 for s in samples]),
    }
    # Zeros, a real token's id: on the right of a sequence, causal attention hides them from all its tokens
    for name in samples[0].keys() - {"sample_id"}:
        batch[name] = pad_sequence([sample[name] for sample in samples], batch_first=True)
    return {**batch, "on_cpu": OnCpu(batch)}


class EpochSampler(Sampler[int]):
    """The order of every epoch, from seed and epoch alone, in whole global batches.

    The last batch is filled up with `NO_SAMPLE`, so that every process has the same number of batches and no sample
    counts twice.

    Args:
        lengths (`(N,)`): tokens of every sample.
        batch_size: samples of an optimizer step: of a device, times accumulation steps, times processes.
        group_by_length: batches of samples of similar length, cut from random pools of fifty batches.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, group_by_length: bool = False):
        self.lengths, self.batch_size, self.seed = torch.as_tensor(lengths), batch_size, seed
        self.group_by_length, self.epoch = group_by_length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size) * self.batch_size  # rounded up: the fillers count

    def __iter__(self) -> Iterator[int]:
        # A large factor: epoch 1 of seed 0 is not epoch 0 of seed 1
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator)
        if self.group_by_length:
            # Sorted in pools: sorting the whole set would give a sample the same neighbours in every epoch
            pools = order.split(50 * self.batch_size)
            order = torch.cat([pool[self.lengths[pool].argsort(descending=True, stable=True)] for pool in pools])
        filler = order.new_full((len(self) - len(order),), NO_SAMPLE)
        batches = torch.cat([order, filler]).view(-1, self.batch_size)
        if self.group_by_length:
            # Otherwise every pool would train from its longest samples to its shortest
            batches = batches[torch.randperm(len(batches), generator=generator)]
        return iter(batches.flatten().tolist())
