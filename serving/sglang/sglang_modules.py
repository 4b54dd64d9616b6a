"""SGLang's own modules where they load on a CPU: models, layers, the logits processor, the drafting.

The wheel is not installed: its folder is put on the path, with the packages of `modules.txt` behind everything else.
Its `__init__.py` is passed over, which imports the front end. What cannot load, or has no part in what is computed, is
empty.
"""

import importlib.machinery
import os
import sys
import tempfile
from types import ModuleType, SimpleNamespace

import torch
from sglang_sources import ROOT

STUBS = {
    "IPython": "notebooks",
    "IPython.display": "notebooks",
    "torchvision": "images",
    "torchvision.transforms": "images",
    "torchvision.transforms.functional": "images",
    "vllm": "off CUDA, SGLang's rotary embedding takes a kernel from it, which its forward in torch does not call",
    "vllm._custom_ops": "the same",
}


class Stub(ModuleType):
    """Any name imported from it is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load() -> None:
    """Make `sglang.srt` importable, publish the configuration of a server on a CPU and start its one rank, once.

    The registry is told to import this plug-in's models alone (SGLANG_EXTERNAL_MODEL_PACKAGE): all of SGLang's take a
    minute.
    """
    if "sglang.srt" in sys.modules:
        return
    from transformers import AutoProcessor  # noqa: F401  before torchvision is a stub

    for name in STUBS:
        sys.modules[name] = stub = Stub(name)
        stub.__path__, stub.__spec__ = [], importlib.machinery.ModuleSpec(name, None)
    sys.modules["sglang"] = package = ModuleType("sglang")
    package.__path__ = [str(ROOT)]
    sys.path.append(str(ROOT.parent / "modules"))
    os.environ["SGLANG_EXTERNAL_MODEL_PACKAGE"] = "hyperdflash_sglang.models"

    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.models import registry  # noqa: F401  before what it imports
    from sglang.srt.runtime_context import get_parallel, publish
    from sglang.srt.server_args import ServerArgs

    publish(ServerArgs(model_path="dummy", device="cpu"), role="scheduler")
    get_parallel().override_permanently(tp_rank=0, pp_rank=0)
    rendezvous = f"file://{tempfile.mkdtemp()}/rendezvous"
    init_distributed_environment(1, 0, rendezvous, local_rank=0, backend="gloo")
    initialize_model_parallel()


class TorchAttention(torch.nn.Module):
    """The attention kernel, written out: a block sees the context's keys and values and all of itself, within the
    window of SGLang's layer (which leaves out the token itself). The one part that cannot run here."""

    def __init__(self, attn):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = attn.tp_q_head_num, attn.tp_k_head_num, attn.head_dim
        self.layer_id, self.window, self.scaling = attn.layer_id, attn.sliding_window_size, attn.scaling
        self.causal = attn.attn_type.value == "decoder"
        self.k_scale = self.v_scale = None

    def forward(self, q, k, v, pool):
        q = q.view(-1, self.heads, self.head_dim)
        k, v = (
            torch.cat([kept, new.view(-1, self.kv_heads, self.head_dim)])
            for kept, new in zip(pool.kept[self.layer_id], (k, v), strict=True)
        )
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scaling
        positions = torch.arange(len(k))
        distance = positions[-len(q) :, None] - positions
        if self.window > -1:
            scores = scores.masked_fill(distance.abs() > self.window, float("-inf"))
        if self.causal:
            scores = scores.masked_fill(distance < 0, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)


class Pool:
    """The draft's cache: keeps what the context is written as, by layer."""

    def __init__(self):
        self.kept = {}

    def set_kv_buffer(self, attn, loc, k, v, k_scale, v_scale) -> None:
        self.kept[attn.layer_id] = (k.clone(), v.clone())


def no_sync() -> SimpleNamespace:
    """One process: a token is what it is."""
    return SimpleNamespace(sync=lambda site, tokens: tokens)
