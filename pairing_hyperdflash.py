"""Can a drafter serve this call, and this target? If not, one error, before any work.

A pair whose shapes differ is refused; a target of the same shapes but other weights is recognised by its fingerprint:
a few numbers of its hc_head, final norm and embedding, which `init` and training store in the drafter's config.
"""

import inspect
from itertools import chain

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from transformers.utils import logging

logger = logging.get_logger(__name__)

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def check_call(generation_mode: GenerationMode, config: GenerationConfig) -> None:
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
    if not isinstance(config.num_assistant_tokens, int) or config.num_assistant_tokens < 0:
        raise ValueError(
            f"num_assistant_tokens={config.num_assistant_tokens} must be a whole number, the most drafts per round"
        )
    # The others are static, offloaded or quantised, and `make_rewindable` takes none of them
    if config.cache_implementation not in (None, "dynamic"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} cannot be rewound for DeepSeek-V4: leave it unset"
        )
    if config.use_cache is False:
        raise ValueError("use_cache=False: a drafter needs the target's cache; set use_cache=True")


def check_shapes(config: PreTrainedConfig, target_config: PreTrainedConfig) -> None:
    """Raises `ValueError` for a target whose shapes are not those the drafter was made for."""
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


def check_pair(drafter: PreTrainedModel, target: DeepseekV4ForCausalLM) -> None:
    """Raises `ValueError` for a target of other shapes than the drafter's, and for a mask token that cannot be one."""
    config, target_config = drafter.config, target.config
    config.validate_heads()  # `verify_cost` may have been set since
    check_shapes(config, target_config)
    if name := special_token_name(config.mask_token_id, target_config, target.generation_config):
        raise ValueError(
            f"mask_token_id {config.mask_token_id} is the target's {name}: a drafter needs its own mask token"
        )
    weight = getattr(target.get_input_embeddings(), "weight", None)
    # Resized embeddings have other rows than the config says; quantised ones may have no tensor to ask
    rows = weight.shape[0] if isinstance(weight, torch.Tensor) else target_config.vocab_size
    if config.mask_token_id >= rows:
        raise ValueError(f"mask_token_id {config.mask_token_id} is outside the target's {rows} embedding rows")


def special_token_name(token_id: int, *configs: PreTrainedConfig | GenerationConfig) -> str | None:
    """The field of BOS, EOS or pad that names this token in one of the configs (EOS may be a list), or None."""
    for name in SPECIAL_TOKENS:
        # A generation config may name other ids than the model's, and its EOS is what stops decoding
        ids = [getattr(config, name) for config in configs]
        if any(token_id in (i if isinstance(i, list) else [i]) for i in ids):
            return name
    return None


def check_inputs(
    input_ids: torch.LongTensor, generation_config: GenerationConfig, model_kwargs: dict, synced_gpus: bool
) -> Cache:
    """The call's cache; raises `ValueError` for prompts, caches and modes that a drafter cannot work with."""
    # Rows would accept different numbers of drafts, but the cache rewinds all rows alike
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"a drafter works with batch size 1, got {input_ids.shape[0]} prompts: call generate for each, or leave a "
            "pipeline's batch_size at 1"
        )
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "inputs_embeds cannot be used: DeepSeek-V4's hash-routed layers need token ids, pass input_ids"
        )
    if not input_ids.shape[1]:
        raise ValueError("the prompt is empty: pass at least one token, such as the beginning-of-sentence token")
    cache = model_kwargs.get("cache")
    if cache is None:
        raise ValueError("use_cache=False: a drafter needs the target's cache; set use_cache=True")
    # Processes would have to run the same number of forwards, but their rounds accept different numbers of drafts
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


def plain_weight(module: nn.Module) -> torch.Tensor | None:
    """A module's floating-point `weight`; None where it has none, as when it is quantised or wrapped in a module."""
    weight = getattr(module, "weight", None)
    # Quantised modules may keep packed integers under the same name
    return weight if isinstance(weight, torch.Tensor) and weight.is_floating_point() else None


def tensor_of(module: nn.Module) -> torch.Tensor | None:
    """The tensor that tells a module's device and dtype: its plain weight, else the first floating-point one."""
    if (weight := plain_weight(module)) is not None:
        return weight
    return next((t for t in chain(module.parameters(), module.buffers()) if t.is_floating_point()), None)


def target_fingerprint(tensors: dict[str, torch.Tensor]) -> dict[str, list[float]]:
    """A few numbers of each tensor, from values rounded to bf16: its root mean square and eight evenly spaced entries.

    Args:
        tensors: hc_head's three, the final norm and some embedding rows, under the names of `fingerprint_tensors`.
    """
    fingerprint = {}
    for name, tensor in tensors.items():
        # Through bf16, so that a target loaded in bf16 has the numbers of its fp32 files
        flat = tensor.detach().to("cpu", torch.bfloat16).float().flatten()
        picked = flat[torch.linspace(0, flat.numel() - 1, min(8, flat.numel())).long()]
        fingerprint[name] = [round(float(x), 8) for x in (flat.square().mean().sqrt(), *picked)]
    return fingerprint


def fingerprint_tensors(target: DeepseekV4ForCausalLM) -> dict[str, torch.Tensor]:
    """The tensors of a loaded target that identify it: hc_head, final norm, four rows of a plain embedding."""
    model = target.model
    tensors = {
        "hc_head_fn": model.hc_head.hc_fn,
        "hc_head_base": model.hc_head.hc_base,
        "hc_head_scale": model.hc_head.hc_scale,
        "norm.weight": model.norm.weight,
    }
    rows = plain_weight(target.get_input_embeddings())
    if rows is not None:
        tensors["embed.weight"] = rows[fingerprint_rows(rows.shape[0]).to(rows.device)]  # (4, D)
    return tensors


def fingerprint_rows(vocab_size: int) -> torch.LongTensor:
    """Four evenly spaced embedding rows."""
    # Few: of the embedding, `init` downloads these rows alone
    return torch.linspace(0, vocab_size - 1, 4).long()


def compare_fingerprint(fingerprint: dict | None, target: DeepseekV4ForCausalLM) -> list[str]:
    """One line for each tensor of the target that differs from the fingerprint by more than bf16 rounding."""
    if fingerprint is None:
        return []
    embedding = plain_weight(target.get_input_embeddings())
    # accelerate leaves meta tensors, which have no values, in place of offloaded ones
    if target.model.norm.weight.is_meta or (embedding is not None and embedding.is_meta):
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
        # Relative to the root mean square, as single entries may be near zero. Bf16 rounds by up to 1/256 of a
        # value, so 1/64 leaves room for entries four times as large
        scale = max(expected[0], 1e-6)
        if len(expected) != len(values) or max(abs(a - b) for a, b in zip(values, expected, strict=True)) > scale / 64:
            lines.append(f"{name} differs (root mean square {values[0]:.4g}, expected {expected[0]:.4g})")
    return lines


# ------------------------------------------------------------------------------------------------- `custom_generate/`


def generate(model, assistant_model=None, **kwargs):
    """`target.generate(custom_generate=<this repository>, trust_remote_code=True, assistant_model=drafter)`.

    The same decoding as `target.generate(assistant_model=drafter)`. Loading the drafter is what teaches DeepSeek-V4
    assisted decoding, so that nothing is needed here but the drafter.

    Args:
        model: the target, whose `generate` was called.
        assistant_model: the drafter.
        kwargs: all other arguments of `generate`.

    Returns what `model.generate` returns. Raises `ValueError` when `assistant_model` is not a HyperDFlash drafter.
    """
    if not hasattr(assistant_model, "assisted_decoding_loop"):
        given = "none" if assistant_model is None else type(assistant_model).__name__
        raise ValueError(
            f"this repository's generate needs a HyperDFlash drafter as assistant_model, got {given}: load one with "
            'drafter = AutoModel.from_pretrained("<this repository>", trust_remote_code=True) '
            "and pass assistant_model=drafter"
        )
    # transformers hands on the arguments that say where this file comes from, as if they were generate's own
    hub = ("revision", "cache_dir", "force_download", "local_files_only", "proxies", "repo_type", "token")
    kwargs = {name: value for name, value in kwargs.items() if name not in hub}
    return model.generate(assistant_model=assistant_model, **kwargs)


def custom_generate_source() -> str:
    """`custom_generate/generate.py` of a drafter's folder: `generate` above, and nothing else.

    The Hub's loader fetches that file for a call of `generate` only, so a loaded drafter cannot copy it.
    """
    return inspect.getsource(generate)
