"""The folder for vLLM: what vLLM's DFlash parser reads, the same tensors under its names, and the way back.

`serving/tests` runs what reads it, in an environment with vLLM. Here its layers' maths is written out once more, from
vLLM's `qwen3_dflash.py`, and compared with the drafter's.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tiny_v4 import tiny_drafter, tiny_target

from hyperdflash.__main__ import main
from hyperdflash.serving.vllm_format import LIBRARY_FIELDS, read_vllm, vllm_config, write_vllm
from hyperdflash.training.export import export_drafter, round_to_bf16
from hyperdflash.training.run_folder import RUN_FILE

LAYER = {
    "input_layernorm.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "post_attention_layernorm.weight",
    *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
}
GATE = {"reducer.hc_fn", "reducer.hc_base", "reducer.hc_scale", "reducer.path_norm"}


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def shaken(target, **kwargs):
    """A drafter without a weight at its initial value."""
    drafter = tiny_drafter(target, **kwargs)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return drafter


def export(drafter, tmp_path, **kwargs):
    drafter.save_pretrained(tmp_path / "drafter")
    return export_drafter(tmp_path / "drafter", tmp_path / "served", format="vllm", **kwargs)


# -------------------------------------------------------------------------------------------------------- the folder


@pytest.mark.parametrize(("reducer", "extra"), [("hc_gate", GATE), ("mean", set()), ("fc", {"fc.weight"})])
def test_tensors_have_the_names_of_public_dflash_drafters_and_the_gate_its_own(target, tmp_path, reducer, extra):
    folder = export(shaken(target, reducer=reducer), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    layers = {f"layers.{i}.{name}" for i in range(2) for name in LAYER}
    assert tensors.keys() == layers | {"norm.weight", "hidden_norm.weight"} | extra
    assert {name for name, tensor in tensors.items() if tensor.dtype == torch.float32} == extra & GATE


def test_the_config_is_what_vllms_dflash_parser_reads(target, tmp_path):
    drafter = shaken(target, block_size=5, layer_types=["full_attention", "sliding_attention"])
    config = json.loads((export(drafter, tmp_path) / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("qwen3", ["DFlashHyperDraftModel"])
    assert "hc_mult" not in config
    assert config["hyperdflash_config"]["hc_mult"] == 2
    # Two paths, both behind the last of three layers; bidirectional, also where the window slides
    assert config["dflash_config"] == {"mask_token_id": 63, "target_layer_ids": [2, 2], "causal": False}
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "target_hidden_size": 32,
        "sliding_window": 64,
        "block_size": 5,
    }
    assert {name: config[name] for name in sizes} == sizes
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_the_folder_says_how_it_is_served(target, tmp_path):
    drafter = shaken(target)
    drafter.config.target_name_or_path = "deepseek-ai/DeepSeek-V4-Flash"
    readme = (export(drafter, tmp_path) / "README.md").read_text()
    assert "vllm serve deepseek-ai/DeepSeek-V4-Flash" in readme
    said = json.loads(readme.split("--speculative-config '")[1].split("'")[0])
    assert said == {
        "method": "dflash",
        "model": "THIS_FOLDER",
        "num_speculative_tokens": 3,
        "kv_cache_dtype": "bfloat16",
    }


HEADS = {
    "markov": {"draft_head": "markov", "markov_rank": 8},
    "gated markov and confidence": {
        "draft_head": "markov",
        "markov_rank": 8,
        "markov_gate": True,
        "draft_confidence": True,
        "verify_cost": 0.125,
    },
    "confidence": {"draft_confidence": True},
}


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"reducer": name, "reducer_path_norm": norm}
            for name in ("hc_gate", "mean", "fc")
            for norm in (True, False)
        ),
        *HEADS.values(),
    ],
    ids=str,
)
def test_a_round_trip_is_exact(target, tmp_path, options):
    drafter = shaken(target, **options)
    drafter.config.target_fingerprint = {"norm.weight": [1.0, 2.0]}
    back = read_vllm(export(drafter, tmp_path))
    round_to_bf16(drafter)
    want, got = drafter.state_dict(), back.state_dict()
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor.float()) for name, tensor in want.items())
    want, got = drafter.config.to_dict(), back.config.to_dict()
    assert {k: v for k, v in got.items() if k not in LIBRARY_FIELDS} == {
        k: v for k, v in want.items() if k not in LIBRARY_FIELDS
    }


def test_what_was_read_back_is_written_again_byte_for_byte(target, tmp_path):
    folder = export(shaken(target), tmp_path)
    back = read_vllm(folder)
    round_to_bf16(back)
    (tmp_path / "again").mkdir()
    write_vllm(tmp_path / "again", back)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


# --------------------------------------------------------------------------------------------------------- refusals


def test_a_drafter_of_intermediate_layers_is_refused_and_nothing_is_written(target, tmp_path, capsys):
    tiny_drafter(target, context_source="hidden_layers", target_layer_ids=[0, 1]).save_pretrained(tmp_path / "drafter")
    assert main(["export", str(tmp_path / "drafter"), str(tmp_path / "served"), "--format", "vllm"]) == 1
    assert "context_source 'hidden_layers' is not served in vLLM" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_a_drafter_of_another_width_than_the_targets_is_refused(target):
    with pytest.raises(ValueError, match="hidden_size 16 is not the target's 32: the plug-in has no code"):
        vllm_config(tiny_drafter(target, hidden_size=16, reducer="fc").config)


def test_heads_are_exported_under_their_own_names(target, tmp_path):
    folder = export(shaken(target, **HEADS["gated markov and confidence"]), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    heads = {name for name in tensors if "_head." in name}
    assert heads == {
        *(f"markov_head.{name}" for name in ("markov_w1", "markov_w2", "gate.weight", "gate.bias")),
        *(f"confidence_head.proj.{name}" for name in ("weight", "bias")),
    }


@pytest.mark.parametrize(("options", "said"), [(HEADS["markov"], False), (HEADS["confidence"], True)])
def test_the_readme_says_that_the_confidence_head_is_not_used(target, tmp_path, options, said):
    readme = (export(shaken(target, **options), tmp_path) / "README.md").read_text()
    assert ("vLLM does not use it" in readme) == said


def test_layers_that_were_not_compared_with_vllms_are_refused(target):
    config = tiny_drafter(target).config
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(ValueError, match="rope_type 'yarn'"):
        vllm_config(config)


def test_a_drafters_own_folder_is_not_read_as_a_served_one(target, tmp_path):
    tiny_drafter(target).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="was not written by `hyperdflash export --format vllm`"):
        read_vllm(tmp_path)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"sliding_window": 128}, "sliding_window is 128, but the drafter in hyperdflash_config has 64"),
        ({"markov_gate": ...}, "hyperdflash_config.markov_gate is None, but .* has False"),
    ],
)
def test_an_edited_config_is_refused_by_the_field(target, tmp_path, edit, message):
    folder = export(shaken(target), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name, value in edit.items():
        if value is ...:
            del config["hyperdflash_config"][name]
        else:
            config[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message) as refused:
        read_vllm(folder)
    assert len(str(refused.value)) < 300


def test_missing_weights_are_refused_by_name(target, tmp_path):
    folder = export(shaken(target), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["reducer.hc_base"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)does not fit its config.*reducer\.hc_base"):
        read_vllm(folder)


def test_the_command_makes_the_folder_and_says_what_it_needs(target, tmp_path, capsys):
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    assert main(["export", str(tmp_path / "drafter"), str(tmp_path / "served"), "--format", "vllm"]) == 0
    assert "plug-in hyperdflash-vllm" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "served").iterdir()} == {"config.json", "model.safetensors", "README.md"}


def test_a_served_folder_is_replaced_when_asked_and_nothing_else_of_vllms(target, tmp_path):
    folder = export(shaken(target), tmp_path)
    (folder / "stale.txt").touch()
    export(shaken(target, reducer="mean"), tmp_path, overwrite=True)
    assert read_vllm(folder).config.reducer == "mean"
    assert not (folder / "stale.txt").exists()
    (folder / "config.json").write_text('{"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}')
    with pytest.raises(FileExistsError):
        export(shaken(target), tmp_path, overwrite=True)


def test_what_only_the_model_card_is_made_of_does_not_stop_the_folder_for_vllm(target, tmp_path):
    drafter = tiny_drafter(target)
    drafter.save_pretrained(tmp_path / "drafter")
    (tmp_path / "drafter" / RUN_FILE).write_text("{")
    with pytest.raises(ValueError, match=RUN_FILE):
        export_drafter(tmp_path / "drafter", tmp_path / "hub")
    assert export(drafter, tmp_path).is_dir()


# ------------------------------------------------------------------------------------- the maths of vLLM's layers


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def neox_rope(x, positions, theta):
    """`(T, heads, head_dim)`, both halves of a head rotated against each other."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos()[:, None].float(), angles.sin()[:, None].float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def vllm_forward(tensors, config, context, embeds, first_position):
    """One request through vLLM's DFlash drafter: `context` `(C, D)` reduced, `embeds` `(K, D)` of the block.

    Keys and values of the context come from the normed features alone (`precompute_and_store_context_kv`); the block
    attends to them and to all of itself, a sliding layer within `sliding_window` to both sides.
    """
    eps, theta = config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]
    heads, kv_heads, hd = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    C, K = len(context), len(embeds)
    positions = torch.arange(first_position, first_position + C + K)
    normed = rms_norm(context, tensors["hidden_norm.weight"], eps)
    hidden, residual = embeds, torch.zeros_like(embeds)
    for i, layer_type in enumerate(config["layer_types"]):
        w = {name: tensors[f"layers.{i}.{name}.weight"] for name in (n.removesuffix(".weight") for n in LAYER)}
        residual = residual + hidden
        x = rms_norm(residual, w["input_layernorm"], eps)
        source = torch.cat([normed, x])
        q = rms_norm((x @ w["self_attn.q_proj"].T).view(K, heads, hd), w["self_attn.q_norm"], eps)
        k = rms_norm((source @ w["self_attn.k_proj"].T).view(C + K, kv_heads, hd), w["self_attn.k_norm"], eps)
        v = (source @ w["self_attn.v_proj"].T).view(C + K, kv_heads, hd)
        q, k = neox_rope(q, positions[C:], theta), neox_rope(k, positions, theta)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * hd**-0.5
        if layer_type == "sliding_attention":
            distance = (positions[C:, None] - positions[None]).abs()
            scores = scores.masked_fill(distance >= config["sliding_window"], float("-inf"))
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(K, -1)
        residual = residual + attended @ w["self_attn.o_proj"].T
        x = rms_norm(residual, w["post_attention_layernorm"], eps)
        hidden = (F.silu(x @ w["mlp.gate_proj"].T) * (x @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    return rms_norm(residual + hidden, tensors["norm.weight"], eps)


@pytest.mark.parametrize("layer_types", [["sliding_attention"] * 2, ["full_attention", "sliding_attention"]])
@pytest.mark.parametrize("num_context", [3, 40])  # within the window, and far beyond it
def test_the_exported_tensors_through_vllms_layers_give_the_drafters_states(
    target, tmp_path, layer_types, num_context
):
    drafter = shaken(target, layer_types=layer_types, sliding_window=12, num_attention_heads=4, num_key_value_heads=2)
    folder = export(drafter, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    round_to_bf16(drafter)
    drafter.float()
    torch.manual_seed(0)
    H, embeds = torch.randn(1, num_context, 2, 32), torch.randn(1, 4, 32)
    positions = torch.arange(7, 7 + num_context + 4)[None]
    with torch.no_grad():
        want = drafter(noise_embeds=embeds, context_hidden_states=H, position_ids=positions).last_hidden_state[0]
        got = vllm_forward(tensors, config, drafter.reducer(H)[0], embeds[0], first_position=7)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


def test_a_window_that_slides_changes_the_states(target, tmp_path):
    """The comparison above can fail: without the window the states are others."""
    folder = export(shaken(target, sliding_window=12), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.manual_seed(0)
    context, embeds = torch.randn(40, 32), torch.randn(4, 32)
    full = {**config, "layer_types": ["full_attention"] * 2}
    slid, all_seen = (vllm_forward(tensors, c, context, embeds, 0) for c in (config, full))
    assert (slid - all_seen).abs().max() > 1e-2
