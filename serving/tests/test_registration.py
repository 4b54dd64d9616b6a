"""The entry point: what it registers, as often as it is called, and what it leaves alone."""

import pytest

from hyperdflash_vllm import register


@pytest.fixture(scope="module")
def registry():
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return ModelRegistry


def test_vllm_finds_the_plugin_by_its_entry_point(registry):
    assert "DFlashHyperDraftModel" in registry.get_supported_archs()


def test_registering_again_changes_nothing(registry):
    before = {name: repr(model) for name, model in registry.models.items()}
    register()
    register()
    assert {name: repr(model) for name, model in registry.models.items()} == before


def test_the_classes_are_vllms_own_with_our_draft_beside_them(registry):
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
    from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

    target = registry.models["DeepseekV4ForCausalLM"].load_model_cls()
    draft = registry.models["DFlashHyperDraftModel"].load_model_cls()
    assert target is not DeepseekV4ForCausalLM
    assert issubclass(target, DeepseekV4ForCausalLM)
    assert issubclass(draft, DFlashQwen3ForCausalLM)
    assert "hyperdflash" not in registry.models["DFlashDraftModel"].module_name


def test_a_folder_for_transformers_is_refused_with_the_command(registry, build):
    from vllm.transformers_utils.config import get_config

    with pytest.raises(ValueError, match="hyperdflash export DRAFTER OUT --format vllm"):
        get_config(str(build / "sliding" / "silent" / "hf"), trust_remote_code=False)
