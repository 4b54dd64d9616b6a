"""HyperDFlash: lossless block speculative decoding for DeepSeek-V4, from its own un-collapsed residual.

    from hyperdflash import HyperDFlashModel            # or AutoModel.from_pretrained(..., trust_remote_code=True)
    target.generate(**inputs, assistant_model=drafter)  # greedy: the same ids as without the drafter

Importing `HyperDFlashModel` teaches `DeepseekV4ForCausalLM` assisted generation (`target_hyperdflash.py`). Exports
are lazy: importing this package alone loads neither torch nor transformers.
"""

from importlib import import_module

__version__ = "0.1.0"

_EXPORTS = {
    "HyperDFlashConfig": "configuration_hyperdflash",
    "HyperDFlashModel": "modeling_hyperdflash",
    "HyperDFlashGenerateOutput": "generation_hyperdflash",
    "SpeculativeStats": "generation_hyperdflash",
    "make_rewindable": "target_hyperdflash",
    "encode_messages": "encoding_deepseek_v4",
    "encode_with_mask": "encoding_deepseek_v4",
    "init_drafter": "training.init",
    "load_data": "training.data",
    "OnlineFeatures": "training.target",
    "CachedFeatures": "training.feature_cache",
    "SampleDataset": "training.dataset",
    "HyperDFlashTrainer": "training.trainer",
    "HyperDFlashTrainingArguments": "training.arguments",
    "export_drafter": "training.export",
}

__all__ = list(_EXPORTS)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
