"""Pictures of a benchmark; `hyperdflash plot` makes them and the table again from `results.json` files.

    hyperdflash plot runs/headline runs/ablation --output runs/both

`acceptance.png`: the share of rounds whose draft at position 1..N was accepted, with equal weight for each set.
`speedup.png`: the speed-up of each method on each set, with its interval. One panel for each mode and temperature.
"""

import argparse
import io
import json
import statistics
from pathlib import Path

from ..common.colors import method_styles
from ..common.console import check_installed
from ..common.files import write_atomically
from .methods import TARGET_ONLY
from .records import GROUP
from .report import NO_INTERVAL, RESULTS_FILE, TABLE_FILE, run_notes, single_prompt_sets, write_table

ACCEPTANCE_FILE, SPEEDUP_FILE = "acceptance.png", "speedup.png"
# Results that differ in one of these are not comparable and do not share a table
ALIKE = ("target_fingerprint", "dtype", "device", "threads")
NOTHING_TO_DRAW = f"only {TARGET_ONLY} was measured"
SIZES = ("num_prompts", "num_new_tokens")  # equal for plain decoding of the same prompts


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0. Raises `ValueError` and `OSError` before anything is written."""
    check_pictures()
    rows, notes = read_results(args.folders)
    check_picture_folder(args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    write_table(args.output, rows, notes)
    drawn = draw_pictures(args.output, rows)
    files = f"{TABLE_FILE}, {' and '.join(drawn)}" if drawn else f"{TABLE_FILE} (no pictures: {NOTHING_TO_DRAW})"
    print(f"{args.output}: {files}, from {len(rows)} rows")
    return 0


def check_pictures() -> None:
    """Raises `ImportError` with pip's command when matplotlib is missing."""
    check_installed("matplotlib", "drawing the benchmark's pictures")


def check_picture_folder(output: Path) -> None:
    """Raises `FileExistsError` for a file, and for a folder with other content than a benchmark's results."""
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"{output} is a file: choose another --output")
    ours = (RESULTS_FILE, TABLE_FILE)
    if output.is_dir() and any(output.iterdir()) and not any((output / name).is_file() for name in ours):
        raise FileExistsError(f"{output} is not empty and is not a benchmark's folder: choose another --output")


def read_results(folders: list[Path]) -> tuple[list[dict], list[str]]:
    """The rows of all folders together, and a note on each.

    Raises `OSError` for a folder without results; `ValueError` for broken results, for a row that occurs twice, and
    for folders measured with another target, dtype, device or number of threads, or on other prompts.
    """
    rows, notes, seen, first = [], [], {}, {}
    for folder in folders:
        path = folder / RESULTS_FILE
        if not path.is_file():
            raise FileNotFoundError(f"no {RESULTS_FILE} in {folder}: give the --output of `hyperdflash benchmark`")
        try:
            results = json.loads(path.read_text(encoding="utf-8"))
            found = results["rows"]
            for name in ALIKE:
                value = results["environment"][name]
                if value != first.setdefault(name, value):
                    raise ValueError(
                        f"it has {name} {value}, but {folders[0]} has {first[name]}: make separate tables"
                    )
            notes += [(f"{folder.name}: " if len(folders) > 1 else "") + note for note in run_notes(results)]
            for row in found:
                key = tuple(row[name] for name in GROUP)
                before, own = seen.setdefault(key, (folder, row))
                if own is row:
                    rows.append(row)
                elif row["method"] != TARGET_ONLY:
                    raise ValueError(f"it has the same row as {before}: {', '.join(map(str, key))}")
                elif any(row[name] != own[name] for name in SIZES):
                    raise ValueError(f"it has other prompts or lengths than {before}: {', '.join(map(str, key))}")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{path} cannot be used: {reason}") from error
    if not rows:
        raise ValueError(f"no rows in {', '.join(map(str, folders))}: no prompt was answered by all methods")
    return rows, notes


# ------------------------------------------------------------------------------------------------------------ pictures


def draw_pictures(folder: Path, rows: list[dict], names: dict[str, str] | None = None) -> list[str]:
    """Write both pictures of a benchmark's rows, each atomically; none when plain decoding is all there is.

    Args:
        names (*optional*): what the legends call a method, by its label in the rows.

    Returns:
        The names of the files.
    """
    panels = {}
    for row in rows:
        if row["method"] != TARGET_ONLY:
            panels.setdefault((row["mode"], row["temperature"]), []).append(row)
    if not panels:
        return []
    styles = method_styles(list(dict.fromkeys(row["method"] for panel in panels.values() for row in panel)))
    for method, style in styles.items():
        style["label"] = (names or {}).get(method, method)
    titles = {key: title for key, title in zip(panels, _titles(list(panels)), strict=True)}
    drawings = {ACCEPTANCE_FILE: _draw_acceptance, SPEEDUP_FILE: _draw_speedup}
    for name, draw in drawings.items():
        write_atomically(folder / name, draw({titles[key]: panel for key, panel in panels.items()}, styles))
    return list(drawings)


def _titles(panels: list[tuple[str, float]]) -> list[str]:
    several_modes = len({mode for mode, _ in panels}) > 1
    return [(f"{mode}, " if several_modes else "") + f"temperature {temperature:g}" for mode, temperature in panels]


def acceptance_curve(rows: list[dict]) -> list[float]:
    """Unconditional acceptance of one method at positions 1, 2, ...: the mean over its rows."""
    curves = [row["per_position_acceptance_rates"] for row in rows if row["per_position_acceptance_rates"]]
    length = max(map(len, curves), default=0)
    # A position that was never drafted was never accepted
    curves = [curve + [0.0] * (length - len(curve)) for curve in curves]
    return [statistics.fmean(rates) for rates in zip(*curves, strict=True)]


def _draw_acceptance(panels: dict[str, list[dict]], styles: dict[str, dict]) -> bytes:
    columns = len(panels) if len(panels) <= 3 else 2
    lines = -(-len(panels) // columns)
    figure = _figure(width=4.6 * columns, height=3.8 * lines + 0.4)
    for i, (title, rows) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, i + 1, title=title, xlabel="drafted position", ylim=(0, 1))
        if i % columns == 0:
            axes.set_ylabel("acceptance rate, of all rounds")
        for method, style in styles.items():
            curve = acceptance_curve([row for row in rows if row["method"] == method])
            if curve:
                axes.plot(range(1, len(curve) + 1), curve, linewidth=1.6, markersize=5, clip_on=False, **style)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.25)
    return _finish(figure)


def _draw_speedup(panels: dict[str, list[dict]], styles: dict[str, dict]) -> bytes:
    sets = {title: list(dict.fromkeys(row["dataset"] for row in rows)) for title, rows in panels.items()}
    width = min(max(5.5, 0.26 * max(map(len, sets.values())) * (len(styles) + 1) + 1.5), 16)
    figure = _figure(width=width, height=3.1 * len(panels) + 0.5)
    for i, (title, rows) in enumerate(panels.items(), start=1):
        has_intervals = any(row["speedup_interval"] for row in rows)
        ylabel = "speed-up, 95% over prompts" if has_intervals else "speed-up"
        axes = figure.add_subplot(len(panels), 1, i, title=title, ylabel=ylabel)
        here = [method for method in styles if any(row["method"] == method for row in rows)]
        for k, method in enumerate(here):
            place = (k + 0.5) / len(here) - 0.5, 1 / len(here)
            own = [row for row in rows if row["method"] == method]
            _draw_bars(axes, place, styles[method], own, sets[title])
        axes.axhline(1, color="0.3", linewidth=1, linestyle="--")
        names = [name if len(name) <= 16 else f"{name[:15]}…" for name in sets[title]]
        is_tight = len(names) * (max(map(len, names)) + 2) > 13 * width
        single = single_prompt_sets(rows)
        names = [f"{n}\n{NO_INTERVAL}" if s in single else n for n, s in zip(names, sets[title], strict=True)]
        slant = {"rotation": 25, "ha": "right", "rotation_mode": "anchor"} if is_tight else {}
        axes.set_xticks(range(len(names)), names, **slant)
        axes.set_xlim(-0.55, len(names) - 0.45)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    return _finish(figure)


def _draw_bars(axes, place: tuple[float, float], style: dict, rows: list[dict], sets: list[str]) -> None:
    """One bar per set, at a centre and of a width in shares of the set's place; with an error bar where there is an
    interval, as there is over two prompts or more.

    Of several checkpoints or seeds, the mean of the speed-ups and of the ends of their intervals.
    """
    from matplotlib.patheffects import withStroke

    positions, heights = [], []
    for i, dataset in enumerate(sets):
        found = [row for row in rows if row["dataset"] == dataset and row["speedup"] is not None]
        if not found:
            continue
        positions.append(i + 0.84 * place[0])
        heights.append(statistics.fmean(row["speedup"] for row in found))
        intervals = [row["speedup_interval"] for row in found if row["speedup_interval"]]
        if intervals:
            low, high = (statistics.fmean(end) for end in zip(*intervals, strict=True))
            lengths = [[max(heights[-1] - low, 0)], [max(high - heights[-1], 0)]]
            _, caps, stems = axes.errorbar(
                positions[-1:], heights[-1:], lengths, fmt="none", elinewidth=1, capsize=2, ecolor="black"
            )
            # Black on dark bars would not be seen
            for line in (*caps, *stems):
                line.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
    if positions:
        axes.bar(positions, heights, 0.79 * place[1], label=style["label"], color=style["color"])


def _figure(width: float, height: float):
    # Without pyplot: no global state, and the Agg backend on every machine
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def _finish(figure) -> bytes:
    """The PNG, with one legend under all panels."""
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        longest = max(map(len, handles))
        columns = max(1, min(len(handles), int(figure.get_figwidth() * 12 / (longest + 6))))
        rows = -(-len(handles) // columns)
        figure.set_figheight(figure.get_figheight() + 0.21 * max(rows - 2, 0))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=columns,
            frameon=False,
            fontsize="small",
        )
    out = io.BytesIO()
    # Without matplotlib's version in the file, the same results give the same bytes
    figure.savefig(out, format="png", metadata={"Software": None})
    return out.getvalue()
