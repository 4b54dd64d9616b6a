"""DeepSeek-V4's native MTP module as an assistant: lossless, and drafting what it would draft without any cache."""

import weakref

import pytest
import torch
from audit import ForwardAudit
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_v4 import (
    CSA,
    MIXED,
    SLIDING,
    assert_same_state,
    greedy,
    nightly,
    random_ids,
    record_drafts,
    tiny_config,
    tiny_target,
)
from transformers import DynamicCache
from transformers.utils import logging

from hyperdflash.generation.mtp import DeepseekV4MTP, load_mtp
from hyperdflash.target_hyperdflash import ResidualTap


def tiny_mtp(target, max_drafts=3, seed=2) -> DeepseekV4MTP:
    """A random module: real drafts, nearly all of them wrong."""
    torch.manual_seed(seed)
    return DeepseekV4MTP(target.config, max_drafts).eval()


@pytest.mark.parametrize(
    ("layer_types", "max_drafts"),
    [
        ((SLIDING,), 3),
        ((CSA, SLIDING), 3),
        pytest.param(MIXED, 1, marks=pytest.mark.slow),
        (MIXED, 3),
        pytest.param(MIXED, 6, marks=pytest.mark.slow),
        nightly((SLIDING,), 1),
        nightly((SLIDING,), 6),
        nightly((CSA, SLIDING), 1),
        nightly((CSA, SLIDING), 6),
    ],
)
def test_greedy_ids_are_plain_decodings(layer_types, max_drafts):
    """Prompts around the window (8) and blocks of every length."""
    target = tiny_target(layer_types)
    mtp = tiny_mtp(target, max_drafts)
    for length in (1, 7, 8, 20):
        prompt = random_ids(length, seed=length)
        want = greedy(target, prompt, 20)
        got = greedy(target, prompt, 20, assistant_model=mtp, return_dict_in_generate=True)
        assert got.sequences.tolist() == want.tolist()
        assert max(got.speculation.num_drafts) == max_drafts


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("max_drafts", [1, 4])
def test_every_round_drafts_what_the_module_says_without_a_cache(max_drafts, monkeypatch):
    """From the target's residuals up to the anchor, then on its own output: nothing of an earlier round's own steps is
    left in its cache, and positions go on without a gap. The prompt is longer than the window, so that the first query
    needs all of it."""
    target = tiny_target()
    mtp = tiny_mtp(target, max_drafts)
    rounds = record_drafts(mtp, monkeypatch)
    greedy(target, random_ids(11), 30, assistant_model=mtp)
    assert len(rounds) > 10
    for ids, drafts in rounds:
        with ResidualTap(target) as tap:
            target(ids[:, :-1], use_cache=False)
            residual = tap.take()
        tokens, expected = ids[:, 1:], []
        for _ in drafts:
            hidden, output = mtp(target.model.embed_tokens(tokens), residual, input_ids=tokens)
            expected.append(target.lm_head(hidden[:, -1]))
            tokens = torch.cat([tokens, expected[-1].argmax(-1, keepdim=True)], dim=1)
            residual = torch.cat([residual, output[:, -1:]], dim=1)
        torch.testing.assert_close(torch.cat(drafts), torch.cat(expected), atol=1e-4, rtol=1e-4)


def test_sampling_is_seeded_and_stops_where_it_should():
    target = tiny_target()
    mtp = tiny_mtp(target)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 20, "assistant_model": mtp}
    torch.manual_seed(0)
    first = target.generate(random_ids(6), **options)
    torch.manual_seed(0)
    assert target.generate(random_ids(6), **options).tolist() == first.tolist()
    assert first.shape[1] == 26
    eos = int(greedy(target, random_ids(6), 8)[0, 9])
    stopped = greedy(target, random_ids(6), 8, assistant_model=mtp, eos_token_id=eos)
    assert stopped.tolist() == greedy(target, random_ids(6), 8, eos_token_id=eos).tolist()


def test_a_second_turn_with_the_returned_cache_is_plain_decodings():
    target = tiny_target()
    options = {"return_dict_in_generate": True, "do_sample": False, "max_new_tokens": 12}
    results = []
    for assistant in ({}, {"assistant_model": tiny_mtp(target)}):
        out = target.generate(random_ids(9), **options, **assistant)
        longer = torch.cat([out.sequences, random_ids(5, seed=3)], dim=1)
        again = target.generate(longer, cache=out.cache, **options, **assistant)
        results.append((again.sequences.tolist(), again.cache))
    assert results[0][0] == results[1][0]
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(torch.tensor(results[0][0])[:, :-1], cache=cache, use_cache=True)
    assert_same_state(results[1][1], results[0][1], tolerance=1e-4)


def test_fewer_drafts_can_be_asked_for_and_more_are_capped(monkeypatch):
    """https://github.com/huggingface/transformers/issues/40739"""
    target = tiny_target()
    mtp, warnings = tiny_mtp(target, 3), []
    monkeypatch.setattr(logging.get_logger("hyperdflash.generation_hyperdflash"), "warning", warnings.append)
    for asked, most in ((2, 2), (9, 3)):
        out = greedy(
            target, random_ids(6), 20, assistant_model=mtp, num_assistant_tokens=asked, return_dict_in_generate=True
        )
        assert max(out.speculation.num_drafts) == most
    assert warnings == ["num_assistant_tokens=9 is capped at 3: the drafter makes no more per round"]


def test_another_targets_module_is_refused_by_its_shapes():
    mtp = DeepseekV4MTP(tiny_config(hidden_size=48))
    with pytest.raises(ValueError, match="hidden_size 48, but the target has 32"):
        greedy(tiny_target(), random_ids(4), 4, assistant_model=mtp)


def test_checkpoints_without_the_native_module_are_told_apart(tmp_path):
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no native MTP module: there is no tensor named mtp\.0\.e_proj\.weight"):
        load_mtp(tmp_path, tiny_config())
    save_file({"mtp.0.main_proj.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"carries a DSpark module under mtp\.\*.*preview checkpoint.*load_dspark"):
        load_mtp(tmp_path, tiny_config())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, "bfloat16"])
def test_a_module_has_the_dtype_of_its_target_and_drafts_for_one_of_another(tmp_path, dtype):
    mtp = tiny_mtp(tiny_target())
    save_file(mtp.official_state_dict(torch.float32), tmp_path / "model.safetensors")
    config = tiny_config()
    config.dtype = dtype
    dtype = torch.bfloat16 if dtype == "bfloat16" else dtype
    loaded = load_mtp(tmp_path, config)
    kinds = {name: tensor.dtype for name, tensor in loaded.named_parameters()}
    assert loaded.dtype == kinds["e_proj.weight"] == kinds["layer.self_attn.kv_proj.weight"] == dtype
    assert kinds["layer.attn_hc.base"] == kinds["hc_head.hc_fn"] == torch.float32
    assert not any(tensor.is_meta for tensor in loaded.buffers())
    for target_dtype in (torch.float32, torch.bfloat16):
        target, prompt = tiny_target().to(target_dtype), random_ids(9)
        plain = greedy(target, prompt, 16)
        with ForwardAudit(target) as audit:
            out = greedy(target, prompt, 16, assistant_model=loaded, return_dict_in_generate=True)
        audit.check(out)
        drafted = out.sequences
        if target_dtype == torch.float32:
            assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("naming", ["official", "transformers"])
def test_a_module_is_read_in_both_namings(tmp_path, naming):
    mtp = tiny_mtp(tiny_target())
    own = {f"mtp.0.{name.removeprefix('layer.')}": value.contiguous() for name, value in mtp.state_dict().items()}
    save_file(mtp.official_state_dict(torch.float32) if naming == "official" else own, tmp_path / "model.safetensors")
    loaded = load_mtp(tmp_path, tiny_config(), max_drafts=5)
    assert loaded.max_drafts == 5
    assert loaded.state_dict().keys() == mtp.state_dict().keys()
    assert all(torch.equal(value, mtp.state_dict()[name]) for name, value in loaded.state_dict().items())


def test_experts_are_read_one_at_a_time(tmp_path, monkeypatch):
    """Loading holds the module and one more expert, instead of the file and the module."""
    mtp = tiny_mtp(tiny_target())
    tensors = mtp.official_state_dict(torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    live, peak = [0], [0]

    def free(size):
        live[0] -= size

    class Watched:
        def __init__(self, *args, **kwargs):
            self.file = safe_open(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *exc):
            return self.file.__exit__(*exc)

        def get_slice(self, name):
            return self.file.get_slice(name)

        def get_tensor(self, name):
            tensor = self.file.get_tensor(name)
            live[0] += tensor.nbytes
            peak[0] = max(peak[0], live[0])
            weakref.finalize(tensor.untyped_storage(), free, tensor.nbytes)
            return tensor

    monkeypatch.setattr("hyperdflash.generation.native.safe_open", Watched)
    loaded = load_mtp(tmp_path, tiny_config())
    assert all(torch.equal(value, mtp.state_dict()[name]) for name, value in loaded.state_dict().items())
    experts = [value.nbytes for name, value in tensors.items() if ".experts." in name and "shared" not in name]
    others = sum(value.nbytes for value in tensors.values()) - sum(experts)
    assert peak[0] <= others + 2 * max(experts)


def test_fp8_and_fp4_weights_are_dequantised(tmp_path):
    """As in V4-Flash: e4m3 with a scale for each block, and two e2m1 values a byte with one for every 32 of them."""
    tensors = tiny_mtp(tiny_target()).official_state_dict()
    fp8 = torch.randn(tensors["mtp.0.e_proj.weight"].shape).to(torch.float8_e4m3fn)
    name = "mtp.0.ffn.experts.1.w1.weight"
    rows, columns = tensors[name].shape
    codes = torch.randint(16, (rows, columns))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8] * (1 - 2 * (codes // 8))
    exponents = torch.randint(-3, 3, (rows, columns // 32))
    scales = torch.exp2(exponents.float())
    tensors |= {
        "mtp.0.e_proj.weight": fp8,
        "mtp.0.e_proj.scale": torch.full((1, 1), 0.25).to(torch.float8_e8m0fnu),
        name: (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8),
        name.replace("weight", "scale"): scales.to(torch.float8_e8m0fnu),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = load_mtp(tmp_path, tiny_config())
    assert torch.equal(loaded.e_proj.weight, fp8.float() / 4)
    expected = values * scales.repeat_interleave(32, dim=1)
    assert torch.equal(loaded.layer.mlp.experts.gate_up_proj[1, :rows], expected)


def test_what_is_wrong_with_a_checkpoints_module_is_named(tmp_path):
    tensors = tiny_mtp(tiny_target()).official_state_dict()
    file = tmp_path / "model.safetensors"
    save_file({name: value for name, value in tensors.items() if name != "mtp.0.norm.weight"}, file)
    with pytest.raises(
        ValueError, match=r"native MTP module of .* is incomplete: there is no tensor named mtp\.0\.norm\.weight"
    ):
        load_mtp(tmp_path, tiny_config())
    save_file(tensors, file)
    with pytest.raises(ValueError, match="does not fit the target's config"):
        load_mtp(tmp_path, tiny_config(hidden_size=48))


def test_experts_run_as_the_targets_do():
    target = tiny_target()
    assert tiny_mtp(target).config._experts_implementation == target.config._experts_implementation == "grouped_mm"
