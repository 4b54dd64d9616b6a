"""The entry point: what it registers, as often as it is called, and what it leaves alone."""

import json
import logging
import subprocess
import sys

import pytest

from hyperdflash_vllm import register


@pytest.fixture(scope="module")
def registry():
    from vllm import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    return ModelRegistry


def test_vllm_finds_the_plugin_by_its_entry_point_and_imports_no_model_for_it():
    """In a process of its own, as each of vLLM's."""
    script = (
        "import sys; from vllm import ModelRegistry; from vllm.plugins import load_general_plugins\n"
        "load_general_plugins(); print('DFlashHyperDraftModel' in ModelRegistry.get_supported_archs(), *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found, *modules = done.stdout.splitlines()[-1].split()
    assert found == "True"
    assert "hyperdflash_vllm.checks" in modules
    assert not {"hyperdflash_vllm.draft", "hyperdflash_vllm.target", "vllm.models.deepseek_v4"} & set(modules)


def test_registering_again_changes_nothing(registry):
    before = {name: repr(model) for name, model in registry.models.items()}
    register()
    register()
    assert {name: repr(model) for name, model in registry.models.items()} == before


def foreign_class() -> type:
    """A DeepSeek-V4 as a platform outside vLLM brings it."""
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

    return type("TheirDeepseekV4", (Qwen3ForCausalLM,), {"__module__": "vllm_theirs.models"})


@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "the class"])
def test_another_platforms_deepseek_v4_stays_and_the_log_says_so(registry, monkeypatch, caplog, by_name):
    monkeypatch.setattr(registry, "models", dict(registry.models))
    theirs = "vllm_theirs.models:DeepseekV4" if by_name else foreign_class()
    registry.register_model("DeepseekV4ForCausalLM", theirs)
    kept = registry.models["DeepseekV4ForCausalLM"]
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)  # vLLM's own handler takes it otherwise
    with caplog.at_level("INFO", "vllm.hyperdflash"):
        register()
    assert registry.models["DeepseekV4ForCausalLM"] is kept
    assert "DeepseekV4ForCausalLM is left to vllm_theirs.models" in caplog.text


def test_vllms_own_deepseek_v4_is_taken_over_however_it_is_registered(registry, monkeypatch):
    from vllm.models.deepseek_v4 import DeepseekV4ForCausalLM

    monkeypatch.setattr(registry, "models", dict(registry.models))
    registry.register_model("DeepseekV4ForCausalLM", DeepseekV4ForCausalLM)
    register()
    assert registry.models["DeepseekV4ForCausalLM"].module_name == "hyperdflash_vllm.target"


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


def test_the_native_drafts_of_v4_are_none_of_ours(registry, build, tmp_path, any_runner):
    """vLLM's own configurations of MTP and DSpark, neither of which runs on a CPU."""
    from vllm.engine.arg_utils import EngineArgs

    from hyperdflash_vllm.checks import draft_config, features_folder

    config = json.loads((build / "sliding" / "target" / "config.json").read_text())
    native = {"num_nextn_predict_layers": 1, "dspark_block_size": 3, "dspark_target_layer_ids": [0, 1]}
    (tmp_path / "config.json").write_text(json.dumps({**config, **native}))
    for method, architecture in (("mtp", "DeepSeekV4MTPModel"), ("dspark", "DSparkDraftModel")):
        args = EngineArgs(
            model=str(tmp_path),
            skip_tokenizer_init=True,
            max_model_len=512,
            speculative_config={"method": method, "num_speculative_tokens": 1},
        )
        config = args.create_engine_config()
        assert config.speculative_config.draft_model_config.architectures == [architecture]
        assert draft_config(config.speculative_config) is features_folder(config.additional_config) is None


def test_vllm_has_the_settings_that_are_refused_if_it_has_them():
    """The plug-in passes over one that a vLLM does not know."""
    from dataclasses import fields

    from vllm.config import ParallelConfig, SpeculativeConfig

    assert ParallelConfig(ubatch_size=2).use_ubatching
    names = {field.name for field in fields(SpeculativeConfig)}
    assert {"use_local_argmax_reduction", "num_speculative_tokens_per_batch_size"} <= names
