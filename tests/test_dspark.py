"""DeepSeek's DSpark module as an assistant: lossless, and drafting what it would draft without any cache.

That its layers compute what vLLM's do is shown in `serving/tests/test_dspark.py`.
"""

import json
import re
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from tiny_v4 import (
    CSA,
    HCA,
    MIXED,
    SLIDING,
    VOCAB_SIZE,
    assert_same_state,
    greedy,
    nightly,
    random_ids,
    record_drafts,
    save_dspark,
    tiny_config,
    tiny_drafter,
    tiny_dspark,
    tiny_target,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hyperdflash.generation.dspark import SETTINGS, load_dspark
from hyperdflash.generation.mtp import DeepseekV4MTP, load_mtp
from hyperdflash.generation_hyperdflash import num_worth_verifying
from hyperdflash.target_hyperdflash import ResidualTap


@pytest.mark.parametrize(
    ("layer_types", "num_drafts"),
    [
        ((CSA, SLIDING), 5),
        (MIXED, 5),
        pytest.param((SLIDING,), 5, marks=pytest.mark.slow),
        pytest.param((HCA, SLIDING), 5, marks=pytest.mark.slow),
        pytest.param(MIXED, 1, marks=pytest.mark.slow),
        *[pytest.param(MIXED, n, marks=pytest.mark.slow) for n in (2, 3, 4)],
        *[nightly(layers, n) for layers in ((SLIDING,), (CSA, SLIDING), (HCA, CSA)) for n in (1, 2, 3, 4)],
    ],
)
def test_greedy_ids_are_plain_decodings(layer_types, num_drafts):
    """Prompts around the window (8), shorter than a block, and one token; the returned cache is plain decoding's."""
    target = tiny_target(layer_types)
    dspark = tiny_dspark(target)
    for length in (1, 8, 13):
        prompt = random_ids(length, seed=length)
        want = greedy(target, prompt, 16)
        options = {"assistant_model": dspark, "num_assistant_tokens": num_drafts, "return_dict_in_generate": True}
        got = greedy(target, prompt, 16, **options)
        assert got.sequences.tolist() == want.tolist()
        assert max(got.speculation.num_drafts) == num_drafts
        fresh = DynamicCache(config=target.config)
        with torch.no_grad():
            target(want[:, :-1], cache=fresh, use_cache=True)
        assert_same_state(got.cache, fresh)


@torch.no_grad()
@pytest.mark.parametrize("num_drafts", [5, nightly(1), nightly(3)])
def test_every_round_drafts_what_the_module_says_without_a_cache(num_drafts, monkeypatch):
    """A whole block over the tapped layers of all tokens before the anchor, of which the window counts; each slot
    biased by the token before it. Nothing of an earlier block is left in the cache."""
    target = tiny_target()
    dspark = tiny_dspark(target, target_layer_ids=[2, 0])
    rounds = record_drafts(dspark, monkeypatch)
    greedy(target, random_ids(11), 14, assistant_model=dspark, num_assistant_tokens=num_drafts)
    assert len(rounds) > 5
    for ids, drafts in rounds:
        with ResidualTap(target, [2, 0]) as layers:
            target(ids[:, :-1], use_cache=False)
            context = layers.take()
        noise = torch.tensor([[int(ids[0, -1])] + [dspark.config.dspark_noise_token_id] * 4])
        hidden, _ = dspark(target.model.embed_tokens(noise), context)
        previous, head = ids[0, -1:], dspark.markov_head
        assert len(drafts) <= num_drafts
        for slot, logits in enumerate(drafts):
            bias = head.markov_w2.weight @ head.markov_w1.weight[previous[0]]
            expected = target.lm_head(hidden[:, slot]) + bias
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            previous = logits.argmax(-1)


@torch.no_grad()
def test_a_block_sees_the_window_before_it_and_itself_in_both_directions():
    """By what changes when an input does: 8 positions of context for every slot, whatever its own place."""
    target = tiny_target((SLIDING,) * 2)
    dspark = tiny_dspark(target, num_stages=1)
    D, m = target.config.hidden_size, target.config.hc_mult
    context, embeds = torch.randn(1, 12, m, 2 * D), torch.randn(1, 5, D)
    before = dspark(embeds, context)[0]
    for position in range(12):
        changed = context.clone()
        changed[:, position] += torch.randn(m, 2 * D)
        differs = (dspark(embeds, changed)[0] - before).abs().amax(-1)[0] > 1e-6
        assert differs.tolist() == [position >= 4] * 5
    for slot in range(5):
        changed = embeds.clone()
        changed[:, slot] += torch.randn(D)
        assert ((dspark(changed, context)[0] - before).abs().amax(-1) > 1e-6).all()


@torch.no_grad()
def test_paths_are_averaged_before_they_are_read():
    target = tiny_target()
    dspark = tiny_dspark(target)
    context, embeds = torch.randn(1, 6, target.config.hc_mult, 64), torch.randn(1, 5, 32)
    mean = context.mean(2, keepdim=True).expand_as(context)
    torch.testing.assert_close(dspark(embeds, context)[0], dspark(embeds, mean)[0])


@torch.no_grad()
def test_a_mask_says_everything_and_blocks_lie_side_by_side():
    """What training would do: two blocks in one forward give what each gives alone."""
    target = tiny_target()
    dspark = tiny_dspark(target)
    context, embeds = torch.randn(1, 14, target.config.hc_mult, 64), torch.randn(1, 10, 32)
    mask = torch.full((1, 1, 10, 24), torch.finfo(torch.float32).min)
    positions = [torch.arange(14)]
    for block, anchor in enumerate((9, 13)):
        rows = slice(5 * block, 5 * block + 5)
        mask[..., rows, max(anchor - 8, 0) : anchor] = 0
        mask[..., rows, 14 + 5 * block : 19 + 5 * block] = 0
        positions.append(torch.arange(anchor, anchor + 5))
    both = dspark(embeds, context, attention_mask=mask, position_ids=torch.cat(positions)[None])[0]
    alone = [dspark(embeds[:, :5], context[:, :9])[0], dspark(embeds[:, 5:], context[:, :13])[0]]
    torch.testing.assert_close(both, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_the_confidence_head_decides_how_many_drafts_are_worth_verifying(monkeypatch):
    """It reads a slot's state before the last norm, and the token before the slot."""
    target = tiny_target()
    dspark = tiny_dspark(target)
    torch.nn.init.normal_(dspark.confidence_head.proj.weight)
    blocks, rounds, forward, propose = [], [], dspark.forward, dspark.propose

    def recording(request, choose):
        rounds.append([request.noise_ids[0, :1].clone()])
        propose(request, lambda logits: rounds[-1].append(choose(logits).clone()) or rounds[-1][-1])

    monkeypatch.setattr(dspark, "forward", lambda *args, **kw: blocks.append(forward(*args, **kw)) or blocks[-1])
    monkeypatch.setattr(dspark, "propose", recording)
    want = greedy(target, random_ids(9), 16).tolist()
    for cost in (0.0, 0.2, 10.0):
        dspark.verify_cost = cost
        blocks.clear(), rounds.clear()
        out = greedy(target, random_ids(9), 16, assistant_model=dspark, return_dict_in_generate=True)
        assert out.sequences.tolist() == want
        counts = out.speculation.num_drafts
        for (_, collapsed), (*tokens, _), count in zip(blocks[:3], rounds, counts, strict=False):
            states = dspark.markov_head.markov_w1.weight[torch.cat(tokens)]
            inputs = torch.cat([collapsed[0, : len(tokens)], states], dim=-1)
            rates = (inputs @ dspark.confidence_head.proj.weight[0]).sigmoid().tolist()
            assert num_worth_verifying(rates, cost) == count == len(tokens)
        expected = {0.0: counts[0] == 5, 0.2: len(set(counts)) > 1, 10.0: set(counts) == {1}}
        assert expected[cost]


def test_sampling_is_seeded_and_stops_where_it_should():
    target = tiny_target()
    dspark = tiny_dspark(target)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 20, "max_new_tokens": 20, "assistant_model": dspark}
    torch.manual_seed(0)
    first = target.generate(random_ids(6), **options)
    torch.manual_seed(0)
    assert target.generate(random_ids(6), **options).tolist() == first.tolist()
    eos = int(greedy(target, random_ids(6), 8)[0, 9])
    stopped = greedy(target, random_ids(6), 8, assistant_model=dspark, eos_token_id=eos)
    assert stopped.tolist() == greedy(target, random_ids(6), 8, eos_token_id=eos).tolist()


class Outside(TorchDispatchMode):
    """Counts tensor operations that no forward of the two models does: those of the loop and of `propose`."""

    def __init__(self, target, drafter):
        super().__init__()
        self.number, self.depth = 0, 0
        for module in (target, target.model.embed_tokens, target.lm_head, drafter, drafter.markov_head):
            module.register_forward_pre_hook(lambda *args: self.step(1))
            module.register_forward_hook(lambda *args: self.step(-1))

    def step(self, by):
        self.depth += by

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += not self.depth
        return function(*args, **(kwargs or {}))


def test_a_round_does_no_more_outside_the_forwards_than_one_of_a_drafter_with_a_head():
    counts = {}
    for make in (tiny_dspark, partial(tiny_drafter, block_size=6, draft_head="markov", markov_rank=4)):
        target = tiny_target((SLIDING,))
        drafter, calls = make(target), []
        for max_new_tokens in (4, 12):  # the longer call less the shorter one: rounds alone
            with Outside(target, drafter) as outside:
                options = {"assistant_model": drafter, "num_assistant_tokens": 5, "return_dict_in_generate": True}
                out = greedy(target, random_ids(9), max_new_tokens, **options)
            calls.append((outside.number, len(out.speculation.num_drafts)))
        (short, few), (long, many) = calls
        counts[type(drafter).__name__] = (long - short) / (many - few)
    assert 20 < counts["DeepseekV4DSpark"] <= counts["HyperDFlashModel"]


# ------------------------------------------------------------------------------------------------------------- loading


def test_a_module_has_the_names_of_deepseeks_checkpoints():
    """Counted without experts and scales: as in V4-Flash-0731, whose stages have 1568, 1565 and 1572 tensors."""
    names = set(tiny_dspark(tiny_target(), num_stages=3).official_state_dict())
    stages = [{name[6:] for name in names if name.startswith(f"mtp.{i}.")} for i in range(3)]
    assert sum(map(len, stages)) == len(names)
    plain = [{name for name in stage if ".experts." not in name} for stage in stages]
    assert plain[0] - plain[1] == {"main_proj.weight", "main_norm.weight"}
    heads = {"norm.weight", "hc_head_fn", "hc_head_base", "hc_head_scale", "confidence_head.proj.weight"}
    assert plain[2] - plain[1] == heads | {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    attention = {f"attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "q_norm", "kv_norm")}
    others = {"attn.attn_sink", "ffn.gate.bias", "ffn.gate.weight", "attn_norm.weight", "ffn_norm.weight"}
    connections = {f"hc_{part}_{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")}
    shared = {f"ffn.shared_experts.w{i}.weight" for i in (1, 2, 3)}
    assert plain[1] == attention | others | connections | shared
    assert {name for name in stages[1] if ".experts." in name} - shared == {
        f"ffn.experts.{i}.w{part}.weight" for i in range(4) for part in (1, 2, 3)
    }


@pytest.mark.parametrize("naming", ["official", "transformers"])
def test_a_module_is_read_in_both_namings(tmp_path, naming):
    dspark = tiny_dspark(tiny_target(), num_stages=3, block_size=4)
    save_dspark(dspark, tmp_path)
    if naming == "transformers":
        own = {dspark.checkpoint_name(name): value.contiguous() for name, value in dspark.state_dict().items()}
        assert "mtp.1.self_attn.kv_proj.weight" in own
        save_file(own, tmp_path / "model.safetensors")
    loaded = load_dspark(tmp_path, tiny_config())
    assert len(loaded.layers) == 3
    assert loaded.max_drafts == 4
    assert loaded.tapped_layer_ids == [1, 2]
    assert loaded.state_dict().keys() == dspark.state_dict().keys()
    assert all(torch.equal(value, dspark.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert not any(tensor.is_meta for tensor in loaded.buffers())


def test_a_module_has_the_dtype_of_its_target_and_drafts_for_it(tmp_path):
    target = tiny_target()
    save_dspark(tiny_dspark(target), tmp_path, dtype=torch.bfloat16)
    config = tiny_config(dtype="bfloat16")
    loaded = load_dspark(tmp_path, config)
    kinds = {name: tensor.dtype for name, tensor in loaded.named_parameters()}
    assert loaded.dtype == kinds["main_proj.weight"] == kinds["markov_head.markov_w1.weight"] == torch.bfloat16
    fp32 = ("norm.weight", "main_norm.weight", "layers.0.attn_hc.base", "hc_head.hc_fn", "confidence_head.proj.weight")
    assert {kinds[name] for name in fp32} == {torch.float32}
    loaded.verify_cost = 0.0
    assert (
        greedy(target, random_ids(9), 16, assistant_model=loaded).tolist()
        == greedy(target, random_ids(9), 16).tolist()
    )
    bf16 = tiny_target().to(torch.bfloat16)
    assert greedy(bf16, random_ids(9), 8, assistant_model=loaded).shape == (1, 17)


def test_fp8_weights_are_dequantised_in_every_stage(tmp_path):
    """As in V4-Flash-0731: the projection too. (FP4 and experts: tests/test_mtp.py, by the same code.)"""
    dspark = tiny_dspark(tiny_target())
    changes = {}
    for name in ("mtp.0.main_proj", "mtp.1.attn.wkv"):
        shape = dspark.official_state_dict()[f"{name}.weight"].shape
        changes[f"{name}.weight"] = torch.randn(shape).to(torch.float8_e4m3fn)
        changes[f"{name}.scale"] = torch.full((1, 1), 0.25).to(torch.float8_e8m0fnu)
    loaded = load_dspark(save_dspark(dspark, tmp_path, **changes), tiny_config())
    assert torch.equal(loaded.main_proj.weight, changes["mtp.0.main_proj.weight"].float() / 4)
    kv = loaded.layers[1].self_attn.kv_proj.weight
    assert torch.equal(kv, changes["mtp.1.attn.wkv.weight"].float() / 4)


def test_settings_come_from_the_modules_own_config_and_else_from_the_targets(tmp_path):
    dspark = tiny_dspark(tiny_target(), block_size=3)
    save_dspark(dspark, tmp_path)
    theirs = tiny_config(**{name: getattr(dspark.config, name) for name in SETTINGS} | {"dspark_block_size": 5})
    assert load_dspark(tmp_path, theirs).max_drafts == 3
    (tmp_path / "config.json").unlink()
    assert load_dspark(tmp_path, theirs).max_drafts == 5
    with pytest.raises(ValueError, match="neither its config.json nor the target's says dspark_block_size, dspark_ta"):
        load_dspark(tmp_path, tiny_config())


def test_of_a_hub_id_only_the_files_with_the_module_are_fetched(tmp_path, monkeypatch):
    dspark, fetched = tiny_dspark(tiny_target()), []
    save_dspark(dspark, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "b.safetensors")
    names = {**dict.fromkeys(dspark.official_state_dict(), "b.safetensors"), "embed.weight": "a.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    class OnTheHub:
        def __init__(self, name, revision):
            assert (name, revision) == ("org/target", None)
            self.name, self.files = name, names

        def file(self, name):
            fetched.append(name)
            return tmp_path / name

    monkeypatch.setattr("hyperdflash.generation.native.TargetCheckpoint", OnTheHub)
    loaded = load_dspark("org/target", tiny_config())
    assert fetched == ["b.safetensors"]
    assert torch.equal(loaded.main_proj.weight, dspark.main_proj.weight)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mtp.1.markov_head.markov_w2.weight": None},
            "incomplete: there is no tensor named mtp.1.markov_head.markov_",
        ),
        ({"mtp.0.main_norm.weight": None}, "incomplete: there is no tensor named mtp.0.main_norm.weight"),
        ({"mtp.1.ffn.experts.3.w2.weight": None}, "there is no tensor named mtp.1.ffn.experts.3.w2.weight"),
        ({"mtp.0.attn.indexer.wq_b.weight": torch.ones(2)}, "another architecture: mtp.0.attn.indexer.wq_b.weight"),
        ({"mtp.1.markov_head.embed.weight": torch.ones(2)}, "another architecture: mtp.1.markov_head.embed.weight"),
        (
            {"mtp.0.main_proj.weight": torch.ones(32, 96)},
            "target's config: mtp.0.main_proj.weight is (32, 96), expected (32, 64)",
        ),
        (
            {"mtp.1.ffn.experts.0.w1.weight": torch.ones(1, 32)},
            "mtp.1.ffn.experts.0.w1.weight is (1, 32), expected (16, 32)",
        ),
    ],
)
def test_a_module_that_is_not_whole_is_refused_by_name_before_a_tensor_is_read(
    tmp_path, monkeypatch, changes, message
):
    save_dspark(tiny_dspark(tiny_target()), tmp_path, **changes)
    monkeypatch.setattr("hyperdflash.generation.native._read", lambda *args: pytest.fail("read"))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_dspark(tmp_path, tiny_config())


def test_copies_of_embedding_and_head_and_the_bias_for_images_are_left_alone(tmp_path):
    names = ("mtp.0.emb.tok_emb.weight", "mtp.1.head.weight", "mtp.0.ffn.gate.bias_vl")
    others = {name: torch.ones(2) for name in names}
    load_dspark(save_dspark(tiny_dspark(tiny_target()), tmp_path, **others), tiny_config())


def test_each_module_names_the_other_and_its_loader(tmp_path):
    target = tiny_target()
    save_dspark(tiny_dspark(target), tmp_path / "dspark")
    (tmp_path / "mtp").mkdir()
    save_file(DeepseekV4MTP(target.config).official_state_dict(), tmp_path / "mtp" / "model.safetensors")
    with pytest.raises(ValueError, match=r"carries a DSpark module under mtp\.\*.*preview checkpoint.*load_dspark"):
        load_mtp(tmp_path / "dspark", target.config)
    with pytest.raises(ValueError, match=r"carries a native MTP module under mtp\.\*.*0731.*load_mtp"):
        load_dspark(tmp_path / "mtp", target.config)
    (tmp_path / "none").mkdir()
    save_file({"lm_head.weight": torch.zeros(2)}, tmp_path / "none" / "model.safetensors")
    with pytest.raises(ValueError, match=r"no DSpark module: there is no tensor named mtp\.0\.main_proj\.weight"):
        load_dspark(tmp_path / "none", target.config)


def test_more_drafts_than_the_block_has_are_refused_with_the_number():
    """https://github.com/vllm-project/vllm/issues/41834: seven with a block of five, and every position collapses."""
    target = tiny_target()
    dspark = tiny_dspark(target)
    with pytest.raises(
        ValueError, match=r"num_assistant_tokens=7: .* at most 5 tokens per round \(dspark_block_size 5"
    ):
        greedy(target, random_ids(4), 4, assistant_model=dspark, num_assistant_tokens=7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dspark_target_layer_ids": [1, 3]}, "layers [1, 3] (from 0), but the target has 3"),
        ({"dspark_noise_token_id": VOCAB_SIZE}, "dspark_noise_token_id 64 is outside the vocabulary of 64"),
    ],
)
def test_settings_that_cannot_be_are_refused(tmp_path, change, message):
    save_dspark(tiny_dspark(tiny_target()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_dspark(tmp_path, tiny_config())


def test_another_targets_module_is_refused():
    with pytest.raises(ValueError, match="this DSpark module was made for a target with hidden_size 48"):
        greedy(tiny_target(), random_ids(4), 4, assistant_model=tiny_dspark(tiny_target(hidden_size=48)))
    deep = tiny_dspark(tiny_target((SLIDING,) * 3))
    with pytest.raises(ValueError, match=re.escape("layers [1, 2] (from 0), but the target has 1")):
        greedy(tiny_target((SLIDING,)), random_ids(4), 4, assistant_model=deep)


def test_it_does_not_generate_by_itself_and_its_experts_run_as_the_targets_do():
    target = tiny_target()
    dspark = tiny_dspark(target)
    assert dspark.config._experts_implementation == target.config._experts_implementation
    with pytest.raises(NotImplementedError, match="pass it to generate"):
        dspark.generate(random_ids(4))
