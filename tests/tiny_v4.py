"""A random DeepSeek-V4 small enough for hundreds of runs, and drafters for it.

Matrices have a standard deviation of 0.15, so that logits are not flat. `index_topk` exceeds the compressed
entries these tests reach: with fewer, ReLU scores of a random indexer tie exactly and even one-token decoding differs
from a full forward.
"""

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
MIXED = (SLIDING, CSA, HCA)
VOCAB_SIZE, MASK_TOKEN_ID = 64, 63


def tiny_config(
    layer_types=MIXED, *, window=8, csa=4, hca=8, hidden_size=32, hc_mult=2, vocab_size=VOCAB_SIZE, **kwargs
):
    """The random target's config; the first layer's MoE is hash-routed."""
    defaults = {
        "moe_intermediate_size": 16,
        "num_attention_heads": 2,
        "head_dim": 16,
        "q_lora_rank": 16,
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "partial_rotary_factor": 0.5,
        "num_hash_layers": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "index_topk": 512,
        "hc_sinkhorn_iters": 3,
        "initializer_range": 0.15,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        compress_rates={CSA: csa, HCA: hca},
        sliding_window=window,
        hc_mult=hc_mult,
        **{**defaults, **kwargs},
    )


def tiny_target(layer_types=MIXED, *, seed=0, **kwargs) -> DeepseekV4ForCausalLM:
    """A random target in eval mode with filled hash tables."""
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(tiny_config(layer_types, **kwargs)).eval()
    for layer in model.model.layers:
        if layer.mlp.is_hash:
            table = layer.mlp.gate.tid2eid
            table.copy_(torch.rand(table.shape[0], layer.mlp.gate.num_experts).topk(table.shape[1]).indices)
        if layer.self_attn.compressor is not None:
            torch.nn.init.normal_(layer.self_attn.compressor.position_bias, std=0.5)
    return model


def random_ids(length: int, *, seed=0, vocab_size=VOCAB_SIZE - 1) -> torch.LongTensor:
    """A prompt of shape (1, length) without the mask token."""
    return torch.randint(vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
