"""A drafter in vLLM's engine on the CPU: the tokens of plain decoding, from the target's own residual, or a refusal.

Targets and drafters are random (`make_tiny.py`): what is held here is the machinery, not acceptance.
"""

import pytest

DRAFTERS = ("silent", "random", "full", "mean", "fc", "inherited", "markov", "chain")
LONG = ("silent", "chain")


def accepted(result) -> list[int]:
    return result["metrics"]["vllm:spec_decode_num_accepted_tokens_per_pos"]


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


def test_fewer_drafts_than_the_block_has_are_served(engine):
    assert engine(drafter="silent/served", drafts=1, num_batches=1)["tokens"] == engine()["tokens"][:1]


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


def test_a_stock_dflash_draft_of_v4_runs_as_without_the_plugin(engine):
    assert engine(drafter="stock", num_batches=1)["tokens"] == engine()["tokens"][:1]


# ----------------------------------------------------------------------------------------------------- V2, all layers


@pytest.mark.parametrize("target", ["sliding", "mixed"])
def test_drafted_greedy_tokens_are_the_plain_ones_on_the_v2_runner(engine, target):
    small = {"runner": "v2", "num_batches": 2, "max_tokens": 12}
    drafted = engine(target, "chain/served", watch=True, **small)
    assert drafted["tokens"] == engine(target, **small)["tokens"]
    assert drafted["watched"]["equal"] == drafted["watched"]["calls"] > 0
    assert min(accepted(drafted)) > 0.3 * drafted["metrics"]["vllm:spec_decode_num_drafts"]


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"drafter": "silent/served", "speculative_config": {"kv_cache_dtype": None}}, "kv_cache_dtype is None"),
        ({"drafter": "silent/served", "drafts": 5}, "num_speculative_tokens=5"),
        ({"drafter": "stranger/served"}, "made for another target"),
        ({"drafter": "silent/hf"}, "hyperdflash export DRAFTER OUT --format vllm"),
        ({"target": "mixed", "drafter": "../sliding/silent/served"}, "number of layers 3, but the target has 5"),
    ],
    ids=["cache dtype", "too many drafts", "another target's", "transformers folder", "another size's"],
)
def test_a_mistake_is_refused_before_a_token_is_served(engine, job, message):
    result = engine(num_batches=1, max_tokens=4, **job)
    assert message in result["error"] + result["log"]
    assert "tokens" not in result


def test_a_vllm_that_skips_the_copy_of_the_residual_is_refused(engine):
    """As an open change of vLLM would: nothing writes the buffer, and drafting from it would accept nothing."""
    result = engine(drafter="silent/served", num_batches=1, max_tokens=4, skip_copy=True)
    assert "did not write the residual paths" in result["error"]


def test_without_the_plugin_vllm_names_the_architecture_it_lacks(engine):
    result = engine(drafter="silent/served", num_batches=1, max_tokens=4, plugins="")
    assert "DFlashHyperDraftModel" in result["error"]
