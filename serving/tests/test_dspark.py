"""vLLM's own DSpark class, without an engine, on a module that this package wrote: the states that it reads back.

The class in `vllm/models/deepseek_v4/nvidia/dspark.py`, its loading of `mtp.*`, its context and its heads run as they
are, and so do the projections, norms, rotary tables and shared experts of vLLM's layers. There is no such class for
CPUs, so its layers are vLLM's CPU ones. Written out in torch here, since their kernels need a GPU or bf16:

- hyper-connections and head collapse (`mhc_pre_tilelang`, `mhc_post_tilelang`, `hc_head_fused_kernel_tilelang`), by
  vLLM's own torch references where it has them;
- query norm, rotation and cache (`fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert`, without its FP8), and attention
  over the slots that `ComputeDSparkNoncausalSWAIndicesKernel` lists, with the output turned back;
- router and routed experts.
"""

import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

DEEPSEEK = "vllm.models.deepseek_v4"


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotated(attn, x: torch.Tensor, positions: torch.Tensor, *, back: bool = False) -> torch.Tensor:
    """Pairs of the last channels of `(T, ..., head_dim)`, by vLLM's own table of cosines and sines."""
    cos, sin = attn.rotary_emb.cos_sin_cache[positions].float().chunk(2, dim=-1)
    while cos.ndim < x.ndim:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rest, pairs = x[..., : -attn.rope_head_dim], x[..., -attn.rope_head_dim :].unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    sin = -sin if back else sin
    return torch.cat([rest, torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)], dim=-1)


def attention(attn, positions: torch.Tensor, hidden_states: torch.Tensor, llama_4_scaling=None) -> torch.Tensor:
    """Every query over the window before the block and the whole block."""
    qr, _, kv = attn._split_qkv_and_norm(attn._fused_wqa_wkv_gemm(hidden_states))
    q = attn._wq_b_proj(qr).view(len(positions), attn.n_local_heads, attn.head_dim)
    q = rotated(attn, rms(q, attn.eps), positions)
    keys = torch.cat([attn.context[-attn.window_size :], rotated(attn, kv, positions)])
    scores = torch.einsum("qhd,kd->hqk", q, keys) * attn.scale
    sink = attn.attn_sink[:, None, None].expand(-1, len(positions), 1)
    out = torch.einsum("hqk,kd->qhd", torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1], keys)
    out = rotated(attn, out, positions, back=True).reshape(len(positions), attn.n_local_groups, -1)
    weight = attn.wo_a.weight.view(attn.n_local_groups, attn.o_lora_rank, -1)
    return attn.wo_b(torch.einsum("tgi,goi->tgo", out, weight).flatten(1))


def experts(ffn, hidden_states: torch.Tensor, input_ids=None) -> torch.Tensor:
    scores = F.softplus(F.linear(hidden_states, ffn.gate.weight.float())).sqrt()
    chosen = (scores + ffn.gate.e_score_correction_bias).topk(ffn.n_activated_experts).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * ffn.routed_scaling_factor
    routed, out = ffn.experts.routed_experts, ffn.shared_experts(hidden_states)
    for token, (ids, row) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for expert, weight in zip(ids, row, strict=True):
            gate, up = (routed.w13_weight[expert] @ hidden_states[token]).chunk(2)
            limit = ffn.swiglu_limit
            out[token] += weight * (
                routed.w2_weight[expert] @ (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))
            )
    return out


def hc_pre(op, residual, fn, hc_scale, hc_base, *args, **kwargs):
    from vllm.model_executor.kernels.mhc.torch import mhc_pre_delayed_torch

    post, comb, _, pre = mhc_pre_delayed_torch(residual, fn, hc_scale, hc_base, *args, **kwargs)
    return post, comb, (pre.unsqueeze(-1) * residual).sum(1)


def hc_head(x, fn, scale, base, rms_eps, hc_eps):
    gate = torch.sigmoid(rms(x.flatten(1), rms_eps) @ fn.T * scale + base) + hc_eps
    return (gate.unsqueeze(-1) * x).sum(1)


@pytest.fixture
def vllm_class(monkeypatch):
    """vLLM's class with the kernels above."""
    from vllm.model_executor.kernels.mhc.torch import mhc_post_torch
    from vllm.model_executor.layers import mhc

    cpu = import_module(f"{DEEPSEEK}.cpu.model")

    class Layer(cpu.DeepseekV4DecoderLayer):
        """With the arguments and attributes of the NVIDIA layer that the class asks for."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.ffn.use_native_mega_moe, self.ffn.n_redundant_experts = False, 0
            self.ffn.finalize_mega_moe_weights = lambda: None

        def forward(self, *args, mega_gate_metadata=None):
            return super().forward(*args)

    nvidia = ModuleType(f"{DEEPSEEK}.nvidia.model")
    vars(nvidia).update(
        DeepseekV4DecoderLayer=Layer,
        DeepseekV4MixtureOfExperts=type("MixtureOfExperts", (), {"extract_moe_parameters": lambda self, moe: None}),
        DeepseekV4Model=cpu.DeepseekV4Model,
        DeepseekV4MoE=cpu.DeepseekV4MoE,
        _use_sequence_parallel=lambda config: False,
        make_deepseek_v4_expert_params_mapping=None,
        prepare_mega_gate_routing_metadata=None,
    )
    monkeypatch.setitem(sys.modules, nvidia.__name__, nvidia)
    monkeypatch.setattr(torch.cuda, "Event", object)  # which the layers make, and CPUs never wait for
    module = import_module(f"{DEEPSEEK}.nvidia.dspark")
    monkeypatch.setattr(mhc.MHCPreOp, "forward", hc_pre)
    monkeypatch.setattr(mhc.MHCPostOp, "forward", lambda op, *args: mhc_post_torch(*args))
    monkeypatch.setattr(module, "mhc_post_tilelang", lambda x, *args: x)  # vLLM's CPU layer has applied it
    monkeypatch.setattr(module, "hc_head_fused_kernel_tilelang", hc_head)
    monkeypatch.setattr(cpu.DeepseekV4CPUAttention, "forward", attention)
    monkeypatch.setattr(cpu.DeepseekV4MoE, "forward", experts)

    def insert(attn, kv, positions, slots):
        attn.context = rotated(attn, kv, positions)

    monkeypatch.setattr(module, "_insert_context_kv", insert)
    yield module.DSparkDeepseekV4ForCausalLM
    sys.modules.pop(module.__name__)


@torch.no_grad()
def test_vllms_class_computes_the_modules_states_logits_and_confidence(
    build, one_process, any_runner, vllm_class, monkeypatch
):
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.torch_utils import set_default_torch_dtype

    folder = build / "sliding" / "dspark"
    want = load_file(folder / "states.safetensors")
    spec = {"method": "dspark", "num_speculative_tokens": 5}
    args = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=512, speculative_config=spec)
    config = args.create_engine_config()
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # the layers ask again
    config.model_config.dtype = config.speculative_config.draft_model_config.dtype = torch.float32
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        ensure_model_parallel_initialized(1, 1)
        model = vllm_class(vllm_config=config)
        loaded = model.load_weights(iter(load_file(folder / "model.safetensors").items()))
        shared = {"model.embed_tokens.weight", "lm_head.weight"}
        assert loaded == {name for name, _ in model.named_parameters()} - shared
        model.lm_head.weight.copy_(want["lm_head"])
        for layer in model.modules():
            layer.cpu_linear = F.linear  # as vLLM's loader does where it has no packed kernel
        C, K = len(want["residual"]), len(want["embeds"])
        context = model.combine_hidden_states(want["residual"].mean(1))  # as the target's model averages its paths
        slots = torch.arange(C)
        model.precompute_and_store_context_kv(context, slots, [slots] * 3)
        hidden = model(None, torch.arange(C, C + K), want["embeds"])
        torch.testing.assert_close(hidden, want["collapsed"], atol=2e-5, rtol=1e-5)
        states = model.markov_embed(want["ids"])
        torch.testing.assert_close(model.compute_logits(hidden), want["logits"], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(model.markov_bias(states), want["bias"], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(model.compute_confidence(hidden, states), want["confidence"], atol=2e-5, rtol=1e-5)
