"""The folder for SGLang, and what the plug-in refuses. `serving/sglang` has the models, which need SGLang's."""

import json
from pathlib import Path
from types import SimpleNamespace as Namespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_v4 import tiny_drafter, tiny_target

from hyperdflash.__main__ import main
from hyperdflash.pairing_hyperdflash import fingerprint_tensors, target_fingerprint
from hyperdflash.serving.sglang_format import cache_bytes, sglang_config
from hyperdflash.serving.vllm_format import NESTED, vllm_config
from hyperdflash.training.export import export_drafter, load_trained
from hyperdflash_sglang import checks, fingerprint, reducer


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def export(drafter, tmp_path, **kwargs):
    with torch.no_grad():  # the second half of a new head is zero
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter)
    drafter.save_pretrained(tmp_path / "drafter")
    return export_drafter(tmp_path / "drafter", tmp_path / "served", format="sglang", **kwargs)


# -------------------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    ("options", "head"),
    [
        ({}, {"markov_rank": 1, "markov_head_type": "vanilla"}),
        ({"draft_head": "markov", "markov_rank": 8}, {"markov_rank": 8, "markov_head_type": "vanilla"}),
        (
            {"draft_head": "markov", "markov_rank": 8, "markov_gate": True},
            {"markov_rank": 8, "markov_head_type": "gated"},
        ),
    ],
)
def test_the_config_is_that_for_vllm_with_dsparks_fields(target, options, head):
    drafter = tiny_drafter(target, block_size=5, **options)
    config, base = sglang_config(drafter.config), vllm_config(drafter.config)
    changed = {name: config[name] for name in config if config[name] != base.get(name)}
    own = {
        "architectures": ["DSparkHyperDraftModel"],
        "block_size": 4,
        "is_causal": False,
        "sample_from_anchor": False,
    }
    assert changed == own | head
    assert config[NESTED]["block_size"] == 5
    assert not base.keys() - config.keys()


def test_a_drafter_without_a_head_has_one_that_adds_zero(target, tmp_path):
    tensors = load_file(export(tiny_drafter(target), tmp_path) / "model.safetensors")
    heads = {name: tensors[name] for name in tensors if "_head." in name}
    assert {name: tuple(head.shape) for name, head in heads.items()} == {
        "markov_head.markov_w1.weight": (64, 1),
        "markov_head.markov_w2.weight": (64, 1),
    }
    assert not any(head.any() for head in heads.values())
    assert tensors["reducer.hc_fn"].dtype == torch.float32
    assert heads["markov_head.markov_w1.weight"].dtype == tensors["norm.weight"].dtype == torch.bfloat16


def test_a_gated_head_does_not_see_the_token_before_and_a_confidence_head_is_left_out(target, tmp_path):
    drafter = tiny_drafter(target, draft_head="markov", markov_rank=8, markov_gate=True, draft_confidence=True)
    folder = export(drafter, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    gate = tensors["markov_head.gate_proj.weight"]
    assert gate.shape == (8, 32 + 8)
    assert torch.equal(gate[:, :32], drafter.markov_head.gate.weight.bfloat16())
    assert not gate[:, 32:].any()
    assert {name for name in tensors if "_head." in name} == {
        f"markov_head.{name}"
        for name in ("markov_w1.weight", "markov_w2.weight", "gate_proj.weight", "gate_proj.bias")
    }
    assert "confidence head is left out" in (folder / "README.md").read_text()


def test_the_folder_says_how_it_is_served_and_what_its_cache_takes(target, tmp_path, capsys):
    drafter = tiny_drafter(target)
    drafter.config.target_name_or_path = "deepseek-ai/DeepSeek-V4-Flash"
    drafter.save_pretrained(tmp_path / "drafter")
    assert main(["export", str(tmp_path / "drafter"), str(tmp_path / "served"), "--format", "sglang"]) == 0
    assert "plug-in hyperdflash-sglang" in capsys.readouterr().out
    readme = (tmp_path / "served" / "README.md").read_text()
    assert "sglang serve --model-path deepseek-ai/DeepSeek-V4-Flash --speculative-algorithm DSPARK" in readme
    assert "--speculative-draft-kv-cache-dtype bfloat16" in readme
    # Keys and values, two layers, one head of 16, two bytes
    assert cache_bytes(drafter.config) == 2 * 2 * 1 * 16 * 2
    assert "128 bytes a token" in readme
    assert "confidence" not in readme
    assert {path.name for path in (tmp_path / "served").iterdir()} == {"config.json", "model.safetensors", "README.md"}


def test_what_the_plugin_cannot_run_is_refused_and_nothing_is_written(target, tmp_path):
    drafter = tiny_drafter(target, context_source="hidden_layers", target_layer_ids=[0, 1])
    with pytest.raises(ValueError, match="context_source 'hidden_layers' is not served"):
        export(drafter, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_folder_for_sglang_is_replaced_when_asked_and_is_not_exported_again(target, tmp_path):
    folder = export(tiny_drafter(target), tmp_path)
    with pytest.raises(ValueError, match="served is a folder for SGLang: export the drafter that it was made from"):
        load_trained(folder)
    export(tiny_drafter(target, reducer="mean"), tmp_path, overwrite=True)
    assert json.loads((folder / "config.json").read_text())[NESTED]["reducer"] == "mean"


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture(scope="module")
def nested(target):
    drafter = tiny_drafter(target)
    drafter.config.target_fingerprint = target_fingerprint(fingerprint_tensors(target))
    drafter.config.target_name_or_path = "some/target"
    return sglang_config(drafter.config)[NESTED]


def target_config(target, **changes):
    names = ("vocab_size", "hidden_size", "hc_mult", "num_hidden_layers", "model_type")
    return Namespace(**{name: getattr(target.config, name) for name in names} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v41"}, "model_type is 'deepseek_v41'.*V4.1 has no learned hc_head"),
        ({"vocab_size": 65}, "vocabulary 64, but the target has 65: take some/target"),
        ({"hidden_size": 64}, "hidden size 32, but the target has 64"),
        ({"hc_mult": 4}, "hc_mult 2, but the target has 4"),
        ({"num_hidden_layers": 4}, "number of layers 3, but the target has 4"),
        ({"stages": 2}, "pp_size=2.*tensor parallelism"),
    ],
)
def test_a_target_that_the_drafter_was_not_made_for_is_refused(target, nested, changes, message):
    checks.check_target(target_config(target), nested, 1)
    stages = changes.pop("stages", 1)
    with pytest.raises(ValueError, match=f"hyperdflash-sglang in SGLang .*{message}"):
        checks.check_target(target_config(target, **changes), nested, stages)


@pytest.mark.parametrize(
    ("config", "said", "message"),
    [
        (
            {},
            {"num_draft_tokens": 5},
            "4 drafts a round .* blocks of 3: give --speculative-dspark-block-size 3 or less",
        ),
        ({"context_len": 513}, {}, "context length is 513, .* end at 512: serve with --context-length 512 or less"),
        ({}, {"verify_mode": "compact"}, "SGLANG_RAGGED_VERIFY_MODE=compact .* leave it at 'static'"),
        ({NESTED: None}, {}, "no hyperdflash_config: export the drafter again .*--format sglang"),
        ({"draft_head": "other"}, {}, "draft_head 'other' is unknown to this plug-in"),
        ({"reducer": "other"}, {}, "reducer 'other' is unknown to this plug-in"),
    ],
)
def test_a_draft_that_cannot_work_is_refused_with_the_way_out(nested, config, said, message):
    nested = {**nested, "max_position_embeddings": 512}
    sound = {"num_draft_tokens": 4, "verify_mode": "static"}
    checks.check_draft(Namespace(context_len=512, **{NESTED: nested}), **sound)
    own = {name: config.pop(name) for name in ("draft_head", "reducer") if name in config}
    config = {"context_len": 512, NESTED: nested | own} | config
    with pytest.raises(ValueError, match=message):
        checks.check_draft(Namespace(**config), **sound | said)


def test_a_configuration_of_another_age_is_refused(nested):
    for name in ("reducer", "draft_head"):
        with pytest.raises(ValueError, match=f"lacks {name}: export the drafter again"):
            checks.check_fields({key: value for key, value in nested.items() if key != name})


def test_another_target_of_the_same_sizes_is_refused_and_rounding_is_not(target, nested):
    head, norm = target.model.hc_head, target.model.norm.weight
    tensors = {"hc_head_fn": head.hc_fn, "norm.weight": norm, "hc_head_base": head.hc_base}
    checks.check_fingerprint(nested, {name: tensor.bfloat16() for name, tensor in tensors.items()})
    with pytest.raises(ValueError, match=r"made for another target \(some/target\): hc_head_fn differs"):
        checks.check_fingerprint(nested, tensors | {"hc_head_fn": head.hc_fn * 1.5})
    checks.check_fingerprint(nested | {"target_fingerprint": None}, {"hc_head_fn": head.hc_fn * 1.5})


def test_layers_that_slide_otherwise_or_do_not_see_their_block_are_noticed(nested):
    config = nested | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}
    checks.check_layers([(-1, True), (63, True)], config)
    for found in ([(-1, True), (63, False)], [(-1, True), (127, True)], [(63, True), (63, True)]):
        with pytest.raises(RuntimeError, match="in place of"):
            checks.check_layers(found, config)


def test_features_of_another_width_and_other_tensors_are_noticed():
    checks.check_width(64, 64)
    with pytest.raises(RuntimeError, match="got 32 features a token in place of its 64"):
        checks.check_width(32, 64)
    checks.check_tensors({"a"}, {"a"})
    with pytest.raises(ValueError, match="weights lack b: export"):
        checks.check_tensors({"a"}, {"a", "b"})
    with pytest.raises(ValueError, match="weights have an unknown c"):
        checks.check_tensors({"a", "c"}, {"a"})


def test_another_class_for_the_target_is_refused():
    checks.check_target_class(bool, int)
    with pytest.raises(ValueError, match="builtins.int: by another plug-in"):
        checks.check_target_class(int, bool)
    with pytest.raises(ValueError, match="serves the target, None"):
        checks.check_target_class(None, int)


def test_a_folder_in_transformers_form_is_refused():
    with pytest.raises(ValueError, match="folder for transformers .*--format sglang"):
        checks.TransformersFolder.from_dict({"model_type": "hyperdflash"})


@pytest.mark.parametrize("module", [reducer, fingerprint], ids=lambda module: module.__name__)
def test_both_plugins_have_the_same_reducers_and_fingerprint(module):
    file = Path(module.__file__)
    assert file.is_symlink()
    assert file.resolve().parts[-3:] == ("vllm_plugin", "hyperdflash_vllm", file.name)
