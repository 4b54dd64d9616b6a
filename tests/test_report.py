"""From records to figures: every number here can be checked by hand."""

import csv
import io
import json

import numpy as np
import pytest

from hyperdflash.__main__ import main
from hyperdflash.benchmark import plot
from hyperdflash.benchmark.methods import DRAFTERS
from hyperdflash.benchmark.plot import acceptance_curve
from hyperdflash.benchmark.report import (
    bootstrap,
    lossless_line,
    make_interval_tables,
    make_rows,
    make_tables,
    run_notes,
    to_csv,
    to_json,
    to_markdown,
    token_notes,
)

ENVIRONMENT = {"target_fingerprint": "f00d", "dtype": "float32", "device": "cpu (abacus)", "threads": 1}
LOSSLESS = {"num_compared": 4, "num_ties": 0, "num_unexplained": 0, "tie_gap": 0.001}
RESULTS = {
    "complete": True,
    "resumed": 0,
    "missing_sets": [],
    "left_out": [],
    "max_prompt_tokens": 100,
    "lossless": LOSSLESS,
    "environment": ENVIRONMENT,
    "rows": [],
}
CELL = {"checkpoint": None, "dataset": "s", "mode": "non-thinking", "temperature": 0.0, "seed": 0, "turn": 0}


def record(method, prompt, *, tokens, seconds, drafts=None, accepted=None, steps=(1, 1.0, 1.0, 0.0), **kwargs):
    """`tokens` timed in `seconds`; `steps`: their number, and seconds of all, the target's and the drafter's."""
    num_steps, step, verify, draft = steps
    return {
        "method": method,
        **CELL,
        "prompt": prompt,
        "num_new_tokens": tokens + 1,
        "num_timed_tokens": tokens,
        "decoding_seconds": seconds,
        "num_steps": num_steps,
        "step_seconds": step,
        "verify_seconds": verify,
        "draft_seconds": draft,
        "num_drafts": drafts,
        "num_accepted": accepted,
        **kwargs,
    }


def two_prompts():
    """Prompt 0 with one turn, prompt 1 with two; a drafter with three drafts per round."""
    return [
        record("target-only", 0, tokens=8, seconds=8.0, steps=(8, 8.0, 6.0, 0.0)),
        record("m:3", 0, tokens=8, seconds=4.0, drafts=[3, 3], accepted=[3, 3], steps=(2, 4.0, 2.5, 0.5)),
        record("target-only", 1, tokens=6, seconds=6.0, steps=(6, 6.0, 4.5, 0.0)),
        record("m:3", 1, tokens=6, seconds=6.0, drafts=[3, 3, 3], accepted=[0, 1, 2], steps=(3, 6.0, 4.0, 1.0)),
        record("target-only", 1, tokens=4, seconds=4.0, steps=(4, 4.0, 3.0, 0.0), turn=1),
        record("m:3", 1, tokens=4, seconds=2.0, drafts=[1], accepted=[0], steps=(1, 2.0, 1.5, 0.5), turn=1),
    ]


def test_acceptance_is_pooled_over_rounds_not_averaged_over_prompts():
    """https://github.com/vllm-project/vllm/pull/17908"""
    plain, row = make_rows(two_prompts(), [], 2)
    assert (row["method"], row["num_prompts"], row["num_new_tokens"], row["num_rounds"]) == ("m:3", 2, 21, 6)
    assert row["accepted_drafts"] == 9 / 6
    assert row["acceptance_length"] == 2.5  # the mean over prompts would be (4 + 1.75) / 2
    assert row["per_position_acceptance_rates"] == [4 / 6, 3 / 6, 2 / 6]
    assert row["conditional_acceptance_rates"] == [4 / 6, 3 / 4, 2 / 3]
    assert row["spec_decode_num_drafts"] == 6
    assert row["spec_decode_num_draft_tokens"] == 16
    assert row["spec_decode_num_accepted_tokens_per_pos"] == [4, 3, 2]
    assert plain["method"] == "target-only"
    assert plain["acceptance_length"] is plain["per_position_acceptance_rates"] is None


def test_the_speedup_is_the_ratio_of_all_tokens_over_all_seconds():
    """https://github.com/hemingkx/Spec-Bench/issues/29"""
    plain, row = make_rows(two_prompts(), [], 2)
    assert plain["tokens_per_second"] == 1.0
    assert plain["speedup"] == 1.0
    assert row["tokens_per_second"] == 18 / 12
    assert row["speedup"] == 1.5
    assert (row["draft_share"], row["verify_share"], row["other_share"]) == (2 / 12, 8 / 12, 2 / 12)
    assert (plain["step_seconds"], plain["verify_seconds"], plain["other_seconds"]) == (1.0, 0.75, 0.25)
    assert row["step_seconds"] == 2.0
    # 2.5 tokens per round; each round has a verification, a draft, and the rest of a plain step
    assert row["attainable_speedup"] == pytest.approx(2.5 * 1.0 / (8 / 6 + 2 / 6 + 0.25))
    assert row["efficiency"] == pytest.approx(1.5 / row["attainable_speedup"])


def test_intervals_draw_prompts_and_the_same_ones_for_both_sides():
    _, row = make_rows(two_prompts(), [], 2)
    # Two prompts: a quarter of the draws has twice the first, a quarter twice the second
    assert row["acceptance_length_interval"] == [1.75, 4.0]
    assert row["speedup_interval"] == [1.25, 2.0]
    assert row["speedup_interval"] == make_rows(two_prompts(), [], 2)[1]["speedup_interval"]
    # A slow second prompt, ten times so for both sides: unpaired, it would widen the interval
    slow = [r | {"decoding_seconds": r["decoding_seconds"] * (10 if r["prompt"] else 1)} for r in two_prompts()]
    assert make_rows(slow, [], 2)[1]["speedup_interval"] == [1.25, 2.0]


def test_one_prompt_has_no_interval():
    _, row = make_rows(two_prompts()[:2], [], 2)
    assert row["acceptance_length_interval"] is row["speedup_interval"] is None


def test_bootstrap_is_seeded_and_of_the_right_width():
    values = np.random.default_rng(1).normal(5, 1, size=(400, 1))
    low, high = bootstrap(values, lambda s: s[..., 0] / 400)
    assert [low, high] == bootstrap(values, lambda s: s[..., 0] / 400)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert low < values.mean() < high


def test_an_answer_of_one_token_weighs_nothing():
    records = two_prompts() + [
        record("target-only", 2, tokens=0, seconds=0.0, steps=(0, 0, 0, 0)),
        record("m:3", 2, tokens=0, seconds=0.0, drafts=[], accepted=[], steps=(0, 0, 0, 0)),
    ]
    row = make_rows(records, [], 2)[1]
    assert (row["num_prompts"], row["speedup"], row["acceptance_length"]) == (3, 1.5, 2.5)
    only = make_rows(records[-2:], [], 2)[1]
    assert only["speedup"] is only["tokens_per_second"] is only["draft_share"] is only["attainable_speedup"] is None


def test_without_a_round_there_is_no_acceptance_length():
    """Not 1.00, which rounds that all failed would have."""
    records = [
        record("target-only", 0, tokens=8, seconds=8.0, steps=(8, 8.0, 6.0, 0.0)),
        record("prompt-lookup:3", 0, tokens=8, seconds=8.0, drafts=[], accepted=[], steps=(8, 8.0, 6.0, 0.0)),
    ]
    row = make_rows(records, [], 2)[1]
    assert row["num_rounds"] == row["spec_decode_num_drafts"] == 0
    for name in ("acceptance_length", "accepted_drafts", "per_position_acceptance_rates"):
        assert row[name] is None
    assert row["conditional_acceptance_rates"] is None
    assert "| prompt-lookup:3 | 1.00x | – |" in to_markdown([row], [])
    assert acceptance_curve([row]) == []
    records[1] |= {"num_drafts": [3], "num_accepted": [0]}
    assert make_rows(records, [], 2)[1]["acceptance_length"] == 1


def test_prompt_lookups_drafting_is_not_told_apart():
    plain, drafted = two_prompts()[:2]
    row = make_rows([plain, drafted | {"method": "prompt-lookup:3", "draft_seconds": 0.0}], [], 2)[1]
    assert row["draft_share"] is row["draft_seconds"] is None
    assert (row["verify_share"], row["other_share"]) == (2.5 / 4, 1.5 / 4)
    assert row["attainable_speedup"] is not None
    assert "prompt-lookup runs in transformers' own loop" in to_markdown([row], [])
    assert "transformers' own" not in to_markdown([row | {"method": "m:3"}], [])


def test_turns_that_a_method_has_not_answered_are_left_out_for_all():
    rows = make_rows(two_prompts()[:-1], [], 2)
    assert [row["num_new_tokens"] for row in rows] == [16, 16]
    assert make_rows(two_prompts()[:1], [], 2) == []


def row(method, dataset, speedup, tau, **kwargs):
    rates = None if tau is None else [0.5, 0.25]
    cell = {"checkpoint": None, "mode": "non-thinking", "temperature": 0.0, "seed": 0}
    return {
        "method": method,
        **cell,
        "dataset": dataset,
        "num_prompts": 3,
        "num_new_tokens": 10,
        "acceptance_length": tau,
        "acceptance_length_interval": None if tau is None else [tau - 0.5, tau + 0.5],
        "per_position_acceptance_rates": rates,
        "speedup": speedup,
        "speedup_interval": None if tau is None else [speedup - 0.1, speedup + 0.2],
        "differences": [],
        **kwargs,
    }


def three_methods():
    return [
        row("target-only", "a", 1.0, None),
        row("target-only", "b", 1.0, None),
        *(row("m:3", "a", x, t, checkpoint=c) for c, x, t in (("s0", 2.0, 3.0), ("s1", 2.2, 3.4))),
        *(row("m:3", "b", x, t, checkpoint=c) for c, x, t in (("s0", 1.0, 2.0), ("s1", 1.2, 2.4))),
        row("n:6", "a", 3.0, 4.0),
    ]


def test_the_table_has_methods_down_and_sets_across():
    text = to_markdown(three_methods(), ["A note."])
    assert text.splitlines()[:7] == [
        "**non-thinking, temperature 0**",
        "",
        "| method | a speed-up | a tau | b speed-up | b tau | Average speed-up | Average tau |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| target-only | 1.00x | – | 1.00x | – | 1.00x | – |",
        "| m:3 | 2.10x ± 0.14 | 3.20 ± 0.28 | 1.10x ± 0.14 | 2.20 ± 0.28 | 1.60x ± 0.14 | 2.70 ± 0.28 |",
        "| n:6 | 3.00x | 4.00 | – | – | – | – |",  # no average over some of the sets
    ]
    assert "tau = 1 + accepted drafts per round: it includes the target's own token" in text
    assert "±: standard deviation over checkpoints and seeds." in text
    assert text.endswith("A note.\n")


def test_one_checkpoint_and_seed_has_its_interval_where_others_have_their_spread():
    ((title, header, lines),) = make_interval_tables(three_methods())
    assert title == "non-thinking, temperature 0: 95% intervals over prompts"
    assert header == ["method", "a speed-up", "a tau", "b speed-up", "b tau"]
    assert lines == [["n:6", "[2.90, 3.20]", "[3.50, 4.50]", "–", "–"]]
    text = to_markdown(three_methods(), [])
    assert "| n:6 | [2.90, 3.20] | [3.50, 4.50] | – | – |" in text
    assert make_interval_tables(three_methods()[:-1]) == []


def test_new_tokens_are_told_where_methods_wrote_different_numbers():
    """Sampled answers are each method's own and stop where they end."""
    rows = [
        row("target-only", "a", 1.0, None, temperature=1.0),
        row("target-only", "b", 1.0, None, temperature=1.0, num_new_tokens=2000),
        *(
            row("m:3", "a", 2.0, 3.0, temperature=1.0, checkpoint=c, num_new_tokens=n)
            for c, n in (("x", 8), ("y", 10))
        ),
        row("m:3", "b", 2.0, 3.0, temperature=1.0, checkpoint="x", num_new_tokens=2000),
        *(row(method, "a", 1.0, None) for method in ("target-only", "m:3")),
    ]
    notes = ["New tokens per run, non-thinking, temperature 1: target-only 2,010, m:3 2,009."]
    assert token_notes(rows) == notes
    assert notes[0] in to_markdown(rows, [])
    assert "Above temperature 0 each method samples" in to_markdown(rows, [])
    assert "samples" not in to_markdown(rows[-2:], [])


def test_every_mode_and_temperature_has_a_table_of_its_own():
    rows = [row("m:3", "a", 2.0, 3.0, mode=m, temperature=t) for m in ("non-thinking", "thinking") for t in (0.0, 0.6)]
    titles = [title for title, _, _ in make_tables(rows)]
    assert titles == [f"{m}, temperature {t}" for m in ("non-thinking", "thinking") for t in ("0", "0.6")]


def test_the_csv_is_flat():
    difference = {"explained": False}
    rows = [row("target-only", "a", 1.0, None), row("m:3", "a", 2.0, 3.0, differences=[difference])]
    plain, drafted = csv.DictReader(io.StringIO(to_csv(rows)))
    assert drafted["method"] == "m:3"
    assert (drafted["speedup_low"], drafted["speedup_high"]) == ("1.9", "2.2")
    assert (drafted["per_position_acceptance_rates_1"], drafted["per_position_acceptance_rates_2"]) == ("0.5", "0.25")
    assert (drafted["num_differences"], drafted["num_unexplained_differences"]) == ("1", "1")
    assert plain["acceptance_length"] == plain["per_position_acceptance_rates_1"] == plain["speedup_low"] == ""


def test_the_json_has_every_row_on_a_line_of_its_own_and_loses_nothing():
    rows = [{"method": "m:3", "rates": [0.1, 1 / 3], "text": "é\n"}, {"method": "o:6", "differences": [{"gap": None}]}]
    results = {
        "environment": {"versions": {"python": "3"}, "threads": 1},
        "complete": True,
        "left_out": [],
        "rows": rows,
    }
    text = to_json(results)
    assert json.loads(text) == results
    lines = [line.strip().rstrip(",") for line in text.splitlines()]
    assert [json.loads(line) for line in lines if line.startswith('{"method"')] == rows
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"rows": [{"tau": float("nan")}]})


def test_the_lossless_line_says_what_was_found():
    assert "passed: all 4 greedy answers" in lossless_line(RESULTS)
    assert "INCOMPLETE" in lossless_line(RESULTS | {"complete": False})
    nothing = RESULTS | {"lossless": LOSSLESS | {"num_compared": 0}}
    rows = [row("target-only", "a", 1.0, None), row("m:3", "a", 2.0, 3.0)]
    assert "not made: only target-only was measured." in lossless_line(nothing | {"rows": rows[:1]})
    assert "not made: no answer was compared at temperature 0." in lossless_line(nothing | {"rows": rows})


def with_differences(dtype, gaps, num_unexplained):
    """Four greedy answers, of which some have parted from target-only's."""
    differences = [{"gap": gap} for gap in gaps]
    counts = {"num_ties": len(gaps) - num_unexplained, "num_unexplained": num_unexplained}
    rows = [row("m:3", "a", 2.0, 3.0, differences=differences)]
    environment = ENVIRONMENT | {"dtype": dtype}
    return RESULTS | {"lossless": LOSSLESS | counts, "rows": rows, "environment": environment}


@pytest.mark.parametrize(
    ("dtype", "gaps", "num_unexplained", "words"),
    [
        ("float32", [5e-4], 0, ["passed: 1 of 4 greedy answers (25.0%) differ", "all at ties", "up to 0.0005"]),
        ("bfloat16", [0.0, 5e-4], 0, ["passed: 2 of 4 greedy answers (50.0%) differ", "all at ties", "up to 0.0005"]),
        ("bfloat16", [0.1, 0.45], 0, ["inconclusive in bfloat16: 2 of 4 greedy answers (50.0%)", "up to 0.45 apart"]),
        ("bfloat16", [0.1, 0.65], 1, ["FAILED: 2 of 4 greedy answers (50.0%)", "1 of them", "up to 0.65 apart"]),
        ("float32", [5e-4, None], 1, ["FAILED: 2 of 4 greedy answers (50.0%)", "are infinitely far apart"]),
    ],
    ids=str,
)
def test_the_share_that_differs_and_the_largest_gap_are_said(dtype, gaps, num_unexplained, words):
    """In bfloat16 a gap of 0.45 is not a tie, whatever rounding may do."""
    line = lossless_line(with_differences(dtype, gaps, num_unexplained))
    assert all(word in line for word in words), line
    assert (None not in gaps and max(gaps) < 1e-3) == ("passed" in line) == ("ties" in line)


def test_what_a_run_lacks_is_noted():
    assert len(run_notes(RESULTS)) == 1
    left_out = [{"dataset": "s", "prompt": prompt, "turn": turn} for prompt, turn in ((0, 0), (0, 1), (3, 1))]
    notes = run_notes(RESULTS | {"resumed": 7, "missing_sets": ["gsm8k", "mbpp"], "left_out": left_out})
    assert notes[1:] == [
        "7 calls were measured by an earlier run of the same command.",
        "Skipped sets (not available): gsm8k, mbpp.",
        "Prompts longer than 100 tokens, left out entirely or from a later turn on: 2 of s.",
    ]


def test_a_set_of_one_prompt_is_said_to_have_no_interval():
    rows = [row("m:3", "a", 2.0, 3.0, num_prompts=1), row("m:3", "b", 2.0, 3.0)]
    assert run_notes(RESULTS | {"rows": rows})[1:] == ["a: 1 prompt, no interval."]


def test_the_curve_weighs_sets_equally_and_counts_positions_never_drafted_as_rejected():
    rows = [{"per_position_acceptance_rates": rates} for rates in ([0.8, 0.4], [0.4], None)]
    assert acceptance_curve(rows) == [pytest.approx(0.6), pytest.approx(0.2)]


# ---------------------------------------------------------------------------------------------------- hyperdflash plot


def results_folder(path, rows, **environment):
    path.mkdir()
    results = RESULTS | {"environment": ENVIRONMENT | environment, "rows": rows}
    (path / "results.json").write_text(json.dumps(results))
    return str(path)


@pytest.mark.pictures
def test_plot_makes_one_table_and_small_pictures_of_several_folders(tmp_path, capsys):
    first = results_folder(tmp_path / "one", three_methods())
    second = results_folder(tmp_path / "two", [row("target-only", "a", 1.0, None), row("o:6", "a", 2.5, 3.5)])
    out = tmp_path / "both"
    for _ in range(2):  # again into its own folder
        assert main(["plot", first, second, "--output", str(out)]) == 0
    table = (out / "table.md").read_text()
    assert table.count("| target-only |") == 1
    assert "| m:3 |" in table
    assert "| o:6 |" in table
    assert "one: Lossless check passed" in table
    for name in ("acceptance.png", "speedup.png"):
        picture = (out / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert 5_000 < len(picture) < 300_000
    assert "both: table.md" in capsys.readouterr().out


def bars(rows):
    """The axes of the speed-ups, with the pictures' own style."""
    from matplotlib.figure import Figure

    axes = Figure().add_subplot()
    for method, style in plot.method_styles(["m:3"]).items():
        plot._draw_bars(axes, (0.0, 1.0), {**style, "label": method}, rows, ["a", "b"])
    return axes


def test_one_prompt_has_no_error_bar(monkeypatch):
    rows = [row("m:3", "a", 2.0, 3.0, num_prompts=1, speedup_interval=None), row("m:3", "b", 2.0, 3.0)]
    axes = bars(rows)
    assert len(axes.patches) == 2
    ((low, high),) = [segment[:, 1] for line in axes.collections for segment in line.get_segments()]
    assert (low, high) == (pytest.approx(1.9), pytest.approx(2.2))
    assert not bars(rows[:1]).collections
    axes = pictured(monkeypatch, rows)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["a\n1 prompt, no interval", "b"]
    assert axes.get_ylabel() == "speed-up, 95% over prompts"
    assert pictured(monkeypatch, rows[:1]).get_ylabel() == "speed-up"


def pictured(monkeypatch, rows):
    """The axes of `_draw_speedup`, before they become a PNG."""
    with monkeypatch.context() as patch:
        patch.setattr(plot, "_finish", lambda figure: figure.axes[0])
        return plot._draw_speedup({"title": rows}, {"m:3": {"color": "#000000", "label": "m:3"}})


def test_an_error_bar_is_seen_on_a_bar_of_any_colour():
    """A dark line with a light edge."""
    (stem,) = bars([row("m:3", "a", 2.0, 3.0)]).collections
    (effect,) = stem.get_path_effects()
    assert effect._gc["foreground"] == "white"
    assert effect._gc["linewidth"] > stem.get_linewidths()[0]


def test_a_method_has_one_colour_in_all_pictures():
    first = plot.method_styles(["hyperdflash:6", "mtp:6"])
    second = plot.method_styles(["fc:6", "mtp:3", "mtp:6", "hyperdflash:3 (a)"])
    assert first["mtp:6"]["color"] == second["mtp:6"]["color"] != second["mtp:3"]["color"]
    assert first["hyperdflash:6"]["color"] == second["hyperdflash:3 (a)"]["color"]
    labels = [
        "mtp:6 (the target's own)",
        "mtp:6 (mtp-42/final)",
        *(f"{name}:6" for name in DRAFTERS),
        "prompt-lookup:6",
    ]
    styles = plot.method_styles(labels)
    assert len({style["color"] for style in styles.values()}) == len(labels)
    assert list(styles) == labels


@pytest.mark.pictures
def test_legends_have_the_names_of_a_table(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(plot, "_finish", lambda figure: seen.append(figure.axes[0]) or b"")
    plot.draw_pictures(tmp_path, three_methods(), {"m:3": "The method (3)"})
    labels = [axes.get_legend_handles_labels()[1] for axes in seen]
    assert labels == [["The method (3)", "n:6"]] * 2


def test_plot_of_plain_decoding_alone_says_that_there_is_nothing_to_draw(tmp_path, capsys):
    folder = results_folder(tmp_path / "one", three_methods()[:2])
    assert main(["plot", folder, "--output", str(tmp_path / "out")]) == 0
    assert "table.md (no pictures: only target-only was measured)" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["table.md"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("target_fingerprint", "beef"), ("dtype", "bfloat16"), ("device", "cuda (loom)"), ("threads", 8)],
)
def test_plot_mixes_no_targets_dtypes_devices_or_threads(name, value, tmp_path, capsys):
    first = results_folder(tmp_path / "one", three_methods())
    second = results_folder(tmp_path / "two", [row("o:6", "a", 2.5, 3.5)], **{name: value})
    assert main(["plot", first, second, "--output", str(tmp_path / "both")]) == 1
    message = f"two/results.json cannot be used: it has {name} {value}, but {first} has {ENVIRONMENT[name]}"
    assert message in capsys.readouterr().err
    assert not (tmp_path / "both").exists()


REFUSED = ("missing", "broken", "lacking", "twice", "other prompts", "no rows", "foreign output", "file output")


@pytest.mark.parametrize("case", REFUSED)
def test_plot_refuses_by_name_and_writes_nothing(case, tmp_path, capsys):
    rows = [] if case == "no rows" else three_methods()
    folder, out = results_folder(tmp_path / "one", rows), tmp_path / "out"
    argv, message = ["plot", folder, "--output", str(out)], "results.json cannot be used"
    if case == "missing":
        argv[1], message = str(tmp_path), f"no results.json in {tmp_path}"
    elif case == "broken":
        (tmp_path / "one" / "results.json").write_text("{")
    elif case == "lacking":
        (tmp_path / "one" / "results.json").write_text("{}")
        message = "it lacks 'rows'"
    elif case == "twice":
        argv.insert(2, folder)
        message = "the same row"
    elif case == "other prompts":
        fewer = row("target-only", "a", 1.0, None) | {"num_prompts": 5}
        argv.insert(2, results_folder(tmp_path / "two", [fewer]))
        message = f"it has other prompts or lengths than {folder}"
    elif case == "no rows":
        message = "no prompt was answered by all methods"
    elif case == "foreign output":
        out.mkdir()
        (out / "thesis.txt").write_text("x")
        message = "is not a benchmark's folder"
    else:
        out.write_text("x")
        message = "is a file"
    assert main(argv) == 1
    assert message in capsys.readouterr().err
    assert not out.exists() or out.is_file() or [path.name for path in out.iterdir()] == ["thesis.txt"]
