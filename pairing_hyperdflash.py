"""Does this call suit a drafter, and does this drafter suit this target? One error, before any work.

A pair of other shapes is refused; a target of the same shape but other weights is told apart by its fingerprint: a few
numbers of its hc_head, final norm and embedding that `init` and training store in the drafter's config.
"""

import torch
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from transformers.utils import logging

logger = logging.get_logger(__name__)


def check_call(generation_mode, config) -> None:
    """Raises `ValueError` for options of `generate` that a drafter cannot honour."""
    if generation_mode != GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"a HyperDFlash drafter works with greedy decoding and sampling, not with {generation_mode.value} "
            f"(num_beams={config.num_beams}): leave out assistant_model or the beams"
        )
    for name in ("prompt_lookup_num_tokens", "assistant_early_exit", "assistant_ensemble_weight"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name}={getattr(config, name)} cannot be combined with a HyperDFlash drafter: unset it")
    if config.num_return_sequences > 1:
        number = config.num_return_sequences
        raise ValueError(f"num_return_sequences={number}: a drafter decodes one sequence; call generate for each")
    if config.num_assistant_tokens < 0:
        raise ValueError(f"num_assistant_tokens={config.num_assistant_tokens}: drafts a round are counted from 0")
    if config.guidance_scale not in (None, 1, 1.0):
        raise ValueError(
            f"guidance_scale={config.guidance_scale} runs a second forward of the target at every token and cannot be "
            "combined with a drafter: unset it"
        )
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} cannot be rewound for DeepSeek-V4: leave it unset"
        )
    if config.use_cache is False:
        raise ValueError("use_cache=False: a drafter needs the target's cache; set use_cache=True")


def check_shapes(config, target_config) -> None:
    """Raises `ValueError` for a target of other shapes than the drafter was made for."""
    for what, ours, theirs in (
        ("vocabulary", config.vocab_size, target_config.vocab_size),
        ("hidden size", config.target_hidden_size, target_config.hidden_size),
        ("hc_mult", config.hc_mult, target_config.hc_mult),
        ("number of layers", config.target_num_hidden_layers, target_config.num_hidden_layers),
    ):
        if ours != theirs:
            raise ValueError(
                f"this drafter was made for a target with {what} {ours}, but the target has {theirs}: "
                "make one with `hyperdflash init`"
            )


def check_pair(drafter, target) -> None:
    """Raises `ValueError` for a target of other shapes than the drafter's, or a mask token that cannot be one."""
    config, target_config = drafter.config, target.config
    config.validate_heads()  # `verify_cost` may have been set since
    check_shapes(config, target_config)
    if name := special_token_name(config.mask_token_id, target_config, target.generation_config):
        raise ValueError(
            f"mask_token_id {config.mask_token_id} is the target's {name}: a drafter needs its own mask token"
        )
    rows = target.get_input_embeddings().weight.shape[0]
    if config.mask_token_id >= rows:
        raise ValueError(f"mask_token_id {config.mask_token_id} is outside the target's {rows} embedding rows")
    if config.block_size < 2:
        raise ValueError(f"block_size {config.block_size} leaves no slot to draft: it counts the anchor")


def special_token_name(token_id: int, *configs) -> str | None:
    """Which of BOS, EOS and pad a token is in any of the configs (EOS may be a list there), or None."""
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        ids = [getattr(config, name) for config in configs]
        if any(token_id in (i if isinstance(i, list) else [i]) for i in ids):
            return name
    return None


def check_inputs(input_ids, generation_config, model_kwargs, synced_gpus) -> Cache:
    """The call's cache; raises `ValueError` for prompts, caches and modes that a drafter cannot work with."""
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"a drafter works with batch size 1, got {input_ids.shape[0]} prompts: call generate for each"
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds cannot be used: DeepSeek-V4's hash-routed layers need token ids, pass input_ids"
        )
    cache = model_kwargs.get("cache")
    if cache is None:
        raise ValueError("use_cache=False: a drafter needs the target's cache; set use_cache=True")
    if synced_gpus:
        raise ValueError("synced_gpus=True: a drafter does not support ZeRO-3 or FSDP generation across processes")
    mask = model_kwargs.get("attention_mask")
    prompt_length = mask.shape[1] if mask is not None else generation_config._mask_length
    if cache.get_seq_length() >= prompt_length:
        raise ValueError(
            f"the cache passed in holds {cache.get_seq_length()} positions, but the prompt has {prompt_length} tokens"
            ": pass the whole sequence, at least one token longer than the cache"
        )
    return cache


def target_fingerprint(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """A few numbers of each tensor, from values rounded to bf16: its root mean square and eight evenly spaced entries.

    Args:
        tensors: hc_head's three tensors, the final norm and some embedding rows, under the names of
        `fingerprint_tensors`.
    """
    fingerprint = {}
    for name, tensor in tensors.items():
        flat = tensor.detach().to("cpu", torch.bfloat16).float().flatten()
        picked = flat[torch.linspace(0, flat.numel() - 1, min(8, flat.numel())).long()]
        fingerprint[name] = [round(float(x), 8) for x in (flat.square().mean().sqrt(), *picked)]
    return fingerprint


def fingerprint_tensors(target: DeepseekV4ForCausalLM) -> dict[str, torch.Tensor]:
    """The tensors of a loaded target that identify it: hc_head, final norm, four embedding rows."""
    rows = target.get_input_embeddings().weight
    model = target.model
    return {
        "hc_head_fn": model.hc_head.hc_fn,
        "hc_head_base": model.hc_head.hc_base,
        "hc_head_scale": model.hc_head.hc_scale,
        "norm.weight": model.norm.weight,
        "embed.weight": rows[fingerprint_rows(rows.shape[0]).to(rows.device)],
    }


def fingerprint_rows(vocab_size: int) -> torch.LongTensor:
    """Four evenly spaced embedding rows."""
    return torch.linspace(0, vocab_size - 1, 4).long()


def compare_fingerprint(fingerprint: dict | None, target: DeepseekV4ForCausalLM) -> list[str]:
    """One line for each tensor of the target that differs from the fingerprint by more than bf16 rounding."""
    if fingerprint is None:
        return []
    if any(tensor.is_meta for tensor in (target.model.norm.weight, target.get_input_embeddings().weight)):
        logger.info("the target is offloaded: its weights are not compared with the drafter's fingerprint")
        return []
    return fingerprint_differences(fingerprint, fingerprint_tensors(target))


def fingerprint_differences(fingerprint: dict, tensors: dict[str, torch.Tensor]) -> list[str]:
    """`compare_fingerprint` with the target's tensors, as `fingerprint_tensors` names them."""
    lines = []
    for name, values in target_fingerprint(tensors).items():
        expected = fingerprint.get(name)
        if expected is None:
            lines.append(f"{name} is not in the drafter's fingerprint")
            continue
        scale = max(expected[0], 1e-6)
        if len(expected) != len(values) or max(abs(a - b) for a, b in zip(values, expected, strict=True)) > scale / 64:
            lines.append(f"{name} differs (root mean square {values[0]:.4g}, expected {expected[0]:.4g})")
    return lines
