"""How many tokens fit into the cache beside a drafter, by vLLM's own planner: the table of `docs/serving.md`.

    make test-vllm-sources                                                               # unpacks vLLM's sources
    PYTHONPATH=serving/vllm_plugin .venv/bin/python serving/vllm_sources/draft_memory.py

V4-Flash with `--kv-cache-dtype fp8 --block-size 256`. Only sizes are worked out, so nothing of vLLM is run but the
planner and what the layers say of their pages; both are taken from the sources as they are, and so is the plug-in.
"""

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from vllm_sources import ROOT, run_alone

from hyperdflash_vllm.memory import DraftPages, tokens_that_fit

MODEL_LEN, BATCH_TOKENS, BLOCK = 131072, 8192, 256
RATIOS = [0, 0, *[4, 128] * 20, 4]  # of V4-Flash's 43 layers
HEAD_DIM, INDEX_DIM, INDEX_BYTES, WINDOW = 512, 128, 132, 128  # an indexer's key in fp8, with its scale
SWA_CACHE = {  # the defaults of `DeepseekV4SWACache`
    "bounded_replay": False,
    "block_size": 64,
    "dtype": torch.uint8,
    "packed_bytes_per_token": 584,
    "packed_page_alignment": 576,
    "packed_block_stride_alignment": None,
}
DRAFT_LAYERS, DRAFT_HEAD_DIM = 5, 128
# What the planner and the plug-in import, and do not use for this
UNUSED = """
config config.kv_transfer distributed distributed.kv_events envs logger model_executor.layers.attention_layer_base
multimodal.utils platforms utils.hashing utils.mem_utils utils.torch_utils v1.attention.backend
v1.attention.backends.registry v1.core.block_pool v1.core.kv_cache_config_builder v1.core.kv_cache_metrics
v1.hisparse.block_pool v1.hisparse.layout v1.request v1.utils
"""


@dataclass(frozen=True)
class Draft:
    """A drafter of five layers, as one of `ranks` processes holds it."""

    kv_heads: int = 8
    ranks: int = 4
    dtype: torch.dtype = torch.bfloat16
    sliding: bool = True


class Cache:
    """As much of `CacheConfig` as is read."""

    def __init__(self, layouts):
        self.block_size, self.cache_dtype, self.kv_cache_layout, self.layouts = BLOCK, "fp8_ds_mla", None, layouts
        self.skip_page_size_padded = self.num_gpu_blocks_override = self.prefix_cache_retention_interval = None

    def get_resolved_kv_cache_layout(self):
        return self.layouts[self.kv_cache_layout]


class MultipleOf:
    """Of positions in a page: what FlashAttention's and Triton's kernels take."""

    base = 16


class Planner:
    """vLLM's pages and planner."""

    def __init__(self):
        for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.utils"):
            package = sys.modules[name] = ModuleType(name)
            package.__path__ = [str(ROOT.joinpath(*name.split(".")[1:]))]
        sys.modules.update({f"vllm.{name}": MagicMock() for name in UNUSED.split()})
        sys.modules["vllm.utils.torch_utils"].get_dtype_size = lambda dtype: dtype.itemsize
        sys.modules["vllm.v1.attention.backend"].MultipleOf = MultipleOf
        sys.modules["vllm.v1.hisparse.layout"].get_hisparse_kv_cache_groups = lambda *args: None
        sys.modules["vllm.v1.core.kv_cache_config_builder"].KVCacheConfigBuilder = object
        sys.modules["vllm.config"].get_layers_from_vllm_config = lambda *args: self.layers
        self.pages = importlib.import_module("vllm.v1.kv_cache_interface")
        layouts = importlib.import_module("vllm.v1.kv_cache_layout").KVCacheLayout
        self.config = SimpleNamespace(
            cache_config=Cache(layouts),
            model_config=SimpleNamespace(max_model_len=MODEL_LEN),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            attention_config=SimpleNamespace(hisparse_config=None),
            max_in_flight_tokens=2 * BATCH_TOKENS,  # asynchronous scheduling, a GPU's default
        )

        self.layers = {
            name: SimpleNamespace(get_kv_cache_spec=lambda _, spec=spec: spec) for name, spec in self.target().items()
        }

    def said_by(self, file: str, name: str, **layer):
        """What a layer of vLLM with these attributes says of its pages."""
        known = {name: getattr(self.pages, name) for name in ("MLAAttentionSpec", "SlidingWindowMLASpec")}
        known["get_kv_quant_mode"] = lambda dtype: self.pages.KVQuantMode.NONE  # changes no size
        say = run_alone(file, f"{name}.get_kv_cache_spec", torch=torch, **known)["get_kv_cache_spec"]
        return say(SimpleNamespace(**layer, cache_config=self.config.cache_config), self.config)

    def target(self) -> dict:
        """The pages of V4-Flash, by layer; the same in every process."""
        v4, swa = "models/deepseek_v4", "v1/attention/backends/mla/sparse_swa.py"
        window = self.said_by(swa, "DeepseekV4SWACache", **SWA_CACHE, window_size=WINDOW, head_dim=HEAD_DIM)
        found = {}
        for i, ratio in enumerate(RATIOS):
            found[f"{i}.swa"] = window
            if not ratio:
                continue
            layer = {"compress_ratio": ratio, "head_dim": HEAD_DIM, "kv_cache_dtype": "fp8_ds_mla"}
            found[f"{i}.mla"] = self.said_by(f"{v4}/attention.py", "DeepseekV4Attention", **layer)
            found[f"{i}.state"] = self.state(ratio, HEAD_DIM)
            if ratio == 4:
                layer = {"compress_ratio": ratio, "head_dim": INDEX_BYTES, "dtype": torch.uint8}
                found[f"{i}.index"] = self.said_by(f"{v4}/attention.py", "DeepseekV4IndexerCache", **layer)
                found[f"{i}.index_state"] = self.state(ratio, INDEX_DIM)
        return found

    def state(self, ratio: int, head_dim: int):
        """The pages of what a compressor has not yet compressed."""
        overlap = 1 + (ratio == 4)
        return self.said_by(
            "models/deepseek_v4/compressor.py",
            "CompressorStateCache",
            block_size=4 if ratio == 4 else 8,
            state_dim=2 * overlap * head_dim,
            dtype=torch.float32,
            sliding_window=overlap * ratio,
        )

    def draft(self, draft: Draft) -> list:
        """A drafter's attention layers, as far as they describe their pages."""
        file = "model_executor/layers/attention/attention.py"
        known = {name: getattr(self.pages, name) for name in ("SlidingWindowSpec", "FullAttentionSpec")}
        known["get_kv_quant_mode"] = lambda dtype: self.pages.KVQuantMode.NONE
        known["AttentionType"] = SimpleNamespace(DECODER=1, ENCODER=2, ENCODER_ONLY=3)
        names = ("_largest_kernel_block_within", "Attention.get_kv_cache_spec")
        say = run_alone(file, *names, **known)["get_kv_cache_spec"]
        layer_class = type("Attention", (SimpleNamespace,), {"get_kv_cache_spec": say})
        kernel = SimpleNamespace(
            is_mla=lambda: False,
            customize_spec=lambda spec: spec,
            get_supported_kernel_block_sizes=lambda spec: [MultipleOf()],
        )
        return [
            layer_class(
                layer_name=f"draft.{i}",
                num_kv_heads=max(1, draft.kv_heads // draft.ranks),
                head_size=DRAFT_HEAD_DIM,
                head_size_v=DRAFT_HEAD_DIM,
                kv_cache_dtype=None,
                kv_cache_torch_dtype=draft.dtype,
                sliding_window=WINDOW if draft.sliding else None,
                attn_type=known["AttentionType"].DECODER,
                attn_backend=kernel,
            )
            for i in range(DRAFT_LAYERS)
        ]

    def share(self, draft: Draft, *, chosen: bool = True) -> float:
        """Tokens that fit beside a drafter, of those that fit without one; with vLLM's own pages unless `chosen`."""
        target = {name: layer.get_kv_cache_spec(None) for name, layer in self.layers.items()}
        layers = self.draft(draft)
        if chosen:
            DraftPages(layers)
        pages = {layer.layer_name: layer.get_kv_cache_spec(self.config) for layer in layers}
        return tokens_that_fit(self.config, {**target, **pages}) / tokens_that_fit(self.config, target)


ROWS = (
    ("8 key/value heads (the default), vLLM's own pages", {}, False),
    ("the same, the plug-in's pages", {}, True),
    ("the same, `kv_cache_dtype: fp8`", {"dtype": torch.float8_e4m3fn}, True),
    ("1 key/value head", {"kv_heads": 1}, True),
    ("8 key/value heads, full attention", {"sliding": False}, True),
    ("1 key/value head, full attention", {"sliding": False, "kv_heads": 1}, True),
)
RANKS = (1, 2, 4, 8)


def table(planner: Planner) -> list[str]:
    """The lines of the table, in Markdown."""
    lines = [
        "| drafter of five layers | " + " | ".join(f"TP {ranks}" for ranks in RANKS) + " |",
        "|---|" + "---:|" * len(RANKS),
    ]
    for name, options, chosen in ROWS:
        shares = [planner.share(Draft(**options, ranks=ranks), chosen=chosen) for ranks in RANKS]
        lines.append(f"| {name} | " + " | ".join(f"{share:.0%}" for share in shares) + " |")
    return lines


if __name__ == "__main__":
    print("\n".join(table(Planner())))
