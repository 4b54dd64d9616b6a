"""A DeepSeek-V4 of transformers as a checkpoint in the official naming, which is the only one that vLLM reads."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4ForCausalLM

RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
# What `save_pretrained` leaves of transformers' own names
RENAMED = {
    "embed_tokens.weight": "embed.weight",
    "hc_head.hc_fn": "hc_head_fn",
    "hc_head.hc_base": "hc_head_base",
    "hc_head.hc_scale": "hc_head_scale",
}


def official_name(name: str) -> str:
    """The official name of a tensor that `save_pretrained` wrote."""
    name = name.removeprefix("model.")
    return RENAMED.get(name, name.replace(".attn.norm.", ".attn.kv_norm."))


def official_config(config) -> dict:
    """`config.json` with the fields that vLLM reads."""
    ours = json.loads(config.to_json_string(use_diff=False))
    kept = (
        "bos_token_id eos_token_id hc_eps hc_mult hc_sinkhorn_iters head_dim hidden_act hidden_size index_head_dim "
        "index_n_heads index_topk initializer_range max_position_embeddings moe_intermediate_size n_routed_experts "
        "n_shared_experts norm_topk_prob num_attention_heads num_experts_per_tok num_hidden_layers "
        "num_key_value_heads o_groups o_lora_rank q_lora_rank rms_norm_eps rope_theta routed_scaling_factor "
        "scoring_func sliding_window swiglu_limit tie_word_embeddings vocab_size compress_rope_theta"
    )
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        **{name: ours[name] for name in kept.split()},
        "attention_bias": False,
        "qk_rope_head_dim": int(config.head_dim * config.partial_rotary_factor),
        "topk_method": "noaux_tc",
        "num_hash_layers": config.mlp_layer_types.count("hash_moe"),
        "compress_ratios": [RATIOS[layer_type] for layer_type in config.layer_types] + [0],
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
    }


def save_official(model: DeepseekV4ForCausalLM, folder: Path) -> None:
    """Write config and weights: bf16 but for what V4 keeps in fp32, and the hash tables."""
    keep = tuple(model._keep_in_fp32_modules_strict or ())
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    fp32 = {official_name(name) for name in load_file(file) if any(part in name for part in keep)}
    tensors = {official_name(name): tensor for name, tensor in load_file(file).items()}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and name not in fp32 and not _stays_fp32(name):
            tensors[name] = tensor.to(torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(official_config(model.config), indent=2))


def _stays_fp32(name: str) -> bool:
    return "hc_" in name or name.endswith((".gate.bias", ".attn_sink", ".ape"))
