"""The tables of docs/evidence.md, docs/heads.md and README.md, from docs/results: none is typed by hand.

    python examples/tiny/evidence/evidence.py              # writes the tables of the documents, and the learning.png
    python examples/tiny/evidence/evidence.py --check      # exit status 1 if a document says anything else

A table stands between `<!-- NAME -->` and `<!-- end -->`. The results come from `hyperdflash benchmark`,
`baselines.py`, `residual_paths.py`, `calibration.py`, `selector.py` and `first_slot.py`; `make tiny-baselines` and
`make tiny-heads` run them.
"""

import argparse
import json
import re
import sys
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from hyperdflash.benchmark.report import spread, table
from hyperdflash.common.files import write_atomically

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "results"
TRAINING_FILE = RESULTS / "training.jsonl"
# Beginning of a line in the results -> what the tables call it
METHODS = {
    "prompt-lookup:6": "prompt lookup (6)",
    "mtp:3 (the target": "MTP (3), the target's own",
    "mtp:3 (mtp": "MTP (3), trained further",
    "mtp:6 (the target": "MTP (6), the target's own",
    "mtp:6 (mtp": "MTP (6), trained further",
    "dflash:6": "vanilla DFlash (6)",
    "fc:6": "fc (6)",
    "mean:6": "mean (6)",
    "hyperdflash:6": "HyperDFlash (6)",
}
HEADS = {
    "mtp:6 (the target": "MTP, the target's own",
    "mtp:6 (mtp": "MTP, trained further",
    "hyperdflash:6": "HyperDFlash",
    "hyperdflash+markov:6": "HyperDFlash + Markov",
    "hyperdflash+markov+confidence:6": "HyperDFlash + Markov + confidence",
    "mean+markov:6": "mean + Markov",
    "dspark-like:6": "DSpark-like",
}
TEXTS = {
    "ablation-base/final": "all answers, a quarter of them sampled",
    "texts-sampled/final": "answers sampled at temperature 1",
}
HEADLINE = ("hyperdflash", "mtp", "dflash", "mean", "fc")  # runs less their seed
CURVES = {  # runs whose curves are drawn, with the colours and marks of the other pictures' palette
    "headline": {
        "hyperdflash-42": ("HyperDFlash", "#0072b2", "o"),
        "mean-42": ("mean", "#56b4e9", "s"),
        "fc-42": ("fc", "#e69f00", "D"),
        "dflash-42": ("vanilla DFlash", "#7f7f7f", "^"),
        "mtp-42": ("MTP, trained further", "#d55e00", "v"),
    },
    "heads": {
        "markov-42": ("HyperDFlash + Markov", "#009e73", "o"),
        "mean-markov-42": ("mean + Markov", "#56b4e9", "s"),
        "dspark-like-42": ("DSpark-like", "#cc79a7", "^"),
        "hyperdflash-42": ("HyperDFlash", "#0072b2", "D"),
        "mtp-42": ("MTP, trained further", "#d55e00", "v"),
    },
}


# ------------------------------------------------------------------------------------------------------------- figures


def read_rows(group: str) -> list[dict]:
    return json.loads((RESULTS / group / "results.json").read_text())["rows"]


def read_training() -> dict[str, dict]:
    """Summaries of training runs by name, as `baselines.py` writes them; none before the first run has ended."""
    if not TRAINING_FILE.exists():
        return {}
    with TRAINING_FILE.open(encoding="utf-8") as lines:
        summaries = [json.loads(line) for line in lines]
    return {summary["name"]: summary for summary in summaries}


def rows_of(rows: list[dict], method: str, temperature: float = 0) -> list[dict]:
    return [row for row in rows if row["method"].startswith(method) and row["temperature"] == temperature]


def means(rows: list[dict], name: str) -> list[float]:
    """For each checkpoint, the mean of a figure over the sets."""
    values = {}
    for row in rows:
        values.setdefault(row["checkpoint"], []).append(row[name])
    return [fmean(v) for v in values.values()]


def figures(rows: list[dict], method: str, name: str, temperature: float) -> list[float]:
    """A method's figure for each of its checkpoints; of `mtp:N`, of the better of the target's own module and the one
    trained further."""
    modules = [f"{method} (the target", f"{method} (mtp"] if method.startswith("mtp:") else [method]
    return max((means(rows_of(rows, module, temperature), name) for module in modules), key=fmean)


def ratio(rows: list[dict], method: str, other: str, name: str, temperature: float) -> str:
    """Of a method's figure to another's, seed by seed."""
    ours, theirs = (figures(rows, which, name, temperature) for which in (method, other))
    theirs = theirs * len(ours) if len(theirs) == 1 else theirs
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


# -------------------------------------------------------------------------------------------------------------- tables


def speed_and_tau(group: str, methods: dict[str, str], temperature: float) -> str:
    """The paper's Table 2: speed-up and tau on every set."""
    rows = read_rows(group)
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    header = ["method", *(f"{name} {what}" for name in [*sets, "mean"] for what in ("speed-up", "tau"))]
    lines = []
    for method, label in methods.items():
        own = rows_of(rows, method, temperature)
        parts = [*([row for row in own if row["dataset"] == name] for name in sets), own]
        cells = [
            spread(means(part, name), form)
            for part in parts
            for name, form in (("speedup", "{:.2f}x"), ("acceptance_length", "{:.2f}"))
        ]
        lines.append([label, *cells])
    return table(header, lines)


def positions(group: str, methods: dict[str, str], temperature: float) -> str:
    """The paper's Figure 1 in numbers: acceptance by position, mean over sets and seeds."""
    rows = read_rows(group)
    lines = []
    for method, label in methods.items():
        rates = [row["per_position_acceptance_rates"] for row in rows_of(rows, method, temperature)]
        rates = [fmean(column) for column in zip_longest(*rates, fillvalue=0.0)]
        lines.append([label, *(f"{rate:.2f}" for rate in rates), *["–"] * (6 - len(rates))])
    return table(["method", *(str(k) for k in range(1, 7))], lines)


CLAIMS = (  # what, method it is compared with, figure, the paper's ratio at temperature 0 and 1 (non-thinking)
    ("tau, HyperDFlash (6) / MTP (6)", "mtp:6", "acceptance_length", "1.20", "1.19"),
    ("tau, HyperDFlash (6) / vanilla DFlash (6)", "dflash:6", "acceptance_length", "1.72", "1.67"),
    ("speed-up, HyperDFlash (6) / MTP (3)", "mtp:3", "speedup", "1.24", "1.20"),
    ("speed-up, HyperDFlash (6) / MTP (6)", "mtp:6", "speedup", "1.59", "1.60"),
    ("speed-up, HyperDFlash (6) / vanilla DFlash (6)", "dflash:6", "speedup", "1.62", "1.55"),
)


def claims() -> str:
    """Ratios of means over sets beside the paper's."""
    rows = read_rows("headline")
    lines = []
    for what, other, name, *paper in CLAIMS:
        ours = [ratio(rows, "hyperdflash:6", other, name, temperature) for temperature in (0, 1)]
        lines.append([what, ours[0], paper[0], ours[1], paper[1]])
    return table(["", "temperature 0", "paper", "temperature 1", "paper"], lines)


def rounds() -> str:
    """Where the time of a round goes, temperature 0, mean over sets and seeds."""
    rows = read_rows("headline")
    lines = []
    for method, label in {"target-only": "plain decoding", **METHODS}.items():
        own = rows_of(rows, method)
        seconds = ([row[f"{part}_seconds"] for row in own] for part in ("draft", "verify", "other"))
        cells = ["–" if None in part else f"{1000 * fmean(part):.1f}" for part in seconds]  # of lookup none is told
        efficiency = [row["efficiency"] for row in own if row["efficiency"] is not None]
        lines.append([label, *cells, f"{fmean(efficiency):.2f}" if method != "target-only" else "–"])
    return table(["method", "draft, ms", "verify, ms", "rest, ms", "speed-up / attainable"], lines)


def training() -> str:
    """What each headline run was given."""
    lines = []
    for name, run in read_training().items():
        if name.rpartition("-")[0] not in HEADLINE:
            continue
        last = run["curve"][-1]["acceptance_length"] if run["curve"] else None
        cells = [
            f"{run['parameters'] / 1e6:.2f}M",
            f"{run['tokens'] / 1e6:.2f}M",
            f"{run['flops_per_token'] / 1e6:.0f}",
        ]
        lines.append([f"`{name}`", *cells, f"{last:.2f}" if last else "–"])
    return table(["run", "parameters", "tokens", "MFLOP per token", "tau on validation prompts"], lines)


def ablations() -> str:
    """tau of every ablation on the held-out prompts, its difference to the method itself, and the first positions.

    Drafters of other block sizes draft more or fewer tokens, so that only their positions compare.
    """
    rows, runs = read_rows("ablations"), read_training()
    by_name = {}
    for row in rows:
        if row["checkpoint"]:
            by_name.setdefault(row["checkpoint"].split("/")[0], []).append(row)
    base = fmean(row["acceptance_length"] for row in by_name["ablation-base"])
    lines = []
    for name, own in by_name.items():
        tau = fmean(row["acceptance_length"] for row in own)
        rates = [fmean(column) for column in zip(*(row["per_position_acceptance_rates"] for row in own), strict=True)]
        difference = f"{tau - base:+.2f}" if len(rates) == 6 else "–"
        shown = [f"{rate:.2f}" for rate in rates[:3]]
        lines.append([f"`{name.removeprefix('ablation-')}`", runs[name]["what"], f"{tau:.2f}", difference, *shown])
    header = ["run", "", "tau", "difference", "position 1", "2", "3"]
    return table(header, lines).replace("---:", "---", 1)


def seeds() -> str:
    """What three seeds of an ablation's budget make of tau."""
    rows = read_rows("seeds")
    lines = []
    for method, label in (("hyperdflash:6", "`base`"), ("dflash:6", "`dflash`")):
        tau = means(rows_of(rows, method), "acceptance_length")
        lines.append([label, *(f"{value:.2f}" for value in tau), spread(tau)])
    return table(["run", *(f"seed {seed}" for seed in (42, 43, 44)), "mean"], lines)


def texts() -> str:
    """tau of a drafter by the temperature of the text that it was trained on."""
    rows = read_rows("texts")
    lines = []
    for checkpoint, label in TEXTS.items():
        cells = []
        for temperature in (0, 1):
            own = [row for row in rows_of(rows, "hyperdflash:6", temperature) if row["checkpoint"] == checkpoint]
            cells += [
                f"{tau:.2f}" for tau in (*(row["acceptance_length"] for row in own), *means(own, "acceptance_length"))
            ]
        lines.append([label, *cells])
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    return table(["trained on", *(f"T {t}, {name}" for t in (0, 1) for name in (*sets, "mean"))], lines)


def reducers() -> str:
    """The paper's Table 1: parameters and initialisation of the reducers, at V4-Flash and in the tiny world."""
    lines = []
    for name, starts in (("hc_gate", "the target's hc_head; norms at one"), ("fc", "at random"), ("mean", "none")):
        sizes = []
        for m, D in ((4, 4096), (4, 192)):
            gate = f"{m * m * D:,} + {m + 1} gate, {m * D:,} norms"
            sizes.append({"hc_gate": gate, "fc": f"{m * D * D:,}", "mean": "0"}[name])
        lines.append([f"`{name}`", *sizes, starts])
    return table(["reducer", "parameters at V4-Flash", "in the tiny world", "initialised"], lines)


def paths() -> str:
    """How much the tiny target's residual paths differ (`residual_paths.py`)."""
    found = json.loads((RESULTS / "paths.json").read_text())
    others = [value for i, row in enumerate(found["cosine"]) for value in row[i + 1 :]]
    lines = [
        ["cosine of two paths", f"{min(others):.2f} to {max(others):.2f}"],
        ["energy outside the paths' mean", f"{found['energy_outside_mean']:.1%}"],
        ["weights of the target's gate, mean", ", ".join(f"{x:.2f}" for x in found["gate_mean"])],
        ["their standard deviation over positions", ", ".join(f"{x:.2f}" for x in found["gate_std"])],
        ["cosine of the gate's collapse and the plain mean", f"{found['cosine_of_collapse_and_mean']:.3f}"],
    ]
    return table(["", "tiny target"], lines)


def heads_claims() -> str:
    """Ratios of means over sets."""
    rows = read_rows("heads")
    lines = []
    for name, what in (("acceptance_length", "tau"), ("speedup", "speed-up")):
        for method, other in (
            ("hyperdflash+markov:6", "mtp:6"),
            ("hyperdflash+markov:6", "hyperdflash:6"),
            ("hyperdflash+markov:6", "mean+markov:6"),
            ("hyperdflash+markov:6", "dspark-like:6"),
            ("hyperdflash+markov+confidence:6", "hyperdflash+markov:6"),
        ):
            cells = [ratio(rows, method, other, name, temperature) for temperature in (0, 1)]
            lines.append([f"{what}, {HEADS[method]} / {HEADS.get(other, 'MTP')}", *cells])
    return table(["", "temperature 0", "temperature 1"], lines)


def calibration() -> str:
    """The confidence head's error (`calibration.py`)."""
    found = json.loads((RESULTS / "heads" / "calibration.json").read_text())
    names = ("calibration_error", "brier", "brier_of_mean")
    lines = [[t, f"{part['slots']:,}", *(f"{part[name]:.3f}" for name in names)] for t, part in found.items()]
    return table(["temperature", "slots", "calibration error", "Brier score", "of the mean rate alone"], lines)


def stopping() -> str:
    """What fewer drafts are worth where a verified token costs more (`calibration.py`)."""
    found = json.loads((RESULTS / "heads" / "calibration.json").read_text())
    lines = []
    for temperature, part in found.items():
        for gain in part["gains"]:
            cells = [f"{gain['fixed']:.3f} ({gain['best_fixed_number']})", f"{gain['confidence']:.3f}"]
            lines.append([temperature, f"{gain['cost']:g}", *cells, f"{gain['known']:.3f}"])
    header = ["temperature", "cost of a draft", "best fixed number", "confidence", "acceptance known"]
    return table(header, lines)


def selector() -> str:
    """What the best path of a block would gain (`selector.py`)."""
    found = json.loads((RESULTS / "heads" / "selector.json").read_text())
    base = found["slot by slot"]
    lines = [[name, f"{tau:.3f}", f"{tau / base - 1:+.1%}"] for name, tau in found.items()]
    return table(["drafts", "tau", ""], lines)


def first_slot() -> str:
    """The first draft of a round on greedy and on sampled text (`first_slot.py`)."""
    found = json.loads((RESULTS / "heads" / "first_slot.json").read_text())
    header, lines = [""], [["the target itself"]]
    lower, own, higher = next(iter(found["greedy"]["drafters"].values()))["overlap"]  # temperatures of the drafts
    for text, part in found.items():
        header += [f"{text} text: same token", "overlap", f"at {lower}, at {higher}", "entropy"]
        lines[0] += ["", "", "", f"{part['entropy_of_target']:.2f}"]
    for name in part["drafters"]:
        lines.append([HEADS[name]])
        for part in found.values():
            of = part["drafters"][name]
            overlap = {temperature: f"{share:.2f}" for temperature, share in of["overlap"].items()}
            others = f"{overlap[lower]}, {overlap[higher]}"
            lines[-1] += [f"{of['same_token']:.2f}", overlap[own], others, f"{of['entropy']:.2f}"]
    return table(header, lines)


def conditional(temperature: float) -> str:
    """Of the drafts that are reached, how many are accepted, by domain."""
    rows = read_rows("heads")
    lines = []
    for name in dict.fromkeys(row["dataset"] for row in rows):
        for method in ("mtp:6 (the target", "hyperdflash:6", "hyperdflash+markov:6"):
            own = [row for row in rows_of(rows, method, temperature) if row["dataset"] == name]
            rates = zip(*(row["conditional_acceptance_rates"] for row in own), strict=True)
            tau = fmean(row["acceptance_length"] for row in own)
            lines.append([name, HEADS[method], *(f"{fmean(rate):.2f}" for rate in rates), f"{tau:.2f}"])
    return table(["", "method", *map(str, range(1, 7)), "tau"], lines)


SHIPPED = {  # what lies in this folder -> method and checkpoint that were measured
    "`drafter`": ("hyperdflash+markov+confidence:6", "markov-42/final"),
    "`drafter-paper`": ("hyperdflash:6", "hyperdflash-42/final"),
    "`target`'s own MTP module": ("mtp:6", None),
}


def tiny_pair() -> str:
    """tau and speed-up of what is shipped."""
    rows = read_rows("heads")
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    lines = []
    for temperature in (0, 1):
        for label, (method, checkpoint) in SHIPPED.items():
            own = [row for row in rows_of(rows, method, temperature) if row["checkpoint"] == checkpoint]
            tau, speedup = ([row[name] for row in own] for name in ("acceptance_length", "speedup"))
            cells = (f"{t:.2f}, {s:.2f}x" for t, s in zip([*tau, fmean(tau)], [*speedup, fmean(speedup)], strict=True))
            lines.append([label, str(temperature), *cells])
    return table(["tau, speed-up", "temperature", *sets, "mean"], lines)


TABLES = {
    "docs/evidence.md": {
        "headline, temperature 0": lambda: speed_and_tau("headline", METHODS, 0),
        "headline, temperature 1": lambda: speed_and_tau("headline", METHODS, 1),
        "claims": claims,
        "positions, temperature 0": lambda: positions("headline", METHODS, 0),
        "positions, temperature 1": lambda: positions("headline", METHODS, 1),
        "rounds": rounds,
        "training": training,
        "ablations": ablations,
        "seeds": seeds,
        "texts": texts,
        "reducers": reducers,
        "paths": paths,
    },
    "docs/heads.md": {
        "heads, temperature 0": lambda: speed_and_tau("heads", HEADS, 0),
        "heads, temperature 1": lambda: speed_and_tau("heads", HEADS, 1),
        "claims": heads_claims,
        "positions, temperature 0": lambda: positions("heads", HEADS, 0),
        "positions, temperature 1": lambda: positions("heads", HEADS, 1),
        "conditional, temperature 1": lambda: conditional(1),
        "first slot": first_slot,
        "calibration": calibration,
        "stopping": stopping,
        "selector": selector,
    },
    "README.md": {"the tiny pair": tiny_pair},
}


# ------------------------------------------------------------------------------------------------------------- picture


def draw_learning(group: str) -> None:
    """tau on the validation prompts against training tokens, and against training compute."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 4), dpi=120, layout="constrained")
    by_tokens, by_compute = figure.subplots(1, 2, sharey=True)
    runs = read_training()
    for name, (label, color, marker) in CURVES[group].items():
        run = runs[name]
        tau = [point["acceptance_length"] for point in run["curve"]]
        tokens = [point["tokens"] / 1e6 for point in run["curve"]]
        style = {"label": label, "color": color, "marker": marker, "markersize": 4.5, "linewidth": 1.5}
        by_tokens.plot(tokens, tau, **style)
        by_compute.plot([t * run["flops_per_token"] / 1e6 for t in tokens], tau, **style)
    by_tokens.set(xlabel="training tokens, millions", ylabel="tau, validation prompts, temperature 0")
    by_compute.set(xlabel="training compute without the target's, TFLOP", xscale="log")
    for axes in (by_tokens, by_compute):
        axes.grid(alpha=0.25)
    by_tokens.legend(frameon=False, fontsize="small")
    figure.savefig(RESULTS / group / "learning.png", metadata={"Software": None})


# ------------------------------------------------------------------------------------------------------------ document


def filled(document: str, text: str) -> str:
    """The text of a document with its tables made anew. Raises `ValueError` where it has others than in `TABLES`."""
    tables = TABLES[document]
    found = re.findall(r"<!-- ([^>]+?) -->\n.*?<!-- end -->", text, flags=re.DOTALL)
    if sorted(found) != sorted(tables):
        raise ValueError(f"{document} has the tables {found}; there are {list(tables)}")
    return re.sub(
        r"<!-- ([^>]+?) -->\n.*?<!-- end -->",
        lambda match: f"<!-- {match[1]} -->\n{tables[match[1]]()}\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    for name in TABLES:
        document = ROOT / name
        text = document.read_text(encoding="utf-8")
        new = filled(name, text)
        if args.check and new != text:
            print(f"{document} differs from docs/results: run examples/tiny/evidence/evidence.py", file=sys.stderr)
            return 1
        if not args.check:
            write_atomically(document, new.encode())
    for group in () if args.check else CURVES:
        draw_learning(group)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
