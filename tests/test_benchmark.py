"""`hyperdflash benchmark`: fair, exact where it can be, resumable, and clear about what it cannot do.

Most tests run the command on a random DeepSeek-V4 with the example tokenizer; drafters follow a script.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from child import fork, wait_for_lines
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_v4 import (
    ALWAYS,
    ScriptedDrafter,
    nightly,
    save_dspark,
    tiny_drafter,
    tiny_drafter_config,
    tiny_dspark,
    tiny_target,
)
from transformers import AutoTokenizer
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hyperdflash.__main__ import main
from hyperdflash.benchmark import benchmark as module
from hyperdflash.benchmark import environment
from hyperdflash.benchmark import methods as methods_module
from hyperdflash.benchmark.benchmark import Benchmark, Plan, call_seed
from hyperdflash.benchmark.methods import Variant, checkpoint_labels, find_checkpoints, load_variants, parse_methods
from hyperdflash.benchmark.prompt_sets import Prompt, PromptSet
from hyperdflash.benchmark.records import Records
from hyperdflash.benchmark.timing import timed_call
from hyperdflash.common.checkpoint import TargetCheckpoint
from hyperdflash.common.console import UsageError
from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.generation.demo import TINY
from hyperdflash.generation.mtp import DeepseekV4MTP

ROOT = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 4096
PLAIN = Variant("target-only", None, {})


@pytest.fixture(scope="module")
def target():
    return tiny_target(vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "target")


@pytest.fixture(scope="module")
def world(tmp_path_factory, target):
    """Folders of a target with its MTP module, drafters of block 4, and prompt files."""
    folder = tmp_path_factory.mktemp("world")
    target.save_pretrained(folder / "target")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "target" / name, folder / "target")
    torch.manual_seed(3)
    (folder / "mtp").mkdir()
    save_file(DeepseekV4MTP(target.config).official_state_dict(), folder / "mtp" / "model.safetensors")
    save_dspark(tiny_dspark(target), folder / "dspark")
    tiny_drafter(target).save_pretrained(folder / "a" / "final")
    tiny_drafter(target, seed=2).save_pretrained(folder / "b" / "final")
    tiny_drafter(target, reducer="mean").save_pretrained(folder / "mean")
    tiny_drafter(target, context_source="hidden_layers", target_layer_ids=[0, 1]).save_pretrained(folder / "dflash")
    heads = {
        "draft_head": "markov",
        "markov_rank": 8,
        "draft_confidence": True,
        "verify_cost": 10.0,
    }  # 1 draft is worth it
    tiny_drafter(target, **heads).save_pretrained(folder / "markov")
    rows = [{"turns": [f"Question {i}", "Again"][: 1 + i % 2]} for i in range(3)]
    (folder / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "one.jsonl").write_text(json.dumps({"prompt": "Write a haiku."}) + "\n")
    return folder


@pytest.fixture
def command(world, tmp_path, monkeypatch):
    """Run the benchmark in `world`; returns the status and the results, or None."""
    monkeypatch.chdir(world)

    def run(*options, out=tmp_path / "out", prompts=("one.jsonl",), methods=("hyperdflash:3=a/final",), tokens="8"):
        argv = ["benchmark", "target", "--output", str(out), "--max-new-tokens", tokens]
        argv += ["--methods", *methods] if methods else []
        status = main([*argv, *(["--prompts", *prompts] if prompts else []), *options])
        path = out / "results.json"
        return status, json.loads(path.read_text()) if path.is_file() else None

    return run


class Oracle(ScriptedDrafter):
    """Knows the target's greedy texts (`texts`), and is right in the way of `plan(text)` about them."""

    def propose(self, request, choose):
        prefix = request.ids[0].tolist()
        text = next(text for text in self.texts if text[: len(prefix)] == prefix)
        if getattr(self, "sequence", None) != text:
            self.follow(torch.tensor([text]), self.plan(text))
        super().propose(request, choose)


def oracle(target, texts, plan) -> Variant:
    drafter = Oracle(tiny_drafter_config(target)).eval()
    drafter.texts, drafter.plan = texts, plan
    return {"assistant_model": drafter, "num_assistant_tokens": 3}


def prompt_set(*numbers_of_turns) -> PromptSet:
    words = ["Tell me about the sea.", "And now about the sky.", "And rivers?"]
    return PromptSet("talk", [Prompt(i, tuple(f"{i} {w}" for w in words[:n])) for i, n in enumerate(numbers_of_turns)])


def measure(target, tokenizer, folder, variants, sets, *, temperatures=(0.0,), max_new_tokens=10):
    """Results of the variants, without the command line; and the benchmark itself."""
    encoding = {"effort": None, "generation": "preview"}
    plan = Plan(sets, ["non-thinking"], list(temperatures), [0], encoding, max_new_tokens)
    with Records(folder, {"datasets": {}}) as records:
        bench = Benchmark(target, tokenizer, variants, plan, records)
        bench.run()
    return bench.results(complete=True), bench


@pytest.fixture
def greedy_texts(target, tokenizer, tmp_path, monkeypatch):
    """The greedy texts, prompt included, of a set; in the order of the plan."""

    def texts(sets, max_new_tokens=10):
        found = []

        def spy(target, options, ids, **kwargs):
            figures = timed_call(target, options, ids, **kwargs)
            found.append(ids + figures["new_ids"])
            return figures

        with monkeypatch.context() as patch:
            patch.setattr(module, "timed_call", spy)
            measure(target, tokenizer, tmp_path / "plain", [PLAIN], sets, max_new_tokens=max_new_tokens)
        return found[1:]  # the first is the warm-up's

    return texts


# -------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.slow
def test_the_average_is_a_hand_count_over_all_rounds(target, tokenizer, tmp_path, greedy_texts):
    """https://github.com/vllm-project/vllm/pull/17908, https://github.com/SafeAILab/EAGLE/issues/95

    Five turns of 10 tokens: one from the prefill, nine from rounds of up to three drafts. A round never drafts more
    than the limit leaves room for beside the target's own token, and a step without drafts is not a round.
    """
    sets = [prompt_set(1, 2, 2)]
    texts = greedy_texts(sets)
    assert len(texts) == 5
    first_turns = [texts[0], texts[1], texts[3]]
    plans = {
        "right": lambda text: ALWAYS,
        "wrong": lambda text: 0,
        "two": lambda text: 2,
        "first turns": lambda text: ALWAYS if text in first_turns else 0,
    }
    variants = [PLAIN, *(Variant(name, None, oracle(target, texts, plan)) for name, plan in plans.items())]
    results, _ = measure(target, tokenizer, tmp_path / "out", variants, sets)
    rows = {row["method"]: row for row in results["rows"]}
    assert {row["num_new_tokens"] for row in rows.values()} == {50}
    assert results["lossless"]["num_compared"] == 20
    assert results["lossless"]["num_unexplained"] == 0
    for name, num_rounds, num_drafts, accepted, rates, conditional in (
        ("right", 10, 30, 30, [1, 1, 1], [1, 1, 1]),  # 3 + 1, 3 + 1, and one token without drafts
        ("wrong", 40, 5 * (6 * 3 + 2 + 1), 0, [0, 0, 0], [0, 0, 0]),
        ("two", 15, 40, 30, [1, 1, 0], [1, 1, 0]),  # 2 + 1 of three drafts, the same again, 2 + 1 of two
        ("first turns", 22, 18 + 42, 18, [6 / 22] * 3, [6 / 22, 1, 1]),
    ):
        row = rows[name]
        assert row["num_rounds"] == row["spec_decode_num_drafts"] == num_rounds, name
        assert row["spec_decode_num_draft_tokens"] == num_drafts, name
        assert row["acceptance_length"] == 1 + accepted / num_rounds, name
        assert row["per_position_acceptance_rates"] == rates, name
        assert row["conditional_acceptance_rates"] == conditional, name


class FakeTime:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_with_a_synthetic_clock_the_ratio_is_the_hand_value(target, tokenizer, tmp_path, greedy_texts, monkeypatch):
    """https://github.com/hemingkx/Spec-Bench/issues/29. A target step takes 10 s, a block 12 s, a draft 2 s, the loop
    1 s for every token that it looks at."""
    sets = [prompt_set(1, 1)]
    texts = greedy_texts(sets)
    clock = FakeTime()

    class Timed(Oracle):
        def forward(self, **kwargs):
            clock.now += 2

        def draft(self, *args):
            self()
            return super().draft(*args)

    variant = Variant("right", None, oracle(target, texts, lambda text: ALWAYS))
    variant.assistant.__class__ = Timed

    def spend(model, args, kwargs):
        clock.now += 10 if kwargs["input_ids"].shape[1] == 1 else 12

    put = module.timed_call.__globals__["Timestamps"].put_round

    def put_slowly(timestamps, new_ids, *args):
        put(timestamps, new_ids, *args)
        clock.now += len(new_ids)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(module.timed_call.__globals__["Timestamps"], "put_round", put_slowly)
    handle = target.model.register_forward_pre_hook(spend, with_kwargs=True)
    try:
        results, _ = measure(target, tokenizer, tmp_path / "out", [PLAIN, variant], sets)
    finally:
        handle.remove()
    plain, row = results["rows"]
    # Nine tokens: nine steps of 10 s; or two rounds of 12 + 2 s and one step of 10 s. The stream adds 10 s to both
    assert plain["tokens_per_second"] == 9 / 100
    assert row["tokens_per_second"] == 9 / 48
    assert row["speedup"] == pytest.approx(100 / 48)
    assert row["speedup_interval"] == pytest.approx([100 / 48] * 2)
    # From one forward's end to the next: the first token's second and the rounds', less what comes behind the last
    assert plain["step_seconds"] == pytest.approx(11)
    assert (plain["verify_seconds"], plain["other_seconds"]) == (10, pytest.approx(1))
    assert row["step_seconds"] == pytest.approx((28 + 10 + 1 + 4 + 4) / 3)
    assert row["draft_share"] == pytest.approx(4 / 47)
    assert row["verify_share"] == pytest.approx(34 / 47)
    assert row["other_share"] == pytest.approx(9 / 47)
    assert row["attainable_speedup"] == pytest.approx(3 * 11 / (34 / 3 + 4 / 3 + 1))


NUMBERS = (None, 2, 3)  # of drafts, of three variants


def lookup_arms() -> list[Variant]:
    return [PLAIN, *(Variant(f"prompt-lookup:{n}", None, {"prompt_lookup_num_tokens": n}) for n in NUMBERS[1:])]


@pytest.fixture
def calls(monkeypatch):
    """What is decoded: number of drafts, of new tokens, and the temperature."""
    calls = []

    def spy(target, options, ids, **kwargs):
        calls.append((options.get("prompt_lookup_num_tokens"), kwargs["max_new_tokens"], kwargs["temperature"]))
        return timed_call(target, options, ids, **kwargs)

    monkeypatch.setattr(module, "timed_call", spy)
    return calls


def test_every_temperature_is_warmed_up_and_that_is_not_recorded(target, tokenizer, tmp_path, calls):
    """Greedy and sampled decoding run other kernels."""
    sets, options = [prompt_set(1)], {"temperatures": [0.0, 1.0], "max_new_tokens": 20}
    results, _ = measure(target, tokenizer, tmp_path, lookup_arms(), sets, **options)
    for temperature, at in ((0.0, 0), (1.0, 6)):
        assert calls[at : at + 3] == [(number, 16, temperature) for number in NUMBERS]
        assert {number for number, *rest in calls[at + 3 : at + 6] if rest == [20, temperature]} == set(NUMBERS)
    assert [row["num_new_tokens"] for row in results["rows"]] == [20] * 6


@pytest.mark.slow
def test_no_method_always_follows_the_same_one(target, tokenizer, tmp_path, calls):
    """https://github.com/hemingkx/Spec-Bench/issues/29: what comes before leaves caches and clocks warm or cold."""
    for folder in ("a", "b"):
        measure(target, tokenizer, tmp_path / folder, lookup_arms(), [prompt_set(*[1] * 24)], max_new_tokens=2)
    orders = [tuple(number for number, *_ in calls[i : i + 3]) for i in range(3, len(calls) // 2, 3)]
    assert len(orders) == 24
    assert len(set(orders)) == 6
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]  # the same in every run


def test_later_turns_follow_the_targets_own_answer_for_every_method(target, tokenizer, tmp_path, monkeypatch):
    """Also where sampled answers differ."""
    asked = {}

    def spy(target, options, ids, **kwargs):
        if kwargs["max_new_tokens"] == 12:
            asked.setdefault(options.get("num_assistant_tokens"), []).append(ids)
        return timed_call(target, options, ids, **kwargs)

    monkeypatch.setattr(module, "timed_call", spy)
    monkeypatch.setattr(module, "WARM_UP_TOKENS", 2)
    variant = Variant("m", None, {"assistant_model": tiny_drafter(target), "num_assistant_tokens": 3})
    measure(target, tokenizer, tmp_path, [PLAIN, variant], [prompt_set(3)], temperatures=[1.0], max_new_tokens=12)
    assert asked[None] == asked[3]
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    plain = [record["new_ids"] for record in records if record["method"] == "target-only"]
    assert plain != [record["new_ids"] for record in records if record["method"] == "m"]
    assert tokenizer.decode(plain[0]) in tokenizer.decode(asked[3][1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_of_prompt_lookup_are_counted_exactly(temperature, monkeypatch):
    """Against what its candidate generator proposed and what the answer became."""
    target, proposed = tiny_target(vocab_size=16), []  # so few tokens that answers repeat themselves
    own = PromptLookupCandidateGenerator.get_candidates

    def spy(self, input_ids, **kwargs):
        out = own(self, input_ids, **kwargs)
        proposed.append((input_ids.shape[1], out[0][0, input_ids.shape[1] :].tolist()))
        return out

    monkeypatch.setattr(PromptLookupCandidateGenerator, "get_candidates", spy)
    ids, all_accepted = [5, 6, 7, 8, 9] * 4, set()
    for seed in range(6):
        proposed.clear()
        options = {"max_new_tokens": 14 + seed, "temperature": temperature, "seed": seed}
        figures = timed_call(target, {"prompt_lookup_num_tokens": 4}, ids, **options)
        text = ids + figures["new_ids"]
        drafts, accepted = [], []
        for start, candidates in proposed[1:]:  # the prefill is not a round
            candidates = candidates[: len(ids) + options["max_new_tokens"] - start - 1]
            if candidates:
                drafts.append(len(candidates))
                agree = [a == b for a, b in zip(candidates, text[start:], strict=False)]
                accepted.append(agree.index(False) if False in agree else len(agree))
        assert (figures["num_drafts"], figures["num_accepted"]) == (drafts, accepted)
        all_accepted |= set(accepted)
    assert len(all_accepted) > 1


def test_every_call_has_a_seed_of_its_own():
    calls = [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    seeds = [call_seed(*call) for call in calls]
    assert len(set(seeds)) == 5
    assert seeds == [call_seed(*call) for call in calls]
    assert all(0 <= seed < 2**63 for seed in seeds)


# -------------------------------------------------------------------------------------------------- the lossless check


class Liar(ScriptedDrafter):
    """Changes one token of every answer."""

    def assisted_decoding_loop(self, *args, **kwargs):
        output = super().assisted_decoding_loop(*args, **kwargs)
        output.sequences[0, -3] = (output.sequences[0, -3] + 1) % 100
        return output


def with_liar(monkeypatch):
    def load(methods, target, dtype):
        liar = Liar(tiny_drafter_config(target)).eval().follow(torch.zeros((1, 1), dtype=torch.long), 0)
        return [PLAIN, Variant(methods[1].label, None, {"assistant_model": liar, "num_assistant_tokens": 3})]

    monkeypatch.setattr(module, "load_variants", load)


def test_a_method_that_changes_a_token_is_caught(command, monkeypatch, capsys):
    with_liar(monkeypatch)
    status, results = command()
    assert status == 1
    assert results["lossless"]["num_unexplained"] == 1
    (difference,) = results["rows"][1]["differences"]
    assert (difference["position"], difference["explained"]) == (5, False)
    assert difference["gap"] > results["lossless"]["tie_gap"]
    out = capsys.readouterr().out
    assert "FAILED: 1 of 1" in out
    assert "NOT rounding" in out


def test_a_difference_at_a_tie_is_explained_and_no_failure(command, monkeypatch):
    with_liar(monkeypatch)
    monkeypatch.setattr(module, "first_difference", lambda target, plain, other: (plain.shape[1] - 3, 5e-4))
    status, results = command()
    assert status == 0
    assert (results["lossless"]["num_ties"], results["lossless"]["num_unexplained"]) == (1, 0)


def test_a_tie_of_the_targets_best_two_tokens_does_not_explain_a_third(command, monkeypatch):
    with_liar(monkeypatch)
    own, best = module.load_target, torch.tensor([900, 901])

    def load(*args):
        target, tokenizer = own(*args)
        target.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, best, 1e3))
        return target, tokenizer

    monkeypatch.setattr(module, "load_target", load)
    status, results = command()
    assert status == 1
    (difference,) = results["rows"][1]["differences"]
    assert not difference["explained"]
    assert difference["gap"] > 900


def test_an_answer_that_only_ends_elsewhere_is_a_difference(command, monkeypatch):
    with_liar(monkeypatch)
    monkeypatch.setattr(module, "first_difference", lambda target, plain, other: (plain.shape[1], float("inf")))
    status, results = command()
    assert status == 1
    (difference,) = results["rows"][1]["differences"]
    assert (difference["gap"], difference["explained"]) == (None, False)


def test_plain_decoding_alone_says_what_it_did(command, tmp_path, capsys):
    status, results = command(methods=("target-only",))
    assert (status, results["lossless"]["num_compared"]) == (0, 0)
    out = capsys.readouterr().out
    assert "Lossless check not made: only target-only was measured." in out
    assert "no pictures: only target-only was measured" in out
    assert "one: 1 prompt, no interval." in out
    assert not (tmp_path / "out" / "speedup.png").exists()


def test_sampled_answers_are_not_compared(command, capsys):
    status, results = command("--temperatures", "1")
    assert status == 0
    assert results["lossless"]["num_compared"] == 0
    assert "not made" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------- whole runs


def acceptance(results) -> list:
    names = ("method", "checkpoint", "dataset", "mode", "temperature", "seed", "num_new_tokens", "acceptance_length")
    names += ("acceptance_length_interval", "per_position_acceptance_rates", "spec_decode_num_drafts")
    return [[row[name] for name in names] for row in results["rows"]]


METHODS = ("hyperdflash:3=a/final,b/final", "mean:3=mean", "dflash:2=dflash", "mtp:2=mtp", "prompt-lookup:3")
GRID = ("--modes", "non-thinking", "thinking", "--temperatures", "0", "1", "--seeds", "0", "1")


@pytest.mark.slow
@pytest.mark.pictures
def test_a_whole_run_writes_all_its_files(command, tmp_path, capsys):
    status, results = command(*GRID, methods=METHODS, prompts=("one.jsonl",), tokens="6")
    assert status == 0
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        *("records.jsonl", "settings.json", "results.json", "results.csv", "table.md", "command.txt"),
        *("acceptance.png", "speedup.png"),
    }
    # 7 variants, 2 modes; greedy once, sampling with two seeds
    assert len(results["rows"]) == 7 * 2 * 3
    assert {row["num_new_tokens"] for row in results["rows"]} == {6}
    labels = [row["checkpoint"] for row in results["rows"] if row["method"] == "hyperdflash:3"]
    assert labels == ["a/final"] * 6 + ["b/final"] * 6
    for row in results["rows"]:
        shares = [row["draft_share"], row["verify_share"], row["other_share"]]
        assert (shares[0] is None) == (row["method"] == "prompt-lookup:3")
        assert sum(share or 0 for share in shares) == pytest.approx(1)
    assert results["environment"]["versions"]["torch"] == torch.__version__
    assert results["environment"]["command"] == (tmp_path / "out" / "command.txt").read_text().strip()
    assert "all 12 greedy answers" in capsys.readouterr().out
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.count("**") == 2 * 4
    for sentence in ("Above temperature 0 each method samples", "prompt-lookup runs in transformers' own loop"):
        assert sentence in table
        assert sentence in results["definitions"]


@pytest.mark.slow
def test_a_rerun_with_the_same_seed_has_the_same_acceptance_to_the_digit(command, tmp_path):
    options = ("--temperatures", "1", "--seeds", "7")
    runs = [command(*options, prompts=("two.jsonl",), out=tmp_path / name)[1] for name in "ab"]
    assert acceptance(runs[0]) == acceptance(runs[1])
    other = command("--temperatures", "1", "--seeds", "8", prompts=("two.jsonl",), out=tmp_path / "c")[1]
    assert [r["num_new_tokens"] for r in other["rows"]] == [r["num_new_tokens"] for r in runs[0]["rows"]]
    ids = [
        [json.loads(line)["new_ids"] for line in sorted((tmp_path / name / "records.jsonl").read_text().splitlines())]
        for name in "abc"
    ]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.slow
def test_the_same_command_resumes_after_a_torn_line(command, tmp_path, monkeypatch):
    whole = command(prompts=("two.jsonl",), out=tmp_path / "whole")[1]
    _, first = command(prompts=("two.jsonl",))
    assert first["resumed"] == 0
    path = tmp_path / "out" / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:40])
    calls = []

    def spy(target, options, ids, **kwargs):
        calls.append(kwargs["max_new_tokens"])
        return timed_call(target, options, ids, **kwargs)

    monkeypatch.setattr(module, "WARM_UP_TOKENS", 2)
    monkeypatch.setattr(module, "timed_call", spy)
    status, second = command(prompts=("two.jsonl",))
    assert (status, second["resumed"]) == (0, 3)
    assert calls == [2, 2, *[8] * (len(lines) - 3)]
    assert path.read_text().startswith("".join(lines[:3]))
    assert acceptance(second) == acceptance(first) == acceptance(whole)
    calls.clear()
    assert command(prompts=("two.jsonl",))[1]["resumed"] == len(lines)
    assert calls == []  # not even a warm-up


def test_interrupted_by_the_keyboard_it_leaves_what_it_has(command, tmp_path, monkeypatch):
    count = iter(range(100))

    def interrupted(*args, **kwargs):
        if next(count) == 6:  # two of them for the warm-up
            raise KeyboardInterrupt
        return timed_call(*args, **kwargs)

    monkeypatch.setattr(module, "timed_call", interrupted)
    status, results = command(prompts=("two.jsonl",))
    assert status == 130
    assert not results["complete"]
    assert [row["num_new_tokens"] for row in results["rows"]] == [16, 16]
    assert "INCOMPLETE" in (tmp_path / "out" / "table.md").read_text()
    status, results = command(prompts=("two.jsonl",))
    assert (status, results["complete"], results["resumed"]) == (0, True, 4)


def test_an_error_leaves_what_was_measured_and_says_where_it_came(command, tmp_path, monkeypatch, capsys):
    count = iter(range(100))

    def out_of_memory(target, options, ids, **kwargs):
        if next(count) >= 6 and options:  # two of them for the warm-up
            raise torch.OutOfMemoryError("out of memory")
        return timed_call(target, options, ids, **kwargs)

    monkeypatch.setattr(module, "timed_call", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        command(prompts=("two.jsonl",))
    where = (
        "stopped at method hyperdflash:3, checkpoint final, dataset two, mode non-thinking, temperature 0.0, seed 0, "
    )
    assert where + "prompt" in capsys.readouterr().err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert not results["complete"]
    assert [row["num_new_tokens"] for row in results["rows"]] == [16, 16]
    assert "INCOMPLETE" in (tmp_path / "out" / "table.md").read_text()
    monkeypatch.setattr(module, "timed_call", timed_call)
    status, results = command(prompts=("two.jsonl",))
    assert (status, results["complete"]) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("moments", [(1, 8, 15), nightly((1, 2, 3, 5, 7, 9, 11, 13, 14, 15))], ids=len)
def test_a_killed_run_ends_with_the_figures_of_one_that_was_not(command, world, tmp_path, moments):
    """After the first of 16 calls, in the middle, in the last."""
    options = ["--temperatures", "0", "1", "--seeds", "3", "--max-new-tokens", "16", "--threads", "1"]
    argv = ["benchmark", "target", "--methods", "hyperdflash:3=a/final", "--prompts", "two.jsonl", *options]
    out = tmp_path / "killed"
    records = out / "records.jsonl"

    def run_to(number) -> int:
        """The command, which stops for good in the call behind so many."""

        def call(*args, **kwargs):
            if records.read_bytes().count(b"\n") >= number:
                signal.pause()
            return timed_call(*args, **kwargs)

        module.timed_call = call
        return main([*argv, "--output", str(out)])

    kept = b""
    for number in moments:
        pid = fork(lambda number=number: run_to(number))
        wait_for_lines(records, number, pid)
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        assert records.read_bytes().startswith(kept)
        kept = records.read_bytes()
        assert kept.count(b"\n") == number
    assert main([*argv, "--output", str(out)]) == 0
    assert main([*argv, "--output", str(tmp_path / "whole")]) == 0
    assert records.read_bytes().startswith(kept)
    killed, whole = (json.loads((f / "results.json").read_text()) for f in (out, tmp_path / "whole"))
    assert killed["resumed"] == number
    assert acceptance(killed) == acceptance(whole)
    assert len(records.read_text().splitlines()) == 2 * 4 * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tokens": "9"}, "max_new_tokens 8 (now 9)"),
        ({"methods": ("hyperdflash:2=a/final",)}, "methods"),
        ({"prompts": ("two.jsonl",)}, "datasets"),
        ({"extra": ("--seeds", "1")}, "seeds [0] (now [1])"),
        ({"extra": ("--dtype", "bfloat16")}, "dtype float32 (now bfloat16)"),
    ],
)
def test_a_changed_setting_is_refused_by_name_and_nothing_touched(command, tmp_path, capsys, options, name):
    command()
    before = {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    status, _ = command(*options.pop("extra", ()), **options)
    assert status == 1
    assert name in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        (environment, "_device_name", lambda device: "abacus", '(now ["abacus"])'),
        (torch, "get_num_threads", lambda: 5, "threads 1 (now 5)"),
        (environment, "version", lambda package: "0.0", "versions"),
    ],
)
def test_records_of_two_machines_or_libraries_are_not_mixed(
    command, tmp_path, monkeypatch, capsys, place, name, value, message
):
    command()
    assert command("--threads", "1", "--dtype", "float32")[0] == 0  # the same, in more words
    monkeypatch.setattr(place, name, value)
    assert command()[0] == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of this repository's code for the benchmark to look at; an edit of it is seen, but not run."""
    folder = tmp_path / "sources"
    for path in [*ROOT.glob("*.py"), *ROOT.glob("generation/*.py"), *ROOT.glob("benchmark/*.py")]:
        (folder / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / path.relative_to(ROOT))
    monkeypatch.setattr(environment, "SOURCES", folder)
    return folder


def edit(path):
    path.write_text(path.read_text() + "\n\nEDITED = True\n")


def test_a_run_goes_on_after_an_edit_of_code_that_measures_nothing(command, sources, tmp_path, capsys):
    command()
    edit(sources / "generation" / "demo.py")
    edit(sources / "benchmark" / "report.py")
    with (sources / "target_hyperdflash.py").open("a") as file:
        file.write("# only a comment\n")
    status, results = command()
    assert (status, results["resumed"], results["code_changes"]) == (0, 2, [])
    assert "changed" not in capsys.readouterr().err
    assert "changed" not in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "generation_hyperdflash.py",
        "benchmark/timing.py",
        "generation/mtp.py",
        nightly("modeling_hyperdflash.py"),
        nightly("target_hyperdflash.py"),
        nightly("benchmark/methods.py"),
    ],
)
def test_calls_of_two_measuring_codes_in_one_table_are_said_to_be(command, sources, tmp_path, capsys, name):
    command()
    records, file = tmp_path / "out" / "records.jsonl", name.rpartition("/")[2]
    first, second = records.read_text().splitlines(keepends=True)
    records.write_text(first)
    before = json.loads((tmp_path / "out" / "results.json").read_text())["sources"]
    edit(sources / name)
    status, results = command()
    assert (status, results["code_changes"]) == (0, [{"after_calls": 1, "files": [file]}])
    assert {name for name in before if before[name] != results["sources"][name]} == {file}
    assert f"{file} changed after the 1 calls in" in capsys.readouterr().err
    assert f"1 calls were measured before {file} changed" in (tmp_path / "out" / "table.md").read_text()
    # Which a third run, of the same code, does not forget
    _, results = command()
    assert results["code_changes"] == [{"after_calls": 1, "files": [file]}]
    assert "changed after" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("num_lines", [0, 2], ids=["nothing measured", "nothing left to measure"])
def test_code_that_changes_before_the_first_call_or_after_the_last_mixes_nothing(
    command, sources, tmp_path, num_lines
):
    command()
    records = tmp_path / "out" / "records.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:num_lines]))
    before = json.loads((tmp_path / "out" / "results.json").read_text())["sources"]
    edit(sources / "generation_hyperdflash.py")
    status, results = command()
    assert (status, results["code_changes"]) == (0, [])
    assert (results["sources"] == before) == (num_lines == 2)  # those that measured
    assert "changed" not in (tmp_path / "out" / "table.md").read_text()


def test_a_checkpoint_trained_on_under_the_same_name_is_another_setting(command, target, tmp_path, capsys):
    tiny_drafter(target).save_pretrained(tmp_path / "drafter")
    method = (f"hyperdflash:3={tmp_path / 'drafter'}",)
    assert command(methods=method)[0] == 0
    tiny_drafter(target, seed=5).save_pretrained(tmp_path / "drafter")
    assert command(methods=method)[0] == 1
    assert "was started with methods" in capsys.readouterr().err


def test_a_folder_that_is_no_benchmarks_is_refused(command, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    assert command() == (1, None)
    assert "is not empty and does not hold a benchmark" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert command(out=tmp_path / "file") == (1, None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_two_runs_do_not_write_to_one_folder(command, tmp_path, capsys):
    command()
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())["benchmark"]
    with Records(tmp_path / "out", settings):
        assert command()[0] == 1
    assert "another run is writing to" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ sets and prompts


def no_hub(*args, **kwargs):
    raise ConnectionError("no network here")


@pytest.mark.slow
def test_a_set_that_cannot_be_downloaded_is_skipped_and_reported(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.load_dataset", no_hub)
    status, results = command("--datasets", "gsm8k")
    assert status == 1
    assert {row["dataset"] for row in results["rows"]} == {"one"}
    assert results["missing_sets"] == ["gsm8k"]
    assert "Skipped sets (not available): gsm8k." in (tmp_path / "out" / "table.md").read_text()
    assert "the set gsm8k (openai/gsm8k) could not be downloaded: no network here" in capsys.readouterr().err
    # Once it is there, the run resumes with it
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: [{"question": "2 + 2?"}])
    status, results = command("--datasets", "gsm8k")
    assert (status, results["resumed"]) == (0, 2)
    assert {row["dataset"] for row in results["rows"]} == {"one", "gsm8k"}
    assert "2 calls were measured by an earlier run" in (tmp_path / "out" / "table.md").read_text()
    # With other rows it is another set
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: [{"question": "2 + 3?"}])
    assert command("--datasets", "gsm8k")[0] == 1


def test_without_any_set_nothing_is_written(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("datasets.load_dataset", no_hub)
    assert command("--datasets", "gsm8k", prompts=()) == (1, None)
    assert not (tmp_path / "out").exists()
    assert "there is no prompt set to measure" in capsys.readouterr().err


def test_prompts_that_are_too_long_are_left_out_counted_and_said(command, tmp_path, capsys):
    rows = [{"prompt": "short"}, {"prompt": "long " * 2100}, {"turns": ["short too", "long " * 2100, "never asked"]}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, results = command(prompts=(str(tmp_path / "some.jsonl"),))
    assert status == 0
    assert [row["num_prompts"] for row in results["rows"]] == [2, 2]
    assert sorted((x["prompt"], x["turn"]) for x in results["left_out"]) == [(1, 0), (2, 1)]
    assert all(x["num_prompt_tokens"] > 2040 for x in results["left_out"])
    assert "longer than 2040 tokens, left out entirely or from a later turn on: 2 of some" in capsys.readouterr().out
    assert (
        "longer than 2040 tokens, left out entirely or from a later turn on: 2 of some"
        in (tmp_path / "out" / "table.md").read_text()
    )


def test_a_set_with_no_prompt_left_is_said_and_the_others_go_on(command, tmp_path, capsys):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "long " * 2100}) + "\n")
    status, results = command(prompts=(str(tmp_path / "long.jsonl"), "one.jsonl"))
    assert status == 1
    assert {row["dataset"] for row in results["rows"]} == {"one"}
    assert "all prompts of long (non-thinking) are too long" in capsys.readouterr().err
    status, results = command(prompts=(str(tmp_path / "long.jsonl"),), out=tmp_path / "none")
    assert (status, results["rows"]) == (1, [])


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ("hyperdflesh:6=a/final",)}, "unknown method 'hyperdflesh'"),
        ({"methods": ("hyperdflash:6",)}, "needs a drafter, as in hyperdflash:6=FOLDER"),
        ({"methods": ("hyperdflash=a/final",)}, "give the number of drafts per round"),
        ({"methods": ("mtp:0",)}, "give the number of drafts per round"),
        ({"methods": ("mtp:three",)}, "give the number of drafts per round"),
        ({"methods": ("mtp:3=",)}, "a checkpoint after '=' or ',' is empty"),
        ({"methods": ("prompt-lookup:3=a/final",)}, "takes no checkpoint"),
        ({"methods": ("target-only:3",)}, "takes neither"),
        ({"methods": ("mtp:3", "mtp:3")}, "twice"),
        ({"methods": ("hyperdflash:3=a/final,a/final",)}, "twice"),
        ({"methods": ("hyperdflash:3=a/final,./a/final",)}, "twice"),
        ({"methods": ("hyperdflash:3=a/final", "hyperdflash:3=b/../a/final")}, "twice"),
        ({"methods": ("=",)}, "unknown method '='"),
        ({"prompts": ()}, "no prompts"),
        ({"prompts": ("one.jsonl", "./one.jsonl")}, "'one' is given twice"),
        ({"extra": ("--datasets", "gsm9k")}, "unknown set 'gsm9k'"),
        ({"extra": ("--num-prompts", "0")}, "--num-prompts must be at least 1, got 0"),
        ({"extra": ("--threads", "0")}, "--threads must be at least 1, got 0"),
        ({"tokens": "0"}, "--max-new-tokens must be at least 1, got 0"),
        ({"extra": ("--temperatures", "-1")}, "--temperatures must be 0 (greedy) or above, got -1"),
        ({"extra": ("--temperatures", "nan")}, "got nan"),
        ({"extra": ("--temperatures", "1", "1")}, "--temperatures has a value twice"),
        ({"extra": ("--effort", "high")}, "--effort high is for thinking mode"),
        ({"extra": ("--effort", "huge", "--modes", "thinking")}, "unknown effort 'huge'"),
        ({"extra": ("--generation", "next")}, "invalid choice: 'next'"),
    ],
)
def test_wrong_usage_has_status_2_and_loads_nothing(command, monkeypatch, tmp_path, capsys, options, message):
    for name in ("TargetCheckpoint", "load_target"):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("loaded"))
    assert command(*options.pop("extra", ()), **options) == (2, None)
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_an_empty_prompt_file_is_wrong_usage_and_a_missing_one_an_error(command, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("\n")
    assert command(prompts=(str(tmp_path / "empty.jsonl"),)) == (2, None)
    assert command(prompts=("nowhere.jsonl",)) == (1, None)
    err = capsys.readouterr().err
    assert "empty.jsonl is empty" in err
    assert "nowhere.jsonl" in err


@pytest.mark.parametrize(
    "options",
    [
        ("--thread", "1"),
        ("--max-new", "3"),
        ("--threads", "false"),
        ("--num-prompts", "few"),
        ("--modes", "thoughtful"),
        ("--resume",),
    ],
)
def test_misspelled_options_are_usage_errors(command, options, capsys):
    """https://github.com/huggingface/transformers/issues/9224, https://github.com/garrytan/gbrain/issues/4602"""
    assert command(*options)[0] == 2
    capsys.readouterr()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "dflash:3=a/final",
            "not a drafter of method dflash (context_source 'hidden_layers', draft_head 'none'): its",
        ),
        (
            "hyperdflash:3=mean",
            "method hyperdflash (context_source 'pre_hc_head', reducer 'hc_gate', draft_head 'none')",
        ),
        (
            "hyperdflash+markov:3=mean",
            "its configuration has context_source 'pre_hc_head', reducer 'mean', draft_head 'none'",
        ),
        ("hyperdflash:3=markov", "method hyperdflash+markov or hyperdflash+markov+confidence"),
        ("mean:3=dflash", "reducer 'fc', draft_head 'none', draft_confidence False, which is method dflash"),
        ("hyperdflash:4=a/final", "hyperdflash:4: a/final drafts at most 3 tokens per round (block_size 4"),
        ("hyperdflash:3=target", "HyperDFlash drafter"),
        ("hyperdflash:3=./nowhere", "no folder ./nowhere"),
        ("mtp:3", "holds no native MTP module"),
        ("mtp:3=a/final", "holds no native MTP module"),
        ("dspark:3", "holds no DSpark module"),
        ("dspark:7=dspark", "7 drafts per round of dspark: this DSpark module drafts at most 5 tokens per round"),
        ("mtp:3=dspark", "dspark carries a DSpark module under mtp.*, not the native MTP module"),
        ("dspark:3=mtp", "mtp carries a native MTP module under mtp.*, not the DSpark module"),
    ],
)
def test_a_checkpoint_that_is_not_the_methods_is_one_error_before_any_work(
    command, method, message, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(module, "load_target", lambda *args: pytest.fail("loaded"))
    assert command(methods=(method,)) == (1, None)
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_confidence_head_is_used_by_the_method_that_names_it(command):
    methods = [f"hyperdflash+markov{name}:3=markov" for name in ("", "+confidence")]
    status, results = command(methods=methods, tokens="12")
    assert status == 0
    plain, confident = (row for row in results["rows"] if row["num_rounds"])
    assert plain["spec_decode_num_draft_tokens"] > 2 * plain["num_rounds"]
    assert confident["spec_decode_num_draft_tokens"] <= confident["num_rounds"]


def test_both_modules_of_deepseeks_checkpoints_are_measured_side_by_side(command):
    status, results = command(methods=("mtp:2=mtp", "dspark:5=dspark", "dspark:2=dspark"))
    assert status == 0
    rows = {row["method"]: row for row in results["rows"] if row["num_rounds"]}
    assert list(rows) == ["mtp:2", "dspark:5", "dspark:2"]
    for name, row in rows.items():
        assert 1 < row["spec_decode_num_draft_tokens"] / row["num_rounds"] <= int(name[-1])
        assert row["differences"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--modes", "non-thinking"), None),
        (("--modes", "non-thinking", "thinking"), "on non-thinking texts, but the prompts are in thinking mode"),
        (("--generation", "0731"), "for generation preview of the chat encoding, but the prompts are for 0731"),
    ],
    ids=str,
)
def test_a_drafter_trained_on_other_texts_is_told_once(command, target, tmp_path, capsys, options, words):
    drafter = tiny_drafter(target)
    drafter.config.encoding = {"generation": "preview", "modes": ["non-thinking"]}
    drafter.save_pretrained(tmp_path / "own")
    methods = [f"hyperdflash:{number}={tmp_path / 'own'}" for number in (2, 3)]
    assert command(*options, methods=[*methods, "mtp:2=mtp"])[0] == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    said = f"hyperdflash benchmark: warning: own was trained {words}; it will accept less"
    assert warnings == ([] if words is None else [said])


def test_an_mtp_module_that_cannot_be_used_is_told_by_its_names(command, world, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "load_target", lambda *args: pytest.fail("loaded"))
    folder = tmp_path / "mtp"
    folder.mkdir()
    save_file({"mtp.0.main_proj.weight": torch.ones(1)}, folder / "model.safetensors")
    assert command(methods=(f"mtp:3={folder}",)) == (1, None)
    assert "carries a DSpark module under mtp.*, not the native MTP module" in capsys.readouterr().err


def test_a_drafter_for_another_target_is_refused(command, tmp_path, capsys):
    tiny_drafter(tiny_target(vocab_size=64)).save_pretrained(tmp_path / "other")
    assert command(methods=(f"hyperdflash:3={tmp_path / 'other'}",)) == (1, None)
    assert "vocabulary 64, but the target has 4096" in capsys.readouterr().err


def test_one_revision_reaches_all_files(command, monkeypatch, world):
    """https://github.com/huggingface/huggingface-inference-toolkit/pull/137. A Hub id's config names the commit that
    weights and tokenizer are taken from."""
    asked = []

    class OnTheHub(module.TargetCheckpoint):
        def __init__(self, target, revision):
            asked.append(revision)
            super().__init__(target)
            self.folder, self.revision, self.file = None, "commit", lambda name: world / "target" / name
            self.open = lambda name: safe_open(self.file(name), framework="pt")  # instead of over the network

    def load(name, revision, *args):
        asked.append(revision)
        raise OSError("far enough")

    monkeypatch.setattr(module, "TargetCheckpoint", OnTheHub)
    monkeypatch.setattr(module, "load_target", load)
    assert command("--target-revision", "v1") == (1, None)
    assert asked == ["v1", "commit"]


def test_a_revision_of_a_folder_is_refused(command, capsys):
    assert command("--target-revision", "v1") == (2, None)
    assert "belongs to a Hub id, but target is a folder" in capsys.readouterr().err


def test_missing_matplotlib_is_said_before_any_work(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("hyperdflash.common.console.importlib.util.find_spec", lambda name: None)
    assert command() == (1, None)
    assert "pip install matplotlib" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- methods


def test_plain_decoding_comes_first_whether_it_was_named_or_not():
    for texts in (["mtp:3"], ["mtp:3", "target-only"]):
        assert [method.label for method in parse_methods(texts)] == ["target-only", "mtp:3"]
    with pytest.raises(UsageError, match="twice"):
        parse_methods(["target-only", "target-only"])


def test_the_same_method_given_twice_is_two_lines_and_seeds_are_one():
    labels = [method.label for method in parse_methods(["fc:6=x/a,x/b", "hyperdflash:6=x/a", "hyperdflash:6=y/a,y/b"])]
    assert labels == ["target-only", "fc:6", "hyperdflash:6 (x/a)", "hyperdflash:6 (y/a, y/b)"]
    assert [method.label for method in parse_methods(["mtp:3", "mtp:3=x", "mtp:6"])][1:] == [
        "mtp:3 (the target's own)",
        "mtp:3 (x)",
        "mtp:6",
    ]


def test_checkpoints_are_named_by_as_much_of_their_path_as_tells_them_apart():
    assert checkpoint_labels(["runs/a/final", "runs/b/final"]) == {
        "runs/a/final": "a/final",
        "runs/b/final": "b/final",
    }
    assert checkpoint_labels(["org/x", "runs/y"]) == {"org/x": "x", "runs/y": "y"}


def test_a_folder_typed_in_two_ways_has_one_short_name(world, monkeypatch):
    monkeypatch.chdir(world)
    assert checkpoint_labels(["mean", "./mean", "dflash"]) == {"mean": "mean", "./mean": "mean", "dflash": "dflash"}


def test_a_checkpoint_of_several_methods_is_loaded_once(world, target, monkeypatch):
    monkeypatch.chdir(world)
    texts = ["hyperdflash:2=a/final", "hyperdflash:3=./a/final", "mtp:1=mtp", "mtp:5=mtp", "dspark:1=dspark"]
    methods = parse_methods([*texts, "dspark:5=./dspark"])
    variants = load_variants(find_checkpoints(methods, TargetCheckpoint("target")), target, "float32")
    assert variants[1].assistant is variants[2].assistant
    assert variants[3].assistant is variants[4].assistant
    assert variants[5].assistant is variants[6].assistant
    assert [variant.options["num_assistant_tokens"] for variant in variants[1:]] == [2, 3, 1, 5, 1, 5]
    assert variants[4].assistant.max_drafts == 5


def test_a_drafter_of_the_hub_is_loaded_from_the_commit_that_was_checked(world, target, monkeypatch):
    """A branch may move in between. Each checkpoint is looked up once."""
    folder, asked, resolved = str(world / "a" / "final"), [], []
    own_load = methods_module.load_drafter

    def resolve(given):
        resolved.append(given)
        return given.partition("@")[0], "c0ffee"

    def config(name, revision=None):
        asked.append((name, revision))
        return HyperDFlashConfig.from_pretrained(folder)

    def load(name, revision, dtype, target):
        asked.append((name, revision))
        return own_load(folder, None, dtype, target)

    monkeypatch.setattr(methods_module, "resolve_checkpoint", resolve)
    monkeypatch.setattr(methods_module, "check_drafter_type", lambda name, revision: asked.append((name, revision)))
    monkeypatch.setattr(methods_module, "HyperDFlashConfig", SimpleNamespace(from_pretrained=config))
    monkeypatch.setattr(methods_module, "load_drafter", load)
    checkpoint = TargetCheckpoint(world / "target")
    plain, method = find_checkpoints(parse_methods(["hyperdflash:3=org/drafter@main"]), checkpoint)
    load_variants([plain, method], target, "float32")
    assert resolved == ["org/drafter@main"]
    assert asked == [("org/drafter", "c0ffee")] * 3
    assert [c.identity for c in method.checkpoints] == ["c0ffee"]


# -------------------------------------------------------------------------------------------------------------- traces


@pytest.mark.slow
def test_a_trace_shows_every_drafter_on_each_sets_first_prompt_and_measures_nothing(command, tmp_path):
    methods = ("hyperdflash:3=a/final", "mtp:2=mtp", "prompt-lookup:3")
    prompts, out = ("one.jsonl", "two.jsonl"), tmp_path / "out"
    _, without = command(prompts=prompts, methods=methods, out=tmp_path / "plain")
    _, results = command("--trace", prompts=prompts, methods=methods, out=out)
    page = (out / "trace.html").read_text()
    for name in ("hyperdflash:3", "mtp:2"):
        for prompt_set in ("one", "two"):
            assert page.count(f">{name}, ") >= 2
            assert f": {prompt_set}, non-thinking, temperature 0</h1>" in page
    assert page.count('class="trace"') == 4
    assert [row["acceptance_length"] for row in results["rows"]] == [r["acceptance_length"] for r in without["rows"]]
    assert len((out / "records.jsonl").read_text().splitlines()) == 4 * (1 + 4)


def test_a_trace_without_any_drafter_is_wrong_usage(command, capsys):
    assert command("--trace", methods=("prompt-lookup:3",)) == (2, None)
    assert "--trace shows the rounds of drafters" in capsys.readouterr().err


def test_a_target_whose_head_has_no_weight_of_its_own_is_benchmarked_by_its_dtype():
    """As AWQ and GPTQ leave a head: integers and scales."""
    target = tiny_target().to(torch.bfloat16)
    target.lm_head = torch.nn.Sequential(target.lm_head)
    assert Benchmark.tie_gap.fget(SimpleNamespace(target=target)) == module.TIE_GAPS[torch.bfloat16]
    settings = dict.fromkeys(("target", "target_revision", "target_fingerprint", "sources"))
    args = SimpleNamespace(target="tiny")
    assert environment.environment(args, target, settings)["dtype"] == "bfloat16"
