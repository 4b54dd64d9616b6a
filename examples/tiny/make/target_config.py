"""The tiny target: a small, real DeepSeek-V4 with its native MTP module.

`config()` is its shape; `fill_hash_tables` gives the hash-routed layers their token -> expert tables, which a freshly
built model has all zero.
"""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

VOCAB_SIZE = 4096


def config(vocab_size: int = VOCAB_SIZE) -> DeepseekV4Config:
    """V4-Flash's structure at about a fifty-thousandth of its size: all three attention types, hash and top-k MoE,
    four residual paths. `index_topk` covers every compressed entry of 2,048 positions, so the indexer, which only a
    loss of its own could train, never chooses."""
    return DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=192,
        moe_intermediate_size=88,
        num_hidden_layers=6,
        num_attention_heads=6,
        head_dim=64,
        q_lora_rank=96,
        partial_rotary_factor=0.5,
        num_experts_per_tok=2,
        n_routed_experts=6,
        layer_types=["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        num_hash_layers=2,
        sliding_window=64,
        hc_mult=4,
        o_groups=2,
        o_lora_rank=64,
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
