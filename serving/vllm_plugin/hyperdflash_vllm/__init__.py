"""HyperDFlash drafters in vLLM: the entry point, called in every process of vLLM, any number of times.

`target.py` has DeepSeek-V4 with its residual paths handed on, `draft.py` the draft model, `reducer.py` what makes one
vector of the paths, `checks.py` what is refused. Models are imported when vLLM builds one.
"""

TARGET_ARCHITECTURE, DRAFT_ARCHITECTURE = "DeepseekV4ForCausalLM", "DFlashHyperDraftModel"


def register() -> None:
    """Register the two classes; the target's is vLLM's own to every draft but ours."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .checks import TransformersFolder

    ModelRegistry.register_model(TARGET_ARCHITECTURE, "hyperdflash_vllm.target:HyperDeepseekV4ForCausalLM")
    ModelRegistry.register_model(DRAFT_ARCHITECTURE, "hyperdflash_vllm.draft:DFlashHyperDraftModel")
    AutoConfig.register(TransformersFolder.model_type, TransformersFolder, exist_ok=True)
