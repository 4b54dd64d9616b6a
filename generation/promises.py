"""What a drafter's folder or repository says about its acceptance, for `hyperdflash check` to hold it against.

.venv/bin/python -m pytest tests/test_check.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from transformers.utils import cached_file

from ..benchmark.methods import DRAFTERS
from ..benchmark.report import RESULTS_FILE


class Promise(NamedTuple):
    """One figure of one file.

    Attributes:
        where (`str`): the file.
        is_decoded (`bool`): of real decoding; otherwise of training's blocks at an evaluation's anchors ("expected").
        length (`float`): tokens a round or block, the target's own included (tau).
        rates (`list[float]`): share of all rounds or blocks that keep the draft at position 1, 2, ...; may be empty.
    """

    where: str
    is_decoded: bool
    length: float
    rates: list[float] = []


def read_promises(drafter: str, revision: str | None = None) -> list[Promise]:
    """What the files of a folder or Hub repository promise, decoded figures and expected ones apart."""
    readers = {
        RESULTS_FILE: _of_results,
        "trainer_state.json": _of_trainer_state,
        "README.md": _of_card,
    }
    promises = []
    for name, read in readers.items():
        path = cached_file(
            drafter,
            name,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        try:
            promises += read(name, Path(path).read_text(encoding="utf-8")) if path else []
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # these names are anybody's: a file of another kind promises nothing
    return promises


def _of_results(name: str, text: str) -> list[Promise]:
    """Of a benchmark: the greedy rows of each drafter's method."""
    groups = {}
    for row in json.loads(text)["rows"]:
        if row["method"].partition(":")[0] in DRAFTERS and row["temperature"] == 0 and row["num_rounds"]:
            groups.setdefault(row["method"], []).append(row)
    return [Promise(f"{name} ({method})", True, *_mean(rows)) for method, rows in groups.items()]


def _of_trainer_state(name: str, text: str) -> Iterator[Promise]:
    """Of the last evaluation."""
    log = json.loads(text)["log_history"]
    for is_decoded, figure in ((True, "eval_acceptance_length"), (False, "eval_expected_acceptance_length")):
        entry = next((entry for entry in reversed(log) if figure in entry), None)
        if entry is not None:
            slots = sorted(int(key[21:]) for key in entry if re.fullmatch(r"eval_acceptance_rate_\d+", key))
            rates = [] if is_decoded else [float(entry[f"eval_acceptance_rate_{k}"]) for k in slots]
            yield Promise(name, is_decoded, float(entry[figure]), rates)


def _of_card(name: str, text: str) -> Iterator[Promise]:
    """Of the tables that `export` writes into a card."""
    row = re.search(r"^\| right, and all before it \| ([\d. |]+) \|$", text, re.MULTILINE)
    rates = [float(rate) for rate in row[1].split(" | ")] if row else []
    for is_decoded, figure in ((True, "eval_acceptance_length"), (False, "eval_expected_acceptance_length")):
        if found := re.search(rf"^\| `{figure}` \| ([\d.]+) \|", text, re.MULTILINE):
            yield Promise(name, is_decoded, float(found[1]), [] if is_decoded else rates)


def _mean(rows: list[dict]) -> tuple[float, list[float]]:
    """Length and rates by position, over rows of `SpeculativeStats.to_dict`."""
    curves = [row.get("per_position_acceptance_rates") or [] for row in rows]
    return fmean(row["acceptance_length"] for row in rows), [fmean(rates) for rates in zip(*curves, strict=False)]
