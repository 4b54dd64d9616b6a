"""vLLM's own layers, without an engine, on an exported drafter: the states that transformers computes.

Only the attention kernel is written out in torch here (the engine's tests run the real one): projections, norms, RoPE,
MLP, the order of them and the loading of the file are vLLM's and the plug-in's.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn


class TorchAttention(nn.Module):
    """Keeps the context's keys and values, and lets a block see them and all of itself, within the window."""

    def __init__(self, attn, num_context: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = attn.num_heads, attn.num_kv_heads, attn.head_size
        self.window, self.num_context, self.impl, self.kv_cache = attn.sliding_window, num_context, self.keep(), None

    def keep(self):
        outer = self

        class Impl:
            @staticmethod
            def do_kv_cache_update(layer, k, v, cache, slots):
                outer.context = (k.clone(), v.clone())

        return Impl()

    def forward(self, q, k, v):
        q = q.view(-1, self.heads, self.head_dim)
        k, v = (
            torch.cat([kept, new.view(-1, self.kv_heads, self.head_dim)])
            for kept, new in zip(self.context, (k, v), strict=True)
        )
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1).float() for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * self.head_dim**-0.5
        positions = torch.arange(len(k))
        if self.window is not None:
            distance = (positions[self.num_context :, None] - positions).abs()
            scores = scores.masked_fill(distance >= self.window, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1).to(q.dtype)


@pytest.fixture
def drafter(build, one_process, any_runner, request, monkeypatch):
    """The plug-in's draft model in fp32 with its file loaded, and what transformers computed."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's CPU worker does
    folder = build / "sliding" / request.param
    spec = {
        "method": "dflash",
        "model": str(folder / "served"),
        "num_speculative_tokens": 3,
        "kv_cache_dtype": "bfloat16",
    }
    args = EngineArgs(
        model=str(build / "sliding" / "target"), skip_tokenizer_init=True, max_model_len=512, speculative_config=spec
    )
    config = args.create_engine_config()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # the layers ask again
    config.model_config.dtype = torch.float32
    draft_model_config = config.speculative_config.draft_model_config
    draft_model_config.dtype = torch.float32
    with set_current_vllm_config(config):
        ensure_model_parallel_initialized(1, 1)
        yield get_model(vllm_config=config, model_config=draft_model_config), load_file(folder / "states.safetensors")


def draft_states(model, want) -> torch.Tensor:
    """Of one block behind the context, as a runner asks for them."""
    context = model.combine_hidden_states(want["residual"])
    torch.testing.assert_close(context, want["reduced"], atol=1e-5, rtol=1e-5)
    C, K = len(context), len(want["embeds"])
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.attn = model.model._attn_layers[i] = TorchAttention(layer.self_attn.attn, C)
    with torch.no_grad():
        model.precompute_and_store_context_kv(context, torch.arange(C), torch.arange(C))
        return model(want.get("ids"), torch.arange(C, C + K), want["embeds"])


@pytest.mark.parametrize("drafter", ["random", "full", "both", "mean", "fc", "inherited", "markov"], indirect=True)
def test_vllms_layers_compute_the_drafters_states(drafter):
    model, want = drafter
    torch.testing.assert_close(draft_states(model, want), want["states"], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("drafter", ["markov", "chain"], indirect=True)
def test_vllms_logits_are_the_ones_that_the_drafters_loop_chooses_from(drafter):
    model, want = drafter
    states = draft_states(model, want)
    head = SimpleNamespace(apply=lambda layer, x, bias=None: x @ want["lm_head"].T)  # a runner shares the target's
    model.lm_head.quant_method = head
    logits = model.compute_logits(states[1:])
    torch.testing.assert_close(logits, want["logits"], atol=5e-3, rtol=1e-3)
    assert torch.equal(logits.argmax(-1), want["logits"].argmax(-1))


@pytest.mark.parametrize("drafter", ["random"], indirect=True)
def test_every_layer_is_bidirectional(drafter):
    assert drafter[0].get_draft_attn_causal() == [False, False]
