"""HyperDFlash drafters in SGLang: the entry point, called once in every process of SGLang.

`models/` has what SGLang's registry is given: DeepSeek-V4 that hands on its residual paths, and the draft model.
`reducer.py` makes one vector of the paths (the file of the plug-in for vLLM), `checks.py` says what is refused.
"""

MODELS = "hyperdflash_sglang.models"


def register() -> None:
    """Register the two classes; the target's is SGLang's own to every draft but ours.

    Raises `ImportError` where SGLang lacks something that they are built on. SGLang logs that and goes on without
    them; a server that was given a HyperDFlash drafter then stops, as it does not know the draft's architecture.
    """
    from sglang.srt.models.registry import ModelRegistry
    from transformers import AutoConfig

    from .checks import TransformersFolder, is_sglangs_own, logger

    AutoConfig.register(TransformersFolder.model_type, TransformersFolder, exist_ok=True)
    registered = ModelRegistry.models.get("DeepseekV4ForCausalLM")
    if registered is not None and not is_sglangs_own(registered):
        logger.warning(
            "hyperdflash-sglang does nothing: DeepSeek-V4 is served by %s.%s already, which another package brought",
            registered.__module__,
            registered.__qualname__,
        )
        return
    ModelRegistry.register(MODELS, overwrite=True, strict=True)
