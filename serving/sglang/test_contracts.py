"""What the plug-in rests on in SGLang's sources, where none of it runs on a CPU: `make test-sglang`.

`test_plugin.py` runs what does. A red test says that another SGLang than the pinned one changed one of these facts: a
door that the plug-in goes through is gone, or one that was closed may be open.
"""

import ast
import importlib
import logging
import pkgutil
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
from sglang_sources import calls, constant, find, methods, run_alone, tree

from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.serving.sglang_format import sglang_config

V4 = "srt/models/deepseek_v4.py"
V4_ARGUMENTS = "srt/arg_groups/deepseek_v4_hook.py"
ARGUMENTS = "srt/arg_groups/speculative_hook.py"
AUX = "srt/model_executor/model_runner_components/spec_aux_hidden_state.py"
DRAFT = "srt/models/dflash.py"
WORKER = "srt/speculative/dspark_components/dspark_worker_v2.py"
PROPOSER = "srt/speculative/dspark_components/dspark_draft.py"
VERIFIER = "srt/speculative/dspark_components/dspark_verify.py"
MODEL_CONFIG = "srt/configs/model_config.py"
REGISTRY = "srt/models/registry.py"


# ------------------------------------------------------------------------------------------------------------- doors


@pytest.mark.parametrize("algorithm", ["DFLASH", "HYPERDFLASH"])
def test_beside_v4_sglang_asserts_that_no_dflash_and_no_plugins_algorithm_drafts(algorithm):
    """So it is DSPARK. A name of one's own (`SpeculativeAlgorithm.register`) meets the same assertion."""
    with pytest.raises(AssertionError, match="Only EAGLE and DSPARK"):
        check_v4_algorithm(algorithm)


@pytest.mark.parametrize("algorithm", ["DSPARK", None])
def test_the_assertion_lets_dspark_through(algorithm):
    check_v4_algorithm(algorithm)


def check_v4_algorithm(algorithm: str | None) -> None:
    """Run the statement of SGLang that looks at the algorithm."""
    body = find(V4_ARGUMENTS, "apply_deepseek_v4_defaults").body
    tests = [s for s in body if isinstance(s, ast.If) and ast.unparse(s.test).startswith("cfg.speculative_algorithm")]
    assert len(tests) == 1, "SGLang checks V4's drafting elsewhere now: read it anew"
    cfg = SimpleNamespace(speculative_algorithm=algorithm, speculative_eagle_topk=1)
    exec(compile(ast.Module(tests, []), V4_ARGUMENTS, "exec"), {"cfg": cfg, "model_arch": "DeepseekV4ForCausalLM"})


def test_a_drafts_folder_of_ones_own_is_taken_before_one_in_the_targets_checkpoint():
    """A path is only ever filled in where none was given."""
    function = find(ARGUMENTS, "_handle_dspark")
    (missing,) = [n for n in function.body if ast.unparse(getattr(n, "test", n)) == MISSING]
    declared = [call for call in calls(function, "declare_resolution") if "draft_model_path" in ast.unparse(call)]
    assert declared
    assert all(missing.lineno < call.lineno <= missing.end_lineno for call in declared)


MISSING = "cfg.speculative_draft_model_path is None"


def test_dspark_is_refused_on_a_cpu():
    """Why nothing here runs in an engine."""
    run = run_alone(ARGUMENTS, "_handle_dspark", resolving_view=lambda args: args)["_handle_dspark"]
    with pytest.raises(ValueError, match="only supports CUDA, NPU or XPU"):
        run(SimpleNamespace(device="cpu"))


# -------------------------------------------------------------------------------------------- the residual's way out


def test_v4s_own_capture_gives_the_mean_over_the_paths_and_drops_the_residual():
    """So the plug-in's target captures nothing."""
    assert calls(find(V4, "DeepseekV4Model._forward_impl"), "mhc_stream_mean")
    (call,) = calls(find(V4, "DeepseekV4ForCausalLM.forward"), "logits_processor")
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    assert given["hidden_states_before_norm"] == "None if aux_hidden_states is not None else pre_hc_head"


def test_a_dspark_draft_has_the_target_capture_its_layers_by_a_method_that_v4_has():
    assert "set_dspark_layers_to_capture" in methods(V4, "DeepseekV4ForCausalLM")
    assert "set_dflash_layers_to_capture" not in methods(V4, "DeepseekV4ForCausalLM")
    family = ast.unparse(find(AUX, "_resolve_dflash_aux_hidden_state"))
    assert "config.dflash_use_aux_hidden_state = True" in family
    own = find(V4, "DeepseekV4ForCausalLM.set_dspark_layers_to_capture")
    assert {ast.unparse(node.targets[0]) for node in ast.walk(own) if isinstance(node, ast.Assign)} == {
        "self.capture_aux_hidden_states",
        "self.model.dspark_layers_to_capture",
    }


def test_v4s_forward_returns_all_paths_before_hc_head():
    """Flattened to `(T, hc_mult * D)`, beside the collapsed state. `Body` in `test_plugin.py` returns the like."""
    forward = find(V4, "DeepseekV4Model._forward_impl")
    lines = [n.lineno for n in ast.walk(forward) if isinstance(n, ast.Assign) and ast.unparse(n) == FLATTEN]
    collapse = calls(forward, "hc_head")
    assert len(lines) == len(collapse) == 1
    assert lines[0] < collapse[0].lineno
    assert ast.unparse(forward.body[-1]) == "return (hidden_states, pre_hc_head)"


FLATTEN = "pre_hc_head = hidden_states.flatten(1)"


def test_the_worker_asks_for_every_row_and_writes_it_into_the_drafts_cache():
    prefill = find(WORKER, "DSparkWorkerV2._forward_prefill")
    assert "capture_hidden_mode=CaptureHiddenMode.FULL" in ast.unparse(prefill)
    assert "target_hidden=logits_output.hidden_states" in ast.unparse(calls(prefill, "inject_prefill")[0])
    verifier = ast.unparse(find(VERIFIER, "TargetVerifyExecutor"))
    assert "capture_hidden_mode=CaptureHiddenMode.FULL" in verifier
    assert "hidden.view(bs, self.verify_num_draft_tokens, -1)" in verifier
    write = find("srt/speculative/dspark_components/dspark_kv_inject.py", "TargetHiddenKvInjector._inject")
    assert ast.unparse(calls(write, "write_target_hidden_kv")[-1].func) == "self.draft_model.write_target_hidden_kv"
    project = find("srt/models/dspark.py", "DSparkDraftMixin.write_target_hidden_kv")
    assert ast.unparse(calls(project, "project_target_hidden")[0]) == "self.project_target_hidden(target_hidden)"


def test_a_block_has_a_query_for_the_anchor_at_its_own_position():
    """With `sample_from_anchor: false`, in the worker, in the proposer and in the draft's CUDA graphs."""
    queries = "self.query_token_num = self.gamma if self.sample_from_anchor else self.gamma + 1"
    assert queries in ast.unparse(find(WORKER, "DSparkWorkerV2.__init__"))
    assert queries in ast.unparse(find(PROPOSER, "DraftBlockProposer.__init__"))
    forward = ast.unparse(find(PROPOSER, "DraftBlockProposer._run_forward"))
    assert "draft_block_ids[:, 0].copy_(draft_input.bonus_tokens.view(-1))" in forward
    assert "positions_2d[:, :query_token_num]" in forward
    width = find("srt/model_executor/model_runner.py", "ModelRunner.decode_num_tokens_per_req")
    assert calls(width, "get_dspark_sample_from_anchor")


def test_v4_lends_embedding_and_head_as_the_worker_asks_for_them():
    worker = ast.unparse(find(WORKER, "DSparkWorkerV2.__init__"))
    assert "getattr(target_model, 'lm_head', None)" in worker
    assert calls(find(WORKER, "DSparkWorkerV2.__init__"), "attach_shared_modules")
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


# --------------------------------------------------------------------------------------------------------- the draft


@pytest.fixture
def config() -> SimpleNamespace:
    """What `hyperdflash export --format sglang` writes."""
    return SimpleNamespace(**sglang_config(HyperDFlashConfig()))


def test_the_draft_is_no_v4_and_has_one_pool_of_keys_and_values(config):
    """Else it would get V4's attention backend, or a pool for windows."""
    known = {"_hf_arch": lambda config: config.architectures[0]}
    assert not run_alone(MODEL_CONFIG, "is_deepseek_v4", **known)["is_deepseek_v4"](config)
    archs = find(MODEL_CONFIG, "is_hybrid_swa_model")
    assert config.architectures[0] not in ast.unparse(archs)
    assert not hasattr(config, "is_hybrid_swa")


def test_flash_attention_lets_a_window_reach_to_both_sides_where_a_block_sees_itself():
    source = ast.unparse(tree("srt/layers/attention/flashattention_backend.py"))
    assert "(layer.sliding_window_size, 0 if causal else layer.sliding_window_size)" in source
    for backend in ("flashinfer", "triton", "flashattention"):
        assert "AttentionType.ENCODER_ONLY" in ast.unparse(tree(f"srt/layers/attention/{backend}_backend.py"))


def test_beside_v4_a_draft_is_counted_as_one_layer_of_v4():
    """Whatever its keys and values take: why `--max-total-tokens` is in the command."""
    source = ast.unparse(find("srt/model_executor/pool_configurator.py", "DSV4PoolConfigurator.__init__"))
    assert "draft_layers = 1\n" in source
    assert "self._spec_infl = (target_layers + draft_layers) / target_layers" in source
    assert "dflash_draft_cell_size" not in source


def test_tensors_that_are_missing_or_unknown_are_passed_over_in_silence():
    """So the plug-in compares names."""
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
