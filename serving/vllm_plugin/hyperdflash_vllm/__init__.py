"""HyperDFlash drafters in vLLM: the entry point, called in every process of vLLM, any number of times.

`target.py` has DeepSeek-V4 with its residual paths handed on, `draft.py` the draft model, `reducer.py` what makes one
vector of the paths, `checks.py` what is refused, `memory.py` the draft's share of the cache. Models are imported when
vLLM builds one.
"""

TARGET_ARCHITECTURE, DRAFT_ARCHITECTURE = "DeepseekV4ForCausalLM", "DFlashHyperDraftModel"


def register() -> None:
    """Register the two classes; the target's is vLLM's own to every draft but ours.

    The target's takes the place of vLLM's alone. Where another platform or plug-in has put its own DeepSeek-V4, that
    stays: nobody need have asked for a drafter of ours, and `checks.check_target_class` says so to whoever does.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .checks import TransformersFolder, logger

    registered = ModelRegistry.models.get(TARGET_ARCHITECTURE)  # by module and name, or the class itself
    found = getattr(registered, "module_name", None) or getattr(registered, "model_cls", type(None)).__module__
    if found.startswith("vllm."):
        ModelRegistry.register_model(TARGET_ARCHITECTURE, "hyperdflash_vllm.target:HyperDeepseekV4ForCausalLM")
    elif not found.startswith("hyperdflash_vllm."):
        logger.info("%s is left to %s: beside it no HyperDFlash drafter is served", TARGET_ARCHITECTURE, found)
    ModelRegistry.register_model(DRAFT_ARCHITECTURE, "hyperdflash_vllm.draft:DFlashHyperDraftModel")
    AutoConfig.register(TransformersFolder.model_type, TransformersFolder, exist_ok=True)
