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


def drafted_by(engine, drafter: str) -> dict:
    """Three batches of four prompts, sequences across pages and window; pages of finished requests are used again."""
    return engine(drafter=f"{drafter}/served", max_tokens=80 if drafter in LONG else 40, watch=True)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafted_greedy_tokens_are_the_plain_ones(engine, drafter):
    drafted = drafted_by(engine, drafter)
    for ours, plain in zip(drafted["tokens"], engine()["tokens"], strict=True):
        assert ours == [tokens[: len(ours[0])] for tokens in plain]
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


def test_at_a_low_temperature_the_likeliest_tokens_are_drawn(engine):
    """The target's tokens lead by several nats: at 0.3 nothing else has a chance, drafted or not."""
    result = engine(drafter="silent/served", num_batches=1, sampling={"temperature": 0.3, "seed": 7})
    assert result["tokens"] == engine()["tokens"][:1]
    assert accepted(result)[0] > 5


def test_a_prefix_from_the_cache_is_drafted_from_as_one_that_was_computed(engine):
    """The second batch is the first: what the draft knows of the prefix are pages that the first one left behind."""
    generator = torch.Generator().manual_seed(9)
    prompts = [torch.randint(318, (n,), generator=generator).tolist() for n in (600, 790)]
    job = {"batches": [prompts, prompts], "max_tokens": 40, "options": {"max_model_len": 1024}, "caching": True}
    drafted = engine(drafter="full/served", **job)
    assert drafted["metrics"]["vllm:prefix_cache_hits"] >= 512
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
    "V4.1": ({"architecture": "DeepseekV41ForCausalLM"}, "the target is DeepSeek-V4.1"),
    "no plug-in": ({"plugins": ""}, "DFlashHyperDraftModel"),
    # What a later vLLM might do, the first of it an open change
    "copy skipped": ({"broken": "skipped copy"}, "did not write the residual paths"),
    "no buffer": ({"broken": "no buffer"}, "paths of width 512 before hc_head, but no such buffer"),
    "narrow buffer": ({"broken": "narrow buffer"}, "paths of width 512 before hc_head, but one of width 256"),
    "window": ({"broken": "passed window", "drafter": "full/served"}, "the draft's layers the windows [128, 128]"),
    "target class": ({"broken": "stock target"}, "another class than the plug-in's serves the target"),
}


@pytest.mark.parametrize(("job", "message"), MISTAKES.values(), ids=MISTAKES)
def test_what_cannot_work_is_refused_before_a_token_is_served(engine, job, message):
    result = engine(**{"drafter": "silent/served", "num_batches": 1, "max_tokens": 4, **job})
    assert message in result["error"] + result["log"]
    assert "tokens" not in result


@pytest.mark.parametrize(
    ("field", "tensor", "spec", "message"),
    [
        ("draft_head", None, {}, "lacks draft_head"),
        (None, "reducer.hc_base", {}, "the draft's weights lack reducer.hc_base"),
        # vLLM looks for dflash in the path, which the checkout's may have and this one has not
        (None, None, {"method": None}, "method is 'draft_model'"),
    ],
    ids=["configuration", "weights", "method"],
)
def test_a_draft_that_lacks_something_is_refused(engine, build, tmp_path, field, tensor, spec, message):
    folder = shutil.copytree(build / "sliding" / "silent" / "served", tmp_path / "served")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config["hyperdflash_config"].pop(field, None)
    tensors.pop(tensor, None)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert message in engine(drafter=folder, num_batches=1, max_tokens=4, speculative_config=spec)["error"]
