"""Counts the bytes of tensors that are alive by watching every operation; fake tensors count too, and hold nothing."""

import weakref

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """`peak`: the most bytes that tensors made inside the block held at any time."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {
            id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if hasattr(leaf, "untyped_storage")
        }
        for leaf in tree_leaves(out):
            if not hasattr(leaf, "untyped_storage"):
                continue
            storage = leaf.untyped_storage()
            if storage in self.known or id(storage) in before:
                continue
            self.known.add(storage)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._free, storage.nbytes())
        return out

    def _free(self, size: int) -> None:
        self.live -= size
