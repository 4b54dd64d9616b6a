"""Where bf16 is fast: a CPU without instructions for it takes many times as long as in fp32."""

import platform

import torch


def has_bf16(device: torch.device | str = "cpu") -> bool:
    """Whether a device computes in bf16 itself. Of CPUs those with AVX512-BF16 or AMX, and Arm's with its own bf16;
    accelerators are taken to."""
    if torch.device(device).type != "cpu":
        return True
    if platform.machine().lower() in ("arm64", "aarch64"):
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def load_dtype(dtype: str, device: torch.device | str = "cpu") -> str:
    """The dtype to load a target in: as asked for, but `"auto"`, its own, is float32 on a CPU without bf16."""
    return "float32" if dtype == "auto" and not has_bf16(device) else dtype
