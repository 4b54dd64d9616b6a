"""From the records of a benchmark to its figures: rows, `results.json`, `results.csv` and `table.md`.

A record is one `generate` call (`benchmark.py`). Records are summed, never averaged: the rounds of all calls are
pooled, and tokens are divided by seconds once at the end. Intervals are seeded 95% bootstrap intervals over prompts;
for a speed-up, both methods are resampled with the same prompts.

    .venv/bin/python -m pytest tests/test_report.py
"""

import csv
import io
import json
import statistics
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..common.files import write_atomically
from ..generation.comparison import TIE_GAPS
from ..generation_hyperdflash import SpeculativeStats
from .methods import PROMPT_LOOKUP, TARGET_ONLY
from .records import GROUP, KEY

RESULTS_FILE, CSV_FILE, TABLE_FILE, COMMAND_FILE = "results.json", "results.csv", "table.md", "command.txt"
DEFINITIONS = (
    "tau = 1 + accepted drafts per round: it includes the target's own token; rounds without a draft do not count. "
    "Speed-up: tokens per second after the first token, over target-only's in the same run. Rates by position: of all "
    "rounds (also those that the length limit cut short), or of those that accepted all drafts before (conditional)."
)
OF_SAMPLING = "Above temperature 0 each method samples its own answers, which differ in length."
OF_PROMPT_LOOKUP = (
    "prompt-lookup runs in transformers' own loop: its accepted drafts are counted after an answer was cut at its "
    "end-of-text token, other methods' before, and its drafting time is part of the rest."
)
NUM_RESAMPLES = 2000
NO_INTERVAL = "1 prompt, no interval"


# ---------------------------------------------------------------------------------------------------------------- rows


def make_rows(records: list[dict], differences: list[dict], num_variants: int) -> list[dict]:
    """One row for each method, checkpoint, set, mode, temperature and seed, in the order of the records.

    Turns that some of the `num_variants` have not answered yet (after an interruption) are left out.
    """
    groups = {}
    for record in _complete(records, num_variants):
        groups.setdefault(tuple(record[name] for name in GROUP), []).append(record)
    rows = []
    for key, group in groups.items():
        plain = groups[TARGET_ONLY, None, *key[2:]]
        row = dict(zip(GROUP, key, strict=True))
        row |= {
            "num_prompts": len({record["prompt"] for record in group}),
            "num_new_tokens": sum(record["num_new_tokens"] for record in group),
        }
        own = [d for d in differences if all(d[name] == row[name] for name in GROUP)]
        rows.append(row | _acceptance(group) | _speed(group, plain) | {"differences": own})
    return sorted(rows, key=lambda row: [_place(rows, name, row[name]) for name in ("method", "checkpoint")])


def _place(rows: list[dict], name: str, value) -> int:
    return next(i for i, row in enumerate(rows) if row[name] == value)


def _complete(records: list[dict], num_variants: int) -> list[dict]:
    asked = [tuple(record[name] for name in KEY[2:]) for record in records]
    counts = Counter(asked)
    return [record for record, question in zip(records, asked, strict=True) if counts[question] == num_variants]


def _acceptance(group: list[dict]) -> dict:
    """Figures of the rounds; None for plain decoding, and means are None without any round."""
    stats = SpeculativeStats()
    names = list(stats.to_dict())
    if group[0]["num_drafts"] is None:
        return dict.fromkeys(["num_rounds", "acceptance_length_interval", *names])
    for record in group:
        stats.extend(SpeculativeStats(record["num_drafts"], record["num_accepted"]))
    sums = _by_prompt(group, lambda r: (sum(r["num_accepted"]), len(r["num_accepted"])))
    interval = bootstrap(sums, lambda s: 1 + s[..., 0] / s[..., 1])
    figures = {"num_rounds": len(stats.num_drafts), "acceptance_length_interval": interval, **stats.to_dict()}
    means = [name for name in names if name.startswith("accept") or name.endswith("_rates")]
    return figures if stats.num_drafts else figures | dict.fromkeys(means)


def _speed(group: list[dict], plain: list[dict]) -> dict:
    """Throughput and its parts; seconds are means per step (a round, or one token of plain decoding)."""
    tokens, seconds = _sums(group, "num_timed_tokens", "decoding_seconds")
    plain_tokens, plain_seconds = _sums(plain, "num_timed_tokens", "decoding_seconds")
    parts = _step(group)
    # Drafting from the prompt runs no forward that could be timed
    told = parts | ({"draft": None} if _is_lookup(group[0]) else {})
    speedup = _ratio(tokens * plain_seconds, seconds * plain_tokens)
    attainable = _attainable(group, plain)
    is_plain = group is plain
    return {
        "tokens_per_second": _ratio(tokens, seconds),
        "speedup": speedup,
        "speedup_interval": None if is_plain else _speedup_interval(group, plain),
        **{f"{name}_share": _ratio(told[name], told["step"]) for name in ("draft", "verify", "other")},
        **{f"{name}_seconds": value for name, value in told.items()},
        "attainable_speedup": attainable,
        "efficiency": _ratio(speedup, attainable),
    }


def _is_lookup(row: dict) -> bool:
    return row["method"].startswith(f"{PROMPT_LOOKUP}:")


def _step(group: list[dict]) -> dict:
    """Mean seconds of a step and of its parts; None without any step."""
    names = ("num_steps", "step_seconds", "verify_seconds", "draft_seconds")
    num_steps, step, verify, draft = _sums(group, *names)
    parts = {"step": step, "verify": verify, "draft": draft, "other": step - verify - draft}
    return {name: _ratio(value, num_steps) for name, value in parts.items()}


def _attainable(group: list[dict], plain: list[dict]) -> float | None:
    """The speed-up if a round took only its forwards and the rest of a plain step, and no answer ended inside a block.

    Tokens are counted over all steps. For a drafter this is nearly tau, as only last steps may have no draft; prompt
    lookup has many steps without one.
    """
    own, one = _step(group), _step(plain)
    if own["step"] is None or one["step"] is None:
        return None
    num_accepted = sum(sum(record["num_accepted"] or ()) for record in group)
    tokens_per_step = 1 + num_accepted / _sums(group, "num_steps")[0]
    return tokens_per_step * one["step"] / (own["verify"] + own["draft"] + one["other"])


def _speedup_interval(group: list[dict], plain: list[dict]) -> list[float] | None:
    names = ("num_timed_tokens", "decoding_seconds")
    # Side by side, so that each draw takes the same prompts for both: what makes a prompt slow is slow for both
    sums = np.concatenate([_by_prompt(g, lambda r: [r[name] for name in names]) for g in (group, plain)], axis=1)
    return bootstrap(sums, lambda s: s[..., 0] / s[..., 1] / (s[..., 2] / s[..., 3]))


def _sums(group: list[dict], *names: str) -> list[float]:
    return [sum(record[name] for record in group) for name in names]


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _by_prompt(group: list[dict], values: Callable[[dict], list[float]]) -> np.ndarray:
    """Sums over the turns of each prompt, `(prompts, values)`, by the prompt's index."""
    sums = {}
    for record in group:
        sums[record["prompt"]] = sums.get(record["prompt"], 0) + np.array(values(record), dtype=float)
    return np.stack([sums[prompt] for prompt in sorted(sums)])


def bootstrap(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> list[float] | None:
    """A 95% interval of `statistic` over resampled prompts; None for one prompt, and where it is never finite.

    Args:
        sums (`np.ndarray` of shape `(prompts, values)`): what each prompt contributes.
        statistic: maps summed values `(..., values)` to `(...)`.
    """
    if len(sums) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(sums), size=(NUM_RESAMPLES, len(sums)))
    # A draw without any round, or without a timed token, divides by zero; such draws are left out
    with np.errstate(divide="ignore", invalid="ignore"):
        values = statistic(sums[drawn].sum(1))
    values = values[np.isfinite(values)]
    return [float(x) for x in np.percentile(values, [2.5, 97.5])] if len(values) else None


# --------------------------------------------------------------------------------------------------------------- files


def write_report(folder: Path, results: dict) -> None:
    """Write `results.json`, `results.csv` and `table.md`, each atomically."""
    write_atomically(folder / RESULTS_FILE, to_json(results).encode())
    write_atomically(folder / CSV_FILE, to_csv(results["rows"]).encode())
    write_table(folder, results["rows"], run_notes(results))


def to_json(results: dict) -> str:
    """The results with one row per line, so that they can be read and compared with `diff` and `grep`."""
    dump = partial(json.dumps, ensure_ascii=False, allow_nan=False)
    parts = []
    for name, value in results.items():
        if isinstance(value, list) and value:
            text = "[\n  " + ",\n  ".join(map(dump, value)) + "\n ]"
        else:
            text = dump(value, indent=1).replace("\n", "\n ")
        parts.append(f" {dump(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_table(folder: Path, rows: list[dict], notes: list[str]) -> None:
    """Write `table.md`, with the definitions and `notes` below the tables."""
    write_atomically(folder / TABLE_FILE, to_markdown(rows, notes).encode())


def to_csv(rows: list[dict]) -> str:
    """The rows with one column for each position and each end of an interval, and with numbers of differences."""
    flat = [_flat(row) for row in rows]
    columns = {name: None for name in GROUP} | {name: None for row in flat for name in row}
    out = io.StringIO()
    writer = csv.DictWriter(out, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def _flat(row: dict) -> dict:
    flat = {}
    for name, value in row.items():
        if name == "differences":
            flat["num_differences"] = len(value)
            flat["num_unexplained_differences"] = sum(not d["explained"] for d in value)
        elif name.endswith("_interval"):
            ends = zip(("low", "high"), value or (None, None), strict=True)
            flat |= {f"{name.removesuffix('_interval')}_{end}": x for end, x in ends}
        elif isinstance(value, list):
            flat |= {f"{name}_{k}": x for k, x in enumerate(value, start=1)}
        elif not (value is None and ("rates" in name or name.endswith("per_pos"))):
            flat[name] = value
    return flat


# --------------------------------------------------------------------------------------------------------------- table


def make_tables(rows: list[dict]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and lines of a table for each mode and temperature: a row per method, columns per set."""
    tables = []
    for title, methods, datasets in _blocks(rows):
        lines = [_line(method, own, datasets) for method, own in methods.items()]
        tables.append((title, _header([*datasets, "Average"]), lines))
    return tables


def make_interval_tables(rows: list[dict]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The intervals of `make_tables`' figures, for methods with one checkpoint and seed; others have a ± instead."""
    tables = []
    for title, methods, datasets in _blocks(rows):
        lines = [[method, *_intervals(own, datasets)] for method, own in methods.items()]
        lines = [line for line in lines if set(line[1:]) != {"–"}]
        tables += [(f"{title}: 95% intervals over prompts", _header(datasets), lines)] if lines else []
    return tables


def _blocks(rows: list[dict]) -> list[tuple[str, dict[str, list[dict]], list[str]]]:
    """For each mode and temperature its title, the rows of each method, and the sets."""
    blocks = {}
    for row in rows:
        title = f"{row['mode']}, temperature {row['temperature']:g}"
        blocks.setdefault(title, {}).setdefault(row["method"], []).append(row)
    return [
        (title, methods, list(dict.fromkeys(row["dataset"] for own in methods.values() for row in own)))
        for title, methods in blocks.items()
    ]


def _header(names: list[str]) -> list[str]:
    return ["method", *(f"{name} {what}" for name in names for what in ("speed-up", "tau"))]


def _intervals(rows: list[dict], datasets: list[str]) -> list[str]:
    cells = []
    for dataset in datasets:
        found = [row for row in rows if row["dataset"] == dataset]
        ends = [found[0][f"{name}_interval"] if len(found) == 1 else None for name in FORMS]
        cells += ["–" if end is None else "[{:.2f}, {:.2f}]".format(*end) for end in ends]
    return cells


def _line(method: str, rows: list[dict], datasets: list[str]) -> list[str]:
    cells = {name: [_cells([row for row in rows if row["dataset"] == d], name) for d in datasets] for name in FORMS}
    for name, cell in cells.items():
        cell.append(mean_and_deviation(_averages(rows, datasets, name), FORMS[name]))
    return [method, *(cell for pair in zip(*cells.values(), strict=True) for cell in pair)]


FORMS = {"speedup": "{:.2f}x", "acceptance_length": "{:.2f}"}


def _cells(rows: list[dict], name: str) -> str:
    return mean_and_deviation([row[name] for row in rows if row[name] is not None], FORMS[name])


def mean_and_deviation(values: list[float], form: str = "{:.2f}") -> str:
    """Mean, with the standard deviation if there are several values (of checkpoints or seeds)."""
    if not values:
        return "–"
    deviation = f" ± {statistics.stdev(values):.2f}" if len(set(values)) > 1 else ""
    return form.format(statistics.fmean(values)) + deviation


def _averages(rows: list[dict], datasets: list[str], name: str) -> list[float]:
    """The mean over the sets for each checkpoint and seed that has all of them."""
    runs = {}
    for row in rows:
        if row[name] is not None:
            runs.setdefault((row["checkpoint"], row["seed"]), []).append(row[name])
    return [statistics.fmean(values) for values in runs.values() if len(values) == len(datasets)]


def to_markdown(rows: list[dict], notes: list[str]) -> str:
    """All tables, then the definitions and the notes."""
    parts = []
    for title, header, lines in [*make_tables(rows), *make_interval_tables(rows)]:
        parts.append(f"**{title}**\n\n{markdown_table(header, lines)}")
    if not parts:
        parts.append("No prompt has been answered by all methods yet.")
    if any("±" in part for part in parts):
        notes = ["±: standard deviation over checkpoints and seeds.", *notes]
    return "\n\n".join([*parts, definitions(rows), *token_notes(rows), *notes]) + "\n"


def markdown_table(header: list[str], lines: list[list[str]]) -> str:
    """A markdown table; all columns but the first are right-aligned."""
    return "\n".join(map(_row, [header, ["---", *["---:"] * (len(header) - 1)], *lines]))


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def definitions(rows: list[dict]) -> str:
    """What the figures mean, with remarks that apply to these rows."""
    parts = [DEFINITIONS]
    if any(row["temperature"] > 0 for row in rows):
        parts.append(OF_SAMPLING)
    if any(map(_is_lookup, rows)):
        parts.append(OF_PROMPT_LOOKUP)
    return " ".join(parts)


def token_notes(rows: list[dict]) -> list[str]:
    """How many tokens each method wrote, if these numbers differ; a mean over several runs."""
    notes = []
    for title, methods, datasets in _blocks(rows):
        counts = {method: [_num_new_tokens(own, dataset) for dataset in datasets] for method, own in methods.items()}
        if any(len(set(of_set) - {0}) > 1 for of_set in zip(*counts.values(), strict=True)):
            text = ", ".join(f"{method} {sum(numbers):,.0f}" for method, numbers in counts.items())
            notes.append(f"New tokens per run, {title}: {text}.")
    return notes


def _num_new_tokens(rows: list[dict], dataset: str) -> float:
    numbers = [row["num_new_tokens"] for row in rows if row["dataset"] == dataset]
    return statistics.fmean(numbers) if numbers else 0


def single_prompt_sets(rows: list[dict]) -> list[str]:
    """Sets of which one prompt was measured, so that there is no interval over prompts."""
    return list(dict.fromkeys(row["dataset"] for row in rows if row["num_prompts"] == 1))


def run_notes(results: dict) -> list[str]:
    """The lossless check of a run, and what the run lacks."""
    notes = [lossless_line(results)]
    notes += [f"{name}: {NO_INTERVAL}." for name in single_prompt_sets(results["rows"])]
    if results["resumed"]:
        notes.append(f"{results['resumed']} calls were measured by an earlier run of the same command.")
    for change in results.get("code_changes", []):
        calls, files = change["after_calls"], ", ".join(change["files"])
        notes.append(f"{calls} calls were measured before {files} changed, later ones after it: rows may mix both.")
    if results["missing_sets"]:
        names = ", ".join(results["missing_sets"])
        notes.append(f"Skipped sets (not available): {names}.")
    if results["left_out"]:
        prompts = {(turn["dataset"], turn["prompt"]) for turn in results["left_out"]}
        counts = sorted(Counter(dataset for dataset, _ in prompts).items())
        text = ", ".join(f"{count} of {name}" for name, count in counts)
        limit = results["max_prompt_tokens"]
        notes.append(f"Prompts longer than {limit} tokens, left out entirely or from a later turn on: {text}.")
    return notes


def lossless_line(results: dict) -> str:
    """Whether greedy answers equal target-only's: the share that differs, and by how much."""
    compared, ties, others = (results["lossless"][name] for name in ("num_compared", "num_ties", "num_unexplained"))
    dtype, rows = results["environment"]["dtype"], results["rows"]
    gaps = [difference["gap"] for row in rows for difference in row["differences"]]
    # None where one answer only ends earlier: no gap of two tokens explains that
    gap = f"up to {max(gaps):.2g}" if gaps and None not in gaps else "infinitely far"
    number = f"{ties + others} of {compared} greedy answers ({(ties + others) / max(compared, 1):.1%})"
    if not compared:
        is_alone = rows and all(row["method"] == TARGET_ONLY for row in rows)
        why = f"only {TARGET_ONLY} was measured" if is_alone else "no answer was compared at temperature 0"
        text = f"Lossless check not made: {why}."
    elif not ties + others:
        text = f"Lossless check passed: all {compared} greedy answers are target-only's."
    elif others:
        text = (
            f"Lossless check FAILED: {number} differ from target-only's, {others} of them by more than rounding in "
            f"{dtype} explains: there the logits of the two tokens are {gap} apart."
        )
    elif dtype == "float32" or max(gaps, default=0) <= TIE_GAPS[torch.float32]:
        text = (
            f"Lossless check passed: {number} differ from target-only's, all at ties, which rounding decides: the "
            f"logits of the two tokens are {gap} apart."
        )
    else:  # these gaps are more than ties, and a small fault could hide behind them
        text = (
            f"Lossless check inconclusive in {dtype}: {number} differ from target-only's, where the logits of the two "
            f"tokens are {gap} apart. A block of tokens is rounded differently than single tokens; with --dtype "
            "float32 a fault shows."
        )
    return text if results["complete"] else f"{text} INCOMPLETE: the run stopped before its end."
