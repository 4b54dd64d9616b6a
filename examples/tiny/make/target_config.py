"""The tiny target: a small, real DeepSeek-V4 with its native MTP module.

`config()` is its shape; `fill_hash_tables` gives the hash-routed layers their token -> expert tables, which a freshly
built model has all zero; `start_hyper_connections` gives the residual paths a start from which they stay different.
"""

import torch
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection, DeepseekV4HyperHead

VOCAB_SIZE = 2048


def config(vocab_size: int = VOCAB_SIZE) -> DeepseekV4Config:
    """V4-Flash's structure at about a fifty-thousandth of its size: all three attention types, hash and top-k MoE,
    four residual paths. `index_topk` covers every compressed entry of 2,048 positions, so the indexer, which only a
    loss of its own could train, never chooses."""
    return DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=128,
        moe_intermediate_size=48,
        num_hidden_layers=12,
        num_attention_heads=4,
        head_dim=64,
        q_lora_rank=64,
        partial_rotary_factor=0.25,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 5,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        num_hash_layers=2,
        sliding_window=64,
        hc_mult=4,
        o_groups=2,
        o_lora_rank=48,
        index_n_heads=4,
        index_head_dim=32,
        index_topk=512,
        max_position_embeddings=2048,
        initializer_range=0.04,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype="float32",
    )


def fill_hash_tables(model: DeepseekV4ForCausalLM, seed: int = 0) -> None:
    """Give each hash-routed layer a fixed table of `num_experts_per_tok` distinct experts for every token id."""
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        if layer.mlp.is_hash:
            table = layer.mlp.gate.tid2eid
            scores = torch.rand(table.shape[0], layer.mlp.gate.num_experts, generator=generator)
            table.copy_(scores.topk(table.shape[1], dim=-1).indices)


@torch.no_grad()
def start_hyper_connections(*models: nn.Module) -> None:
    """Start every hyper-connection of the models, in their order, so that the residual paths carry different things.

    transformers starts all bases at 0: mixing is uniform, every sub-layer (attention or MLP) reads and writes the mean
    of the paths, and training never leaves that. Published starts keep each path and rotate the one in use: mixing
    logits `6 I - 3` (mHC in PaddleFleet) or `8 I - 8` (mhc-lite, KromHC); reads of one home path per sub-layer,
    attention and MLP counted apart, with logits +3 and -3 (PaddleFleet); writes to one (mhc-lite). Small scales leave
    the part that depends on the token to training.

    Here: mixing logits 0 on the diagonal and -6 off it, the same matrix as `6 I - 3` (diagonal 0.993); sub-layer s
    reads path s mod m with logit +3 and writes path (s + 1) mod m with +3, the others with -3; scales 0.1. With +-1.5
    24 sub-layers write so much to every path that they grow alike (energy outside their mean 0.14 after 500 steps).
    `hc_head`, for which no source gives a start, reads as one more sub-layer would. With the library's start it learns
    to open for all paths within 300 steps, and what it returns is their mean again (cosine 0.99).
    """
    sublayer = 0
    for model in models:
        for module in model.modules():
            if isinstance(module, DeepseekV4HyperConnection):
                paths = 6 * torch.eye(module.hc_mult)
                read, write = paths[sublayer % len(paths)] - 3, paths[(sublayer + 1) % len(paths)] - 3
                module.base.copy_(torch.cat([read, write, (paths - 6).flatten()]))
                module.scale.fill_(0.1)
                sublayer += 1
        for module in model.modules():
            if isinstance(module, DeepseekV4HyperHead):
                paths = 6 * torch.eye(module.hc_mult)
                module.hc_base.copy_(paths[sublayer % len(paths)] - 3)
                module.hc_scale.fill_(0.1)
