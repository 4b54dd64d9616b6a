"""A device that is not there: CPU tensors with another device's label, which mix with others only as CUDA's do.

    with PretendDevice() as device:
        device.move(target, drafter)
        target.generate(prompt, assistant_model=drafter)
    device.reads                # how many values reached Python, by the line of ours that asked

Every operation that torch is asked for goes through `__torch_function__`: results take the label of what they were
made from, operations on tensors of two devices fail, and what would wait for the device is counted.
"""

import collections
import os
import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")

TO_HOST = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal", "allclose"}


class PretendDevice(TorchFunctionMode):
    """`reads`: a `Counter` of `file:line` to the transfers from the device made there; `writes`: to the device, of
    whole tensors or of lists used as an index."""

    def __init__(self, name: str = "cuda:0"):
        super().__init__()
        self.device = torch.device(name)
        self.reads, self.writes = collections.Counter(), collections.Counter()
        self.largest_read = 0  # values of the largest tensor that was copied from the device

    def move(self, *models) -> None:
        """Labels a model's weights and buffers as this device's, whose kernels are the CPU's: one way of running
        experts counts integers, which the CPU has no kernel for."""
        for model in models:
            if "grouped_mm" in str(model.config._experts_implementation):
                model.set_experts_implementation("batched_mm")
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.pretended = self.device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__":  # properties of a tensor
            return self._property(func, args)
        if name in ("to", "cpu", "cuda"):
            return self._transfer(name, args, kwargs)
        tensors = list(_tensors((args, kwargs)))
        wanted = kwargs.get("device")
        device = self._common_device(name, tensors)
        if wanted is not None:
            device, kwargs["device"] = torch.device(wanted), CPU
        self._count(name, args, device)
        return self._labelled(func(*args, **kwargs), device)

    def _property(self, func, args):
        owner = getattr(func, "__self__", None)
        if owner is torch.Tensor.device:
            return _device(args[0])
        if owner is torch.Tensor.is_cuda:
            return _device(args[0]).type == "cuda"
        return self._labelled(func(*args), _device(args[0]))

    def _transfer(self, name: str, args, kwargs):
        source, *rest = args
        like = [x for x in rest if isinstance(x, torch.Tensor)]
        dtypes = [x for x in (*rest, kwargs.get("dtype")) if isinstance(x, torch.dtype)] + [x.dtype for x in like]
        devices = [x for x in (*rest, kwargs.get("device")) if isinstance(x, (torch.device, str))]
        devices += [_device(x) for x in like] or [_device(source)]
        device = {"cpu": CPU, "cuda": self.device}.get(name) or torch.device(devices[0])
        moves = device != _device(source)
        if moves:
            (self.reads if device == CPU else self.writes)[_line()] += 1
            self.largest_read = max(self.largest_read, source.numel() if device == CPU else 0)
        result = torch.Tensor.to(source, (dtypes or [source.dtype])[0], copy=moves or kwargs.get("copy", False))
        return self._labelled(result, device)

    def _common_device(self, name: str, tensors) -> torch.device:
        devices = {_device(x) for x in tensors if x.ndim}  # a number on the CPU may join a tensor anywhere
        if name in ("copy_", "__getitem__", "index", "__setitem__"):
            if name == "copy_" and len(devices) > 1:
                (self.reads if _device(tensors[0]) == CPU else self.writes)[_line()] += 1
            elif _device(tensors[0]) == CPU and len(devices) > 1 and name == "__getitem__":
                raise RuntimeError("indices should be on the same device as the indexed tensor (cpu)")
            return _device(tensors[0])
        if len(devices) > 1:
            raise RuntimeError(f"{name}: expected all tensors on one device, got {sorted(map(str, devices))}")
        return devices.pop() if devices else max((_device(x) for x in tensors), key=str, default=CPU)

    def _count(self, name: str, args, device: torch.device) -> None:
        if device == CPU:
            return
        index = args[1] if name in ("__getitem__", "__setitem__") else None
        parts = index if isinstance(index, tuple) else (index,)
        if name in TO_HOST or any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in parts):
            self.reads[_line()] += 1
        self.writes[_line()] += sum(isinstance(x, (list, range)) for x in parts)

    def _labelled(self, result, device: torch.device):
        for tensor in _tensors(result):
            tensor.pretended = device
        return result


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _device(tensor: torch.Tensor) -> torch.device:
    return vars(tensor).get("pretended", CPU)


def _line() -> str:
    """The line of this project that asked torch, or "library" where a line of another package did."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or f"{os.sep}torch{os.sep}" in frame.f_code.co_filename:
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    is_ours = path.is_relative_to(ROOT) and ".venv" not in path.parts
    return f"{path.relative_to(ROOT)}:{frame.f_lineno}" if is_ours else "library"
