"""The plug-in's classes around a target with V4's contract and vLLM's ordinary layers (`standin.py`): what
DeepSeek-V4's own kernels on a CPU cannot show, and all of an engine where those kernels do not run."""

import pytest
import torch


def accepted(result) -> list[int]:
    return result["metrics"]["vllm:spec_decode_num_accepted_tokens_per_pos"]


@pytest.fixture
def run(engine):
    """A function of a drafter (or none) and a job."""

    def run(drafter=None, **job) -> dict:
        return engine("standin", drafter and f"../sliding/{drafter}/served", **job)

    return run


@pytest.mark.parametrize("drafter", ["silent", "random", "full", "mean", "fc", "inherited", "markov", "chain"])
def test_drafted_greedy_tokens_are_the_plain_ones(run, drafter):
    """Prompts of 3 to 250 tokens, four at a time, over pages and windows."""
    drafted, plain = run(drafter, max_tokens=40), run(max_tokens=40)
    assert drafted["tokens"] == plain["tokens"]
    rounds = drafted["metrics"]["vllm:spec_decode_num_drafts"]
    assert min(accepted(drafted)) > 0.5 * rounds if drafter == "chain" else rounds > 0


@pytest.mark.parametrize("drafter", ["both", "chain"])
def test_drafted_greedy_tokens_are_the_plain_ones_on_the_v2_runner(run, drafter):
    small = {"runner": "v2", "num_batches": 2, "max_tokens": 12}
    drafted = run(drafter, **small)
    assert drafted["tokens"] == run(**small)["tokens"]
    rounds = drafted["metrics"]["vllm:spec_decode_num_drafts"]
    assert min(accepted(drafted)) > 0.3 * rounds if drafter == "chain" else rounds > 0


@pytest.mark.parametrize("drafter", ["chain", "random"])
def test_pages_smaller_than_the_targets_change_no_token(run, drafter):
    """As the plug-in gives them to a draft beside DeepSeek-V4 (`memory.py`)."""
    drafted, plain = run(drafter, max_tokens=40, pages=32), run(max_tokens=40)
    assert drafted["tokens"] == plain["tokens"]
    rounds = drafted["metrics"]["vllm:spec_decode_num_drafts"]
    assert min(accepted(drafted)) > 0.5 * rounds if drafter == "chain" else rounds > 0


def long_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(318, (n,), generator=generator).tolist() for n in (600, 790)]


@pytest.mark.parametrize("drafter", ["full", "random", "markov"])
def test_a_prefix_from_the_cache_is_drafted_from_as_one_that_was_computed(run, drafter):
    """Prefills in chunks, twice; the second time their first part comes from the cache."""
    prompts = long_prompts()
    job = {"batches": [prompts, prompts], "max_tokens": 40, "options": {"max_model_len": 1024}}
    drafted = run(drafter, **job)
    assert drafted["metrics"]["vllm:prefix_cache_hits"] >= 768
    first, second = drafted["tokens"]
    assert first == second == run(**job)["tokens"][0]
    assert drafted["drafts"][:2] == drafted["drafts"][2:]


@pytest.mark.parametrize("drafter", ["full", "chain"])
def test_a_request_that_was_preempted_goes_on_as_if_it_had_not_been(run, drafter):
    """Four requests in a cache that does not hold them to their ends."""
    generator = torch.Generator().manual_seed(10)
    prompts = [torch.randint(318, (n,), generator=generator).tolist() for n in (100, 90, 120, 110)]
    job = {"batches": [prompts], "max_tokens": 150}
    drafted = run(drafter, **job, options=SMALL_CACHE)
    assert drafted["metrics"]["vllm:num_preemptions"] > 0
    assert drafted["tokens"] == run(**job)["tokens"]


SMALL_CACHE = {"max_model_len": 320, "num_gpu_blocks_override": 40, "block_size": 32}


def test_two_tensor_parallel_ranks_give_the_tokens_of_one(run):
    job = {"num_batches": 1, "max_tokens": 40}
    drafted = run("chain", **job, options={"tensor_parallel_size": 2})
    assert drafted["tokens"] == run(max_tokens=40)["tokens"][:1]
    assert min(accepted(drafted)) > 0.5 * drafted["metrics"]["vllm:spec_decode_num_drafts"]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_several_answers_to_a_prompt_are_drawn_from_the_target(run, runner):
    """At 0.3 nothing but its likeliest tokens has a chance."""
    job = {"num_batches": 1, "max_tokens": 12, "runner": runner}
    drawn = run("chain", **job, sampling={"temperature": 0.3, "n": 2, "seed": 7})["tokens"]
    plain = run(**job)["tokens"]
    assert drawn == [[tokens for tokens in plain[0] for _ in range(2)]]


@pytest.mark.parametrize("method", ["standard", "block"])
def test_sampled_drafts_are_verified_one_by_one_or_as_a_block(run, method):
    """Where target and head are sure, both give the target's likeliest tokens."""
    small = {"runner": "v2", "num_batches": 1, "max_tokens": 12}
    spec = {"draft_sample_method": "probabilistic", "rejection_sample_method": method}
    drawn = run("chain", **small, sampling={"temperature": 0.3, "seed": 7}, speculative_config=spec)
    assert drawn["tokens"] == run(**small)["tokens"]
    assert accepted(drawn)[0] > 0.5 * drawn["metrics"]["vllm:spec_decode_num_drafts"]
