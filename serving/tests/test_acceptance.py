"""A really trained drafter accepts in vLLM what it accepts in transformers, on the same sequences."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("v4")
HERE = Path(__file__).resolve().parent
NUM_ROUNDS, NEW_TOKENS, DRAFTS, BATCH = 4000, 330, 6, 16
DRAFTERS = ("drafter", "markov")
TIE = 0.25  # nats


@pytest.fixture(scope="module")
def batches(build) -> list:
    """Held-out prompts of one length."""
    file = build / "trained" / "prompts.json"
    if not file.is_file():
        pytest.fail("the trained pair is not made: run serving/tests/train_tiny.py make in the main environment")
    prompts = json.loads(file.read_text())
    return [prompts[i : i + BATCH] for i in range(0, len(prompts), BATCH)]


def sequences(batches, result) -> list[list[int]]:
    """Prompt and continuation of each."""
    return [
        prompt + tokens
        for batch, written in zip(batches, result["tokens"], strict=True)
        for prompt, tokens in zip(batch, written, strict=True)
    ]


@pytest.fixture(scope="module", params=DRAFTERS)
def drafted(request, batches, engine) -> dict:
    """Sampled sequences of vLLM with a trained drafter, and the accepted drafts of their rounds.

    Greedy texts of so small a target are loops, where any drafter is right. Sampling with greedy drafts accepts one
    exactly where the token that comes out is the draft, so that the rounds can be replayed all the same.
    """
    result = engine(
        "trained",
        f"{request.param}/served",
        batches=batches,
        drafts=DRAFTS,
        max_tokens=NEW_TOKENS,
        sampling={"temperature": 0.8, "seed": 11},
        speculative_config={"draft_sample_method": "greedy"},
    )
    return {
        "name": request.param,
        "ids": sequences(batches, result),
        "num_prompt": len(batches[0][0]),
        "rounds": result["rounds"],
    }


def replay(drafted, main_python, folder: Path, *options: str) -> list[list[int]]:
    """The rounds of transformers along these sequences, computed in the main environment."""
    items = [{"ids": ids, "num_prompt": drafted["num_prompt"]} for ids in drafted["ids"]]
    (folder / "sequences.json").write_text(json.dumps(items))
    command = [main_python, str(HERE / "train_tiny.py"), "replay", drafted["name"], *options]
    subprocess.run([*command, str(folder / "sequences.json"), str(folder / "rounds.json")], check=True)
    return json.loads((folder / "rounds.json").read_text())


def acceptance_length(rounds: list[list[int]]) -> float:
    """tau, pooled over the rounds of all sequences."""
    return 1 + sum(map(sum, rounds)) / sum(map(len, rounds))


def interval(a: list[list[int]], b: list[list[int]], samples: int = 2000) -> tuple[float, float]:
    """The 95% bootstrap interval of tau(a) - tau(b), sequences drawn with replacement, the same for both."""
    sums = torch.tensor([[sum(x), len(x), sum(y), len(y)] for x, y in zip(a, b, strict=True)], dtype=torch.float64)
    drawn = torch.randint(len(sums), (samples, len(sums)), generator=torch.Generator().manual_seed(0))
    totals = sums[drawn].sum(1)
    difference = totals[:, 0] / totals[:, 1] - totals[:, 2] / totals[:, 3]
    low, high = difference.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """The share of rounds, of all in either, that begin at the same place of the same sequence and accept the same."""

    def places(rounds):
        starts = [torch.tensor([0, *accepted]).add(1).cumsum(0).tolist() for accepted in rounds]
        return {(i, *place) for i, accepted in enumerate(rounds) for place in zip(starts[i], accepted, strict=False)}

    return len(places(a) & places(b)) / len(places(a) | places(b))


def test_the_interval_contains_a_known_difference():
    a, b = [[2, 4]] * 20, [[1, 3]] * 20
    assert interval(a, b) == (1.0, 1.0)
    assert acceptance_length(a) == 4.0


def test_rounds_agree_that_begin_and_end_at_the_same_place():
    assert agreement([[1, 0, 2], [3]], [[1, 0, 2], [3]]) == 1
    assert agreement([[1, 0, 2]], [[0, 0, 0, 2]]) == 2 / 5  # behind the first, both go on from the same place


def test_drafted_greedy_tokens_are_the_plain_ones_up_to_the_targets_ties(batches, engine):
    """A difference begins where plain decoding's own two best tokens are as close as bf16 and an fp8 cache tell."""
    some = [batches[0][:4]]
    drafted = engine("trained", "markov/served", batches=some, drafts=DRAFTS, max_tokens=160)
    plain = engine("trained", batches=some, max_tokens=160, sampling={"logprobs": 2})
    gaps = []
    for ours, theirs, top_two in zip(drafted["tokens"][0], plain["tokens"][0], plain["top_two"], strict=True):
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if first is not None:
            best_two, gap = top_two[first]
            assert {ours[first], theirs[first]} == set(best_two)
            gaps.append(gap)
    print(f"{len(gaps)} of 4 sequences differ, gaps in nats: {[round(gap, 3) for gap in gaps]}")
    assert all(gap < TIE for gap in gaps)


def test_acceptance_in_vllm_is_that_of_transformers(drafted, main_python, build, tmp_path):
    replayed = replay(drafted, main_python, tmp_path)
    low, high = interval(drafted["rounds"], replayed)
    both = {"vllm": drafted["rounds"], "transformers": replayed}
    figures = {
        "rounds": {name: sum(map(len, rounds)) for name, rounds in both.items()},
        "acceptance_length": {name: round(acceptance_length(rounds), 4) for name, rounds in both.items()},
        "difference_95": [round(low, 4), round(high, 4)],
        "agreement": round(agreement(drafted["rounds"], replayed), 4),
    }
    (build / f"acceptance-{drafted['name']}.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(figures)
    assert min(figures["rounds"].values()) >= NUM_ROUNDS
    assert figures["acceptance_length"]["vllm"] > 1.3  # a drafter that accepts nothing would agree with anything
    assert -0.1 < low <= high < 0.1
    assert figures["agreement"] > 0.95  # rounding turns a draft now and then


@pytest.mark.parametrize("drafted", ["markov"], indirect=True)
def test_a_head_that_did_nothing_would_be_noticed(drafted, main_python, tmp_path):
    """The comparison above can fail: without its head the drafter accepts less, and other rounds, everywhere."""
    few = {name: drafted[name][:8] for name in ("ids", "rounds")}
    replayed = replay({**drafted, **few}, main_python, tmp_path, "--without-head")
    low, high = interval(few["rounds"], replayed)
    share = agreement(few["rounds"], replayed)
    print(
        f"without the head tau {acceptance_length(replayed):.3f}, [{low:.3f}, {high:.3f}] less, agreement {share:.3f}"
    )
    assert low > 0.1
    assert share < 0.5
