"""What the tiny world compares: runs of one budget that differ in what they name, and the tables of their results."""

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from tiny_v4 import greedy, random_ids, tiny_drafter, tiny_target

from hyperdflash.benchmark.methods import parse_methods
from hyperdflash.common.colors import method_styles
from hyperdflash.generation.demo import TINY
from hyperdflash.generation.mtp import DeepseekV4MTP
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.arguments import load_recipe, recipe_values

sys.path.insert(0, str(TINY / "evidence"))
import baselines  # noqa: E402
import calibration  # noqa: E402
import evidence  # noqa: E402
import first_slot  # noqa: E402
import selector  # noqa: E402
import train_mtp  # noqa: E402

DRAFTERS = [run for run in baselines.runs() if not run.is_mtp]


@pytest.mark.slow
@pytest.mark.parametrize("run", DRAFTERS, ids=lambda run: run.name)
def test_a_run_differs_from_the_recipe_in_what_it_names_and_in_nothing_that_makes_a_budget(run, monkeypatch):
    monkeypatch.chdir(baselines.ROOT)
    recipe, values = recipe_values(baselines.RECIPE), recipe_values(baselines.RECIPE, run.overrides())
    changed = {name for name, value in values.items() if value != recipe.get(name)}
    named = {setting.partition("=")[0] for setting in run.settings}
    assert changed - named <= {"output_dir", "seed", "drafter"}
    assert values["max_steps"] == (
        baselines.ABLATION_STEPS if run.group in ("ablations", "seeds", "texts") else recipe["max_steps"]
    )
    assert values["drafter"] == ({} if values.get("init_from") else recipe["drafter"] | run.drafter)
    load_recipe(baselines.RECIPE, run.overrides())


def test_the_documents_say_what_the_results_say():
    for name in evidence.TABLES:
        text = (evidence.ROOT / name).read_text(encoding="utf-8")
        assert evidence.filled(name, text) == text


def test_no_two_runs_write_to_one_place_and_all_are_methods_of_a_benchmark():
    runs = baselines.runs()
    assert len({run.output for run in runs}) == len({run.name for run in runs}) == len(runs)
    seeds = {}
    for run in runs:
        if run.group in ("headline", "heads"):
            seeds.setdefault(run.name.rpartition("-")[0], []).append(run.seed)
    assert {name: len(set(found)) for name, found in seeds.items()} == {
        **dict.fromkeys(("hyperdflash", "mtp", "dflash", "mean", *baselines.HEADS), 3),
        "fc": 1,
    }
    methods = parse_methods([run.method for run in runs if run.group == "ablations"])[1:]
    assert {"hyperdflash", "mean", "fc", "dflash"} == {method.name for method in methods}
    assert {method.num_drafts for method in methods} == {3, 6, 9}
    methods = parse_methods([run.method for run in runs if run.group == "heads"])[1:]
    assert {"hyperdflash+markov", "mean+markov", "dspark-like"} == {method.name for method in methods}


def test_a_run_that_ends_adds_its_line_or_replaces_its_own(tmp_path, monkeypatch):
    for module in (baselines, evidence):
        monkeypatch.setattr(module, "TRAINING_FILE", tmp_path / "training.jsonl")
    assert evidence.read_training() == {}
    for name, steps in (("b", 1), ("a", 2), ("b", 3)):
        baselines.write_summary({"name": name, "steps": steps})
    assert (tmp_path / "training.jsonl").read_text() == ('{"name": "a", "steps": 2}\n{"name": "b", "steps": 3}\n')
    assert evidence.read_training() == {"a": {"name": "a", "steps": 2}, "b": {"name": "b", "steps": 3}}


@pytest.mark.parametrize(("mask", "loss"), [([0, 1, 1, 0, 0], 0.0), ([0, 0, 1, 1, 0], 10.0), ([0, 1, 1, 1, 0], 5.0)])
def test_mtp_learns_the_token_after_the_next_where_the_target_wrote_both(mask, loss):
    """Here a module says the next token again: right at the first position, wrong at the second."""
    batch = {"input_ids": torch.tensor([[1, 2, 2, 3, 0]]), "loss_mask": torch.tensor([mask])}
    residual = torch.randn(1, 5, 2, 4)
    head = SimpleNamespace(embed=lambda ids: torch.eye(4)[ids], lm_head=10 * torch.eye(4))

    def features(batch):
        return SimpleNamespace(residual=residual)

    def module(next_embeds, given, next_ids):
        assert torch.equal(given, residual[:, :3])
        assert next_ids.tolist() == [[2, 2, 3]]
        return next_embeds, None

    features.head = head
    assert float(train_mtp.mtp_loss(module, features, batch)) == pytest.approx(loss, abs=1e-3)


def row(method, checkpoint, dataset, tau, speedup, temperature=0.0):
    return {
        "method": method,
        "checkpoint": checkpoint,
        "dataset": dataset,
        "temperature": temperature,
        "acceptance_length": tau,
        "speedup": speedup,
    }


ROWS = [
    row("hyperdflash:6", "a", "code", 4.0, 3.0),
    row("hyperdflash:6", "a", "math", 5.0, 3.2),
    row("hyperdflash:6", "b", "code", 4.4, 2.0),
    row("hyperdflash:6", "b", "math", 5.0, 2.2),
    row("dflash:6", "c", "code", 2.0, 1.0),
    row("dflash:6", "c", "math", 2.5, 1.1),
    row("mtp:6 (the target’s own)", None, "code", 3.0, 1.4),
    row("mtp:6 (the target’s own)", None, "math", 3.0, 1.4),
    row("mtp:6 (mtp-42/final)", "mtp-42/final", "code", 3.6, 1.3),
    row("mtp:6 (mtp-42/final)", "mtp-42/final", "math", 4.0, 1.3),
]


def test_a_checkpoints_figure_is_its_mean_over_sets_and_the_spread_is_over_checkpoints():
    own = evidence.rows_of(ROWS, "hyperdflash:6")
    assert evidence.means(own, "acceptance_length") == pytest.approx([4.5, 4.7])
    assert evidence.mean_and_deviation([4.5, 4.7]) == "4.60 ± 0.14"
    assert evidence.mean_and_deviation([4.5]) == "4.50"
    assert evidence.rows_of(ROWS, "hyperdflash:6", temperature=1) == []


def test_a_ratio_is_taken_seed_by_seed_and_of_mtp_the_better_module_counts():
    assert evidence.figures(ROWS, "mtp:6", "acceptance_length", 0) == [pytest.approx(3.8)]
    assert evidence.figures(ROWS, "mtp:6", "speedup", 0) == [pytest.approx(1.4)]
    assert evidence.ratio(ROWS, "hyperdflash:6", "dflash:6", "acceptance_length", 0) == "2.04 ± 0.06"
    both = [*ROWS, row("dflash:6", "d", "code", 4.6, 1.0), row("dflash:6", "d", "math", 4.8, 1.1)]
    assert evidence.ratio(both, "hyperdflash:6", "dflash:6", "acceptance_length", 0) == "1.50 ± 0.71"


def test_a_part_of_a_round_that_is_not_told_apart_is_left_blank(monkeypatch):
    times = {"temperature": 0.0, "verify_seconds": 0.008, "other_seconds": 0.002, "efficiency": 0.9}
    rows = [{**times, "method": "prompt-lookup:6", "draft_seconds": None}]
    rows += [{**times, "method": name, "draft_seconds": 0.001} for name in ("target-only", "fc:6")]
    monkeypatch.setattr(evidence, "read_rows", lambda group: rows)
    monkeypatch.setattr(evidence, "METHODS", {"prompt-lookup:6": "lookup", "fc:6": "fc"})
    lines = evidence.rounds().splitlines()[2:]
    assert lines[1] == "| lookup | – | 8.0 | 2.0 | 0.90 |"
    assert lines[2] == "| fc | 1.0 | 8.0 | 2.0 | 0.90 |"


def test_a_table_of_the_document_is_replaced_and_nothing_else(monkeypatch):
    monkeypatch.setattr(evidence, "TABLES", {"evidence.md": {"claims": lambda: "| new |"}})
    text = "before\n<!-- claims -->\n| old |\n| table |\n<!-- end -->\nafter\n"
    assert evidence.filled("evidence.md", text) == "before\n<!-- claims -->\n| new |\n<!-- end -->\nafter\n"


@pytest.mark.parametrize("text", ["no table", "<!-- claims -->\n<!-- end -->\n<!-- other -->\n<!-- end -->"])
def test_a_document_without_its_tables_or_with_others_is_refused(monkeypatch, text):
    monkeypatch.setattr(evidence, "TABLES", {"evidence.md": {"claims": lambda: "| new |"}})
    with pytest.raises(ValueError, match="evidence.md has the tables"):
        evidence.filled("evidence.md", text)


def test_the_calibration_error_is_a_hand_count():
    rounds = [([0.05, 0.5], 0), ([0.91, 1.0], 1), ([0.93, 0.07], 2)]  # the first one's second slot was not reached
    found = calibration.summary(rounds)
    assert [part["slots"] for part in found["bins"]] == [2, 3]
    assert found["bins"][0] == pytest.approx({"slots": 2, "estimated": 0.06, "accepted": 0.5})
    assert found["calibration_error"] == pytest.approx((2 * 0.44 + 3 * abs(2.84 / 3 - 2 / 3)) / 5)
    assert found["brier"] == pytest.approx((0.05**2 + 0.93**2 + 0.09**2 + 0.07**2 + 1) / 5)
    assert found["brier_of_mean"] == pytest.approx(0.24)
    assert found["slots"] == 5
    assert found["rounds"] == 3


def test_what_stopping_is_worth_is_a_hand_count():
    rounds = [([0.9, 0.1], 1), ([0.9, 0.9], 2)]
    everything = 5 / (2 * 1.4)  # two drafts of 0.2 each
    assert calibration.gains(rounds, 0.2) == pytest.approx(
        {
            "cost": 0.2,
            "best_fixed_number": 2,  # one draft everywhere keeps 4 tokens in 2.4
            "fixed": 1,
            "confidence": 5 / (1.2 + 1.4) / everything,
            "known": 5 / (1.2 + 1.4) / everything,
        }
    )


def test_the_best_path_is_the_most_likely_of_all():
    torch.manual_seed(2)
    logits, table = torch.randn(3, 5), torch.randn(5, 5)  # of slots, and what a token adds to those after it

    def likelihood(path):
        return sum(
            (slot + table[before]).log_softmax(-1)[token]
            for slot, before, token in zip(logits, (4, *path), path, strict=False)
        )

    def head(previous, hidden):
        return table[previous]

    best = max(product(range(5), repeat=3), key=likelihood)
    slot_by_slot = [int((logits[0] + table[4]).argmax())]
    for slot in logits[1:]:
        slot_by_slot.append(int((slot + table[slot_by_slot[-1]]).argmax()))
    assert slot_by_slot != list(best)
    assert selector.best_path(logits, torch.zeros(3, 2), torch.tensor([4]), head, num_candidates=5) == list(best)
    assert selector.best_path(logits, torch.zeros(3, 2), torch.tensor([4]), head, num_candidates=1) == slot_by_slot


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mtp", "block"])
def test_the_first_drafts_along_a_text_are_those_of_decoding_it(kind, monkeypatch):
    target, prompt = tiny_target(), random_ids(11)
    torch.manual_seed(2)
    if kind == "mtp":
        drafter, along = DeepseekV4MTP(target.config, 1).eval(), first_slot.drafts_of_mtp
    else:
        drafter, along = tiny_drafter(target, draft_head="markov"), first_slot.drafts_of_block
    rounds, own = [], drafter.propose

    def recording(request, choose):
        def choose_and_keep(logits):
            rounds.append((request.position, logits.clone()))
            return choose(logits)

        own(request, choose_and_keep)

    monkeypatch.setattr(drafter, "propose", recording)
    ids = greedy(target, prompt, 30, assistant_model=drafter, num_assistant_tokens=1)
    monkeypatch.undo()
    assert len(rounds) > 10
    with ResidualTap(target) as tap:
        target(ids, use_cache=False)
        residual = tap.take()
    anchors = torch.tensor([position for position, _ in rounds])
    got = along(drafter, target, ids, residual, anchors)
    torch.testing.assert_close(got, torch.cat([logits for _, logits in rounds]), atol=1e-4, rtol=1e-4)


def test_learning_curves_have_the_names_and_colours_of_the_benchmark(monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **kwargs: figures.append(figure))
    for group, runs in evidence.CURVES.items():
        evidence.draw_learning(group)
        rows = evidence.read_rows(group)
        methods = [next(row["method"] for row in rows if row["method"].startswith(method)) for method in runs.values()]
        styles = method_styles(methods)
        lines = figures[-1].axes[0].get_lines()
        assert [line.get_label() for line in lines] == [evidence.NAMES[group][method] for method in runs.values()]
        assert [line.get_color() for line in lines] == [styles[method]["color"] for method in methods]
