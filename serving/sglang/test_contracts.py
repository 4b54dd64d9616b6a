"""What serving in SGLang would rest on, and what stands in its way, held against SGLang's sources: `make test-sglang`.

Nothing here runs an engine, and no plug-in exists. A red test says that another SGLang than the pinned one changed one
of these facts: a door that was closed may be open, or one that a plug-in would go through is gone. `docs/serving.md`
draws the conclusions.
"""

import ast
import importlib
import logging
import pkgutil
import sys
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang_sources import calls, constant, find, load_file, methods, run_alone, tree
from transformers import Qwen3Config

from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.serving.vllm_format import vllm_config

V4 = "srt/models/deepseek_v4.py"
V4_ARGUMENTS = "srt/arg_groups/deepseek_v4_hook.py"
ARGUMENTS = "srt/arg_groups/speculative_hook.py"
CAPTURE = "srt/model_executor/model_runner_components/attention_backend_setup.py"
AUX = "srt/model_executor/model_runner_components/spec_aux_hidden_state.py"
LOGITS = "srt/layers/logits_processor.py"
DRAFT = "srt/models/dflash.py"
DRAFT_CONFIG = "srt/speculative/dflash_utils.py"
WORKER = "srt/speculative/dflash_worker_v2.py"
REGISTRY = "srt/models/registry.py"
AttentionType = SimpleNamespace(DECODER="causal", ENCODER_ONLY="both ways")


# ------------------------------------------------------------------------------------------------------ closed doors


@pytest.mark.parametrize("algorithm", ["DFLASH", "HYPERDFLASH"])
def test_beside_v4_sglang_asserts_that_no_dflash_and_no_plugins_algorithm_drafts(algorithm):
    """Blocker 1. A name of one's own (`SpeculativeAlgorithm.register`) meets the same assertion."""
    with pytest.raises(AssertionError, match="Only EAGLE and DSPARK"):
        check_v4_algorithm(algorithm)


@pytest.mark.parametrize("algorithm", ["EAGLE", "DSPARK", None])
def test_the_assertion_lets_native_drafting_through(algorithm):
    check_v4_algorithm(algorithm)


def check_v4_algorithm(algorithm: str | None) -> None:
    """Run the statement of SGLang that looks at the algorithm."""
    body = find(V4_ARGUMENTS, "apply_deepseek_v4_defaults").body
    tests = [s for s in body if isinstance(s, ast.If) and ast.unparse(s.test).startswith("cfg.speculative_algorithm")]
    assert len(tests) == 1, "SGLang checks V4's drafting elsewhere now: read it anew"
    cfg = SimpleNamespace(speculative_algorithm=algorithm, speculative_eagle_topk=1)
    exec(compile(ast.Module(tests, []), V4_ARGUMENTS, "exec"), {"cfg": cfg, "model_arch": "DeepseekV4ForCausalLM"})


def test_v4_has_no_capture_for_dflash_and_sglang_refuses_a_target_without():
    """Blocker 2: the method is asked for by name, whatever the draft's configuration says."""
    assert "set_dspark_layers_to_capture" in methods(V4, "DeepseekV4ForCausalLM")
    assert "set_dflash_layers_to_capture" not in methods(V4, "DeepseekV4ForCausalLM")
    family = ast.unparse(find(AUX, "_resolve_dflash_aux_hidden_state"))
    assert "config.dflash_use_aux_hidden_state = True" in family
    with pytest.raises(ValueError, match="implements neither"):
        configure_capture(SimpleNamespace(set_dspark_layers_to_capture=None))


def test_a_target_class_that_has_the_method_is_taken_and_given_the_layer_ids():
    """So a method that captures nothing is enough to pass blocker 2."""
    seen = []
    configure_capture(SimpleNamespace(set_dflash_layers_to_capture=seen.append))
    assert seen == [[42] * 4]


def configure_capture(model) -> None:
    run = run_alone(CAPTURE, "configure_aux_hidden_state_capture")["configure_aux_hidden_state_capture"]
    run(
        model=model,
        eagle_use_aux_hidden_state=False,
        eagle_aux_hidden_state_layer_ids=None,
        dflash_use_aux_hidden_state=True,
        dflash_target_layer_ids=[42] * 4,
        is_dspark=False,
    )


def test_v4s_own_capture_gives_the_mean_over_the_paths():
    """Blocker 3: DSpark's capture, the one that V4 has, cannot feed the reducer; and it drops the residual."""
    assert calls(find(V4, "DeepseekV4Model._forward_impl"), "mhc_stream_mean")
    assert (
        keyword_of_logits_call("hidden_states_before_norm") == "None if aux_hidden_states is not None else pre_hc_head"
    )


@pytest.mark.parametrize(
    ("cfg", "message"),
    [({"device": "cpu"}, "not supported by"), ({"device": "cuda", "pp_size": 2}, "only supports pp_size == 1")],
    ids=["on a CPU", "in a pipeline"],
)
def test_dflash_is_refused(cfg, message):
    """The CPU is why nothing here runs in an engine."""
    run = run_alone(
        ARGUMENTS,
        "_handle_dflash",
        resolving_view=lambda args: args,
        current_platform=SimpleNamespace(is_out_of_tree=lambda: False),
        attn_dp_enabled_of=lambda cfg: False,
    )["_handle_dflash"]
    with pytest.raises(ValueError, match=message):
        run(SimpleNamespace(**cfg))


# -------------------------------------------------------------------------------------------- the residual's way out


def test_v4s_forward_returns_all_paths_before_hc_head():
    """Flattened to `(T, hc_mult * D)`, beside the collapsed state."""
    forward = find(V4, "DeepseekV4Model._forward_impl")
    lines = [n.lineno for n in ast.walk(forward) if isinstance(n, ast.Assign) and ast.unparse(n) == FLATTEN]
    collapse = calls(forward, "hc_head")
    assert len(lines) == len(collapse) == 1
    assert lines[0] < collapse[0].lineno
    assert ast.unparse(forward.body[-1]) == "return (hidden_states, pre_hc_head)"


FLATTEN = "pre_hc_head = hidden_states.flatten(1)"


def keyword_of_logits_call(name: str) -> str:
    (call,) = calls(find(V4, "DeepseekV4ForCausalLM.forward"), "logits_processor")
    return next(ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == name)


def test_without_captured_layers_the_worker_is_handed_the_residual():
    """The logits processor prefers it to the normed state; DFLASH asks for every row, at prefill and verification."""
    store = run_alone(LOGITS, "LogitsProcessor._get_hidden_states_to_store", pack_aux_hidden_states=torch.cat)
    full = SimpleNamespace(need_capture=lambda: True, is_full=lambda: True)
    normed, residual = torch.zeros(3, 2), torch.ones(3, 8)
    kept = store["_get_hidden_states_to_store"](
        None, normed, residual, None, None, None, None, None, SimpleNamespace(capture_hidden_mode=full)
    )
    assert kept is residual
    worker = ast.unparse(find(WORKER, "DFlashWorkerV2"))
    assert worker.count("capture_hidden_mode=CaptureHiddenMode.FULL") >= 2
    assert "target_hidden=logits_output.hidden_states" in worker


def test_the_worker_gives_every_row_to_the_drafts_own_projection():
    """Where a subclass would reduce the paths: `project_target_hidden`, `(N, hc_mult * D)` -> `(N, D)`."""
    (call,) = calls(find(WORKER, "DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc"), "project_target_hidden")
    assert ast.unparse(call) == "self.draft_model.project_target_hidden(target_hidden)"
    project = find(DRAFT, "DFlashDraftModel.project_target_hidden")
    assert ast.unparse(project.body[-1]) == "return self.hidden_norm(projected)"


def test_v4_lends_embedding_and_head_as_the_worker_asks_for_them():
    worker = ast.unparse(find(WORKER, "DFlashWorkerV2"))
    assert "target_model.get_input_embeddings()" in ast.unparse(find(WORKER, "_resolve_dflash_embedding_module"))
    assert "getattr(target_model, 'lm_head', None)" in worker
    assert "get_input_embeddings" in methods(V4, "DeepseekV4ForCausalLM")
    assert "self.lm_head = ParallelLMHead" in ast.unparse(find(V4, "DeepseekV4ForCausalLM.__init__"))


# ------------------------------------------------------------------------------------------------ how code gets in


def test_an_external_package_adds_classes_and_its_own_win(tmp_path, monkeypatch):
    """`SGLANG_EXTERNAL_MODEL_PACKAGE`: each module's `EntryClass`, by class name; a V4 of the same name replaces
    SGLang's."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "__init__.py").touch()
    (tmp_path / "outside" / "v4.py").write_text("class DeepseekV4ForCausalLM: ...\nEntryClass = DeepseekV4ForCausalLM")
    monkeypatch.syspath_prepend(tmp_path)
    envs = SimpleNamespace(SGLANG_DISABLED_MODEL_ARCHS=SimpleNamespace(get=list))
    known = {"importlib": importlib, "pkgutil": pkgutil, "envs": envs, "lru_cache": lru_cache}
    external = run_alone(REGISTRY, "import_model_classes", **known)["import_model_classes"]("outside")
    assert [cls.__module__ for cls in external.values()] == ["outside.v4"]

    own = {"DeepseekV4ForCausalLM": "SGLang's", "Qwen3ForCausalLM": "SGLang's"}
    load = run_alone(REGISTRY, "_ModelRegistry._load_default_models", import_model_classes=lambda package: own)
    registry = SimpleNamespace(_default_models_loaded=False, models=external)
    load["_load_default_models"](registry)
    assert registry.models == own | external
    assert "SGLANG_EXTERNAL_MODEL_PACKAGE.get()" in ast.unparse(tree(REGISTRY))


def test_plugins_are_loaded_before_arguments_are_resolved_and_in_every_scheduler():
    assert constant("srt/plugins/__init__.py", "GENERAL_PLUGINS_GROUP") == "sglang.srt.plugins"
    serve = find("cli/serve.py", "serve")
    (load,) = calls(serve, "load_plugins")
    assert load.lineno < min(call.lineno for call in calls(serve, "run") if call.lineno > load.lineno)
    engine = find("srt/entrypoints/engine.py", "Engine.__init__")
    assert calls(engine, "load_plugins")[0].lineno < calls(engine, "server_args_class")[0].lineno
    assert calls(find("srt/managers/scheduler.py", "run_scheduler_process"), "load_plugins")


@pytest.fixture
def hooked(monkeypatch) -> ModuleType:
    """A module with a function `check`, which a hook is laid around, and SGLang's registry of hooks."""
    registry = load_file("srt/plugins/hook_registry.py")
    host = ModuleType("host_of_a_check")
    host.check = lambda algorithm: f"checked {algorithm}"
    monkeypatch.setitem(sys.modules, host.__name__, host)
    return SimpleNamespace(registry=registry, host=host, around=registry.HookType.AROUND)


def test_a_hook_can_be_laid_around_the_argument_check(hooked):
    """By SGLang's own interface: the way past blocker 1. It is imported where it is called, so the hook is seen."""
    hooked.registry.HookRegistry.register(
        "host_of_a_check.check", lambda check, algorithm: check("EAGLE"), hooked.around
    )
    hooked.registry.HookRegistry.apply_hooks()
    assert hooked.host.check("DFLASH") == "checked EAGLE"
    function = find("srt/arg_groups/model_hook.py", model_hook_name())
    imports = [ast.unparse(n) for n in ast.walk(function) if isinstance(n, ast.ImportFrom)]
    assert "from sglang.srt.arg_groups.deepseek_v4_hook import apply_deepseek_v4_defaults" in imports


def model_hook_name() -> str:
    """The function that runs V4's checks."""
    body = tree("srt/arg_groups/model_hook.py").body
    found = [n for n in body if isinstance(n, ast.FunctionDef) and calls(n, "apply_deepseek_v4_defaults")]
    assert len(found) == 1
    return found[0].name


def test_a_hook_on_a_name_that_is_gone_is_only_logged(hooked, caplog):
    """So a plug-in would have to look for itself whether its hooks were laid, and refuse loudly if not."""
    hooked.registry.HookRegistry.register("host_of_a_check.gone", lambda check: None, hooked.around)
    with caplog.at_level(logging.ERROR):
        hooked.registry.HookRegistry.apply_hooks()
    assert "Failed to apply hooks to host_of_a_check.gone" in caplog.text


# ----------------------------------------------------------------------------------------------- the drafter's folder


@pytest.fixture
def config() -> Qwen3Config:
    """The folder that `hyperdflash export --format vllm` writes, as SGLang would read it."""
    return Qwen3Config.from_dict(vllm_config(HyperDFlashConfig()))


PARSER = ("_cfg_get", "_get_text_config", "_get_dflash_config", "_parse_optional_int", "DFlashDraftConfig")
WINDOWS = ("is_nemotron_35_draft_config", "get_dflash_layer_types", "get_dflash_attention_sliding_window_size")


def test_the_folder_for_vllm_is_read_as_a_dflash_draft(config):
    """Block size, mask and as many features as the target has paths."""
    known = {"dataclass": dataclass, "Integral": Integral, "DEFAULT_DFLASH_MASK_TOKEN": "<|MASK|>"}
    parse = run_alone(DRAFT_CONFIG, *PARSER, "parse_dflash_draft_config", **known)["parse_dflash_draft_config"]
    read, ours = parse(draft_hf_config=config), HyperDFlashConfig()
    assert (read.block_size, read.mask_token_id) == (ours.block_size, ours.mask_token_id)
    assert len(read.resolve_target_layer_ids(target_num_layers=ours.target_num_hidden_layers)) == ours.hc_mult


def test_sliding_layers_are_causal_in_the_block_unless_the_configuration_says_otherwise(config):
    """A trap: vLLM's `dflash_config.causal` is not read. A folder for SGLang needs `is_causal: false` at the top; the
    window means the same in both."""
    window = HyperDFlashConfig().sliding_window
    assert not hasattr(config, "is_causal")
    assert sliding_layer(config) == (window - 1, AttentionType.DECODER)
    config.is_causal = False
    assert sliding_layer(config) == (window - 1, AttentionType.ENCODER_ONLY)


def sliding_layer(config) -> tuple:
    """Window to the left and direction of a draft layer."""
    windows = run_alone(DRAFT_CONFIG, *PARSER[:3], *WINDOWS, Sequence=list | tuple)
    names = ("_get_dflash_attention_type", "_get_dflash_layer_attention_params")
    run = run_alone(DRAFT, *names, **windows, AttentionType=AttentionType)
    return run["_get_dflash_layer_attention_params"](config, 0)


def test_tensors_that_are_missing_or_unknown_are_passed_over_in_silence():
    """A subclass would have to compare names, as the vLLM plug-in does."""
    load = run_alone(DRAFT, "DFlashDraftModel.load_weights")["load_weights"]
    draft = SimpleNamespace(named_parameters=lambda: [("fc.weight", torch.zeros(2))], projector_type=None)
    load(draft, [("reducer.hc_fn", torch.zeros(2))])


def test_the_drafts_cache_takes_v4s_fp8_unless_it_has_a_dtype_of_its_own():
    """`--speculative-draft-kv-cache-dtype bfloat16`. Fp8 would be its own dense cache, not V4's packed one."""
    assert cache_dtype(None) == torch.float8_e4m3fn
    assert cache_dtype("bfloat16") == torch.bfloat16


def cache_dtype(own: str | None) -> torch.dtype:
    """Of a draft beside a V4 whose dtype nobody set."""
    target = SimpleNamespace(hf_config=SimpleNamespace(architectures=["DeepseekV4ForCausalLM"]))
    known = {
        "model_config_of": lambda view: target,
        "logger": logging.getLogger("sglang"),
        "register_post_process": lambda function: function,
    }
    default = run_alone("srt/arg_groups/overrides.py", "_deepseek_v4_kv_cache_dtype", **known)
    v4 = default["_deepseek_v4_kv_cache_dtype"](SimpleNamespace(kv_cache_dtype="auto", device="cuda"))
    known = {"torch": torch, "_is_hip": False, "current_platform": SimpleNamespace(is_cpu=lambda: False)}
    run = run_alone("srt/mem_cache/kv_cache_dtype.py", "configure_kv_cache_dtype", **known)
    return run["configure_kv_cache_dtype"](
        server_args_kv_cache_dtype=v4["kv_cache_dtype"],
        model=None,
        model_dtype=torch.bfloat16,
        is_draft_worker=True,
        is_dflash=True,
        speculative_draft_attention_backend="flashinfer",
        speculative_draft_kv_cache_dtype=own,
    )[1]


def test_the_draft_has_an_attention_backend_of_its_own():
    """None of V4's can run a draft with keys and values."""
    assert "dsv4" not in constant("srt/arg_groups/choices.py", "DRAFT_ATTENTION_BACKEND_CHOICES")
