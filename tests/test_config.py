"""The configuration: round trips, contradictions refused by name, and the repository's own `config.json`."""

import json
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError, StrictDataclassFieldValidationError
from tiny_v4 import greedy, random_ids, tiny_drafter, tiny_target
from transformers import DeepseekV4Config

from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.training.init import drafter_config

ROOT = Path(__file__).resolve().parents[1]

EVERY_FIELD_CHANGED = {
    "verification": "token",
    "block_size": 4,
    "mask_token_id": 5,
    "context_source": "hidden_layers",
    "target_layer_ids": [1, 3],
    "reducer": "fc",
    "reducer_path_norm": False,
    "hc_mult": 2,
    "hc_eps": 1e-5,
    "target_hidden_size": 48,
    "target_num_hidden_layers": 6,
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "gelu",
    "attention_dropout": 0.1,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 16,
    "max_position_embeddings": 512,
    "use_cache": False,
    "draft_head": "markov",
    "markov_rank": 8,
    "markov_gate": True,
    "draft_confidence": True,
    "verify_cost": 0.1,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 4,
    "target_name_or_path": "some/target",
    "target_revision": "0123abc",
    "target_fingerprint": {"norm.weight": [1.0, 1.0]},
    "encoding": {"generation": "preview", "modes": ["thinking"]},
}
# Fields whose values equal the default of transformers' own base class, written out all the same.
LIKE_THE_PARENT = {"chunk_size_feed_forward": 0, "is_encoder_decoder": False, "return_dict": True}


def comparable(config: HyperDFlashConfig) -> dict:
    return {name: (type(value), value) for name, value in config.to_dict().items() if name != "_name_or_path"}


@pytest.mark.parametrize("fields", [{}, EVERY_FIELD_CHANGED, LIKE_THE_PARENT], ids=["defaults", "all", "parent"])
def test_two_save_and_load_rounds_keep_every_value_and_type(tmp_path, fields):
    """https://github.com/huggingface/transformers/issues/40266 https://github.com/huggingface/transformers/issues/36048"""
    config = HyperDFlashConfig(**fields)
    config.save_pretrained(tmp_path / "first")
    first = HyperDFlashConfig.from_pretrained(tmp_path / "first")
    first.save_pretrained(tmp_path / "second")
    second = HyperDFlashConfig.from_pretrained(tmp_path / "second")
    assert comparable(first) == comparable(second)
    assert {**comparable(first), "auto_map": None} == {**comparable(config), "auto_map": None}
    assert all(getattr(second, name) == value for name, value in fields.items())


def test_the_changed_fields_are_all_fields():
    """So that a new field joins the round trip above."""
    declared = {name for name in HyperDFlashConfig.__annotations__ if name != "model_type"}
    assert set(EVERY_FIELD_CHANGED) == declared
    default = HyperDFlashConfig()
    assert [n for n, value in EVERY_FIELD_CHANGED.items() if getattr(default, n) == value] == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"block_size": 0}, "block_size.*0"),
        ({"block_size": 1}, "block_size 1 leaves no slot to draft"),
        ({"sliding_window": 7}, "sliding_window 7 hides all context from the last slot of a block of 7"),
        (
            {"sliding_window": 7, "layer_types": ["full_attention"] * 4 + ["sliding_attention"]},
            "sliding_window 7 hides",
        ),
        ({"draft_head": "rnn"}, "draft_head must be one of .*'rnn'"),
        ({"verification": "tree"}, "verification must be one of .*'tree'"),
        ({"markov_rank": 0}, "markov_rank.*0"),
        ({"verify_cost": -0.1}, "verify_cost.*-0.1"),
        ({"verify_cost": float("nan")}, "verify_cost.*nan"),
        ({"mask_token_id": 129280}, "mask_token_id 129280.*129280"),
        ({"mask_token_id": -1}, "mask_token_id -1"),
        ({"context_source": "hidden_layers", "reducer": "fc", "target_layer_ids": [43]}, r"\[43\].*0\.\.42"),
        ({"context_source": "hidden_layers", "reducer": "fc", "target_layer_ids": [-1]}, r"\[-1\].*0\.\.42"),
        ({"context_source": "hidden_layers", "reducer": "fc", "target_layer_ids": []}, r"\[\].*0\.\.42"),
        ({"target_layer_ids": [3]}, r"pre_hc_head.*\[42\].*\[3\]"),
        ({"context_source": "hidden_layers"}, "hc_gate.*fc"),
        ({"context_source": "hidden_layers", "reducer": "mean"}, "mean.*fc"),
        ({"target_hidden_size": 7168}, "hc_gate.*7168.*4096"),
        ({"target_hidden_size": 7168, "reducer": "mean"}, "mean.*7168.*4096"),
        ({"context_source": "post_norm"}, "context_source.*post_norm"),
        ({"reducer": "sum"}, "reducer.*sum"),
        ({"layer_types": ["full"] * 5}, "layer_types.*full"),
        ({"layer_types": ["full_attention"]}, r"\(5\).*`layer_types` \(1\)"),
        ({"num_key_value_heads": 5}, "32.*5"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1; got 0"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1; got 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1; got 0"),
        ({"hidden_size": 0, "reducer": "fc"}, "hidden_size must be at least 1; got 0"),
        ({"head_dim": -1}, "head_dim must be at least 1; got -1"),
    ],
)
def test_contradicting_values_are_refused_by_name(fields, named):
    """https://github.com/charlie12345/ROCmFPX/issues/44 https://github.com/NVIDIA/Model-Optimizer/pull/1621"""
    with pytest.raises(StrictDataclassClassValidationError, match=named):
        HyperDFlashConfig(**fields)


def test_a_value_of_the_wrong_type_is_refused_by_name():
    with pytest.raises(StrictDataclassFieldValidationError, match="block_size"):
        HyperDFlashConfig(block_size="7")


@pytest.mark.parametrize(
    ("fields", "theta"),
    [
        ({"rope_theta": 1e6}, 1e6),
        ({"rope_parameters": None}, 1e4),
        ({"rope_parameters": None, "rope_theta": 1e6}, 1e6),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}, "rope_theta": 5e3}, 5e3),
    ],
)
def test_a_base_of_rope_in_the_old_place_counts_and_null_is_the_default(tmp_path, fields, theta):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "hyperdflash", **fields}))
    parameters = HyperDFlashConfig.from_pretrained(tmp_path).rope_parameters
    assert (parameters["rope_theta"], parameters["rope_type"]) == (theta, "default")


def test_two_bases_of_rope_that_differ_are_refused_with_both():
    """One of them was ignored: 1e6 became 1e4."""
    with pytest.raises(ValueError, match="rope_theta 1000000.0 contradicts rope_parameters, which has 10000.0"):
        HyperDFlashConfig(rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e4})


@pytest.mark.parametrize("version", ["4.57.1", "5.20.2", "5.23.0"])
def test_an_older_transformers_is_one_sentence_with_both_versions_before_anything_is_imported(monkeypatch, version):
    """They load a drafter, and then ask for a cache that is there."""
    monkeypatch.setitem(sys.modules, "transformers", types.SimpleNamespace(__version__=version))  # and nothing else
    with pytest.raises(ImportError, match=f"needs transformers 5.24.0 or later, and {version} is installed: pip"):
        runpy.run_path(str(ROOT / "configuration_hyperdflash.py"))


# ------------------------------------------------------------------------------------------ the drafter and its target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.mark.parametrize(
    ("other", "numbers"),
    [
        ({"vocab_size": 80}, ("64", "80")),
        ({"hidden_size": 48}, ("32", "48")),
        ({"hc_mult": 4}, ("2", "4")),
        ({"layer_types": ("sliding_attention",) * 2}, ("3", "2")),
    ],
    ids=["vocabulary", "width", "paths", "layers"],
)
def test_a_drafter_for_another_target_is_refused_with_both_numbers(target, other, numbers):
    """https://github.com/ggml-org/llama.cpp/pull/3812"""
    drafter = tiny_drafter(target)
    with pytest.raises(ValueError, match=f"(?s){numbers[0]}.*{numbers[1]}"):
        greedy(tiny_target(**other), random_ids(5), 4, assistant_model=drafter)


def test_another_target_name_with_the_same_sizes_works(target):
    """https://github.com/ggml-org/llama.cpp/pull/3812"""
    drafter = tiny_drafter(target, target_name_or_path="someone/else", target_revision="abc")
    ids = random_ids(5)
    assert torch.equal(greedy(target, ids, 8, assistant_model=drafter), greedy(target, ids, 8))


def test_a_folder_whose_drafter_has_no_slot_to_draft_is_refused_when_it_is_loaded(target, tmp_path):
    tiny_drafter(target).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"block_size": 1}))
    with pytest.raises(StrictDataclassClassValidationError, match="block_size 1 leaves no slot to draft"):
        HyperDFlashModel.from_pretrained(tmp_path)


def test_a_window_as_short_as_the_block_is_allowed_where_no_layer_has_one(target):
    config = tiny_drafter(target, block_size=4, sliding_window=4, layer_types=["full_attention"] * 2).config
    assert config.sliding_window == config.block_size


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_a_mask_token_that_is_a_special_token_is_refused(name):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2461"""
    target = tiny_target(**{name: 5})
    with pytest.raises(ValueError, match=f"mask_token_id 5.*{name}"):
        greedy(target, random_ids(5), 4, assistant_model=tiny_drafter(target, mask_token_id=5))


def test_the_stored_mask_token_is_the_one_drafted_with(target, tmp_path):
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2461"""
    tiny_drafter(target, mask_token_id=41).save_pretrained(tmp_path)
    drafter = HyperDFlashModel.from_pretrained(tmp_path)
    seen = []
    handle = target.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: seen.append(args[0].tolist())
    )
    try:
        greedy(target, random_ids(5), 6, assistant_model=drafter)
    finally:
        handle.remove()
    blocks = [ids[0][1:] for ids in seen if len(ids[0]) == drafter.config.block_size and 41 in ids[0]]
    assert blocks
    assert all(ids == [41] * 3 for ids in blocks)


def test_a_mask_token_outside_the_embedding_is_refused_with_both_numbers(target):
    """https://github.com/NVIDIA/Model-Optimizer/pull/1621"""
    drafter = tiny_drafter(target)
    drafter.config.mask_token_id = 64
    with pytest.raises(ValueError, match="64.*64 embedding rows"):
        greedy(target, random_ids(5), 4, assistant_model=drafter)


def test_a_reserved_row_serves_as_mask_and_the_embedding_keeps_its_size(target):
    """https://github.com/NVIDIA/Model-Optimizer/pull/1621"""
    before = target.get_input_embeddings().weight
    shape = before.shape
    greedy(target, random_ids(5), 6, assistant_model=tiny_drafter(target, mask_token_id=shape[0] - 1))
    assert target.get_input_embeddings().weight is before
    assert before.shape == shape


# -------------------------------------------------------------------------------------------- the root's `config.json`


def root_config() -> dict:
    return json.loads((ROOT / "config.json").read_text())


def test_the_root_config_is_what_init_makes_for_v4_flash():
    """Everything but the fingerprint and the revision, which need the target's weights."""
    made = drafter_config(DeepseekV4Config())
    made.target_name_or_path = "deepseek-ai/DeepSeek-V4-Flash"
    made = json.loads(made.to_json_string())
    stored = root_config()
    assert stored.pop("architectures") == ["HyperDFlashModel"]
    assert stored.pop("dtype") == "float32"
    assert stored.pop("auto_map")
    assert stored == made
    assert stored["target_revision"] is stored["target_fingerprint"] is None


def test_the_root_config_is_v4_flash_and_loads_by_auto_class():
    stored = root_config()
    assert stored["auto_map"] == {
        "AutoConfig": "configuration_hyperdflash.HyperDFlashConfig",
        "AutoModel": "modeling_hyperdflash.HyperDFlashModel",
    }
    expected = {"block_size": 7, "mask_token_id": 128799, "vocab_size": 129280, "num_hidden_layers": 5, "hc_mult": 4}
    assert {name: stored[name] for name in expected} == expected
    assert (stored["target_hidden_size"], stored["target_num_hidden_layers"]) == (4096, 43)


@pytest.mark.parametrize(("reducer", "num_parameters"), [("hc_gate", 65_536 + 5), ("fc", 67_108_864), ("mean", 0)])
def test_v4_flash_builds_on_the_meta_device_with_the_papers_reducer_sizes(reducer, num_parameters):
    """The paper's 65.5k of the gate against 67.1M of the dense projection; no tensor is read in a constructor.

    https://github.com/huggingface/transformers/pull/45096
    """
    config = HyperDFlashConfig(**{**root_config(), "reducer": reducer})
    with torch.device("meta"):
        model = HyperDFlashModel(config)
    assert all(p.is_meta for p in model.parameters())
    sizes = {name: p.numel() for name, p in model.reducer.named_parameters()}
    assert sizes.pop("path_norm", None) == (4 * 4096 if reducer == "hc_gate" else None)
    assert sum(sizes.values()) == num_parameters


def test_a_drafter_without_weights_is_refused_as_an_assistant(target):
    drafter = tiny_drafter(target).to("meta")
    with pytest.raises(ValueError, match="no weights"):
        greedy(target, random_ids(5), 4, assistant_model=drafter)
