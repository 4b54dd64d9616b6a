"""The model card of a trained drafter, and its picture: written from the files of its run alone.

    hyperdflash export run my-drafter    # writes my-drafter/README.md and my-drafter/training.png with the weights

A run's folder holds `run.json` (target, data, versions), `recipe.yaml` (settings),
`command.txt`, and in every checkpoint transformers' `trainer_state.json` (the log). The card says which of them are
missing. `templates/model_card.md` has its text. Nothing here reads weights.
"""

import json
import math
import re
import statistics
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ..common.colors import BLUE, GREEN, PINK, SKY, VERMILION
from ..common.console import check_installed
from ..configuration_hyperdflash import TESTED_TRANSFORMERS, HyperDFlashConfig
from .run_folder import COMMAND_FILE, Run, without_folders

PICTURE_FILE = "training.png"
TAGS = ["speculative-decoding", "deepseek-v4", "dflash", "hyperdflash"]


# Settings that only say where a run happened and what it was called; the table of settings leaves them out.
PLACES = (
    "eval_data",
    "features_dir",
    "features_server",
    "hub_model_id",
    "hub_token",
    "keep_features",
    "on_missing",
    "output_dir",
    "project",
    "resume_from_checkpoint",
    "run_name",
    "target",
    "target_revision",
    "trackio_space_id",
    "train_data",
)

LENGTH = "acceptance length"
LABELS = {
    "loss": {"loss": "loss", "ce": "CE", "kl": "KL", "eval_loss": "loss, evaluation"},
    LENGTH: {
        "expected_acceptance_length": "expected",
        "eval_expected_acceptance_length": "expected, evaluation",
        "eval_acceptance_length": "real decoding",
    },
}
# Slots from dark to light.
COLORS = {
    "loss": BLUE,
    "ce": SKY,
    "kl": PINK,
    "eval_loss": VERMILION,
    "expected_acceptance_length": BLUE,
    "eval_expected_acceptance_length": VERMILION,
    "eval_acceptance_length": GREEN,
}
SLOT_COLORS = ("#440154", "#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#c8b100")
MAX_POINTS = 400  # about as many as a panel has pixels

# name of a figure in the log -> what it means
MEANINGS = {
    "loss": "cross-entropy + alpha x KL, training, the last logged step",
    "eval_loss": "cross-entropy + alpha x KL, evaluation data",
    "eval_ce": "weighted cross-entropy of the slots against the text, nats",
    "eval_kl": "KL divergence from the target's distribution on the first slots, nats",
    "eval_expected_acceptance_length": "1 + the rates in the table's last row: tokens per round, the target's own "
    "included, if the target wrote exactly the evaluation data. Fixed anchors, no decoding",
    "eval_acceptance_length": "real greedy decoding{prompts}: tokens per round, the target's own included (tau)",
}


# ------------------------------------------------------------------------------------------------------------ the card


def has_picture(run: Run) -> bool:
    """Whether the run's log has anything to draw."""
    return bool(_panels(run.history))


def write_card(folder: Path, config: HyperDFlashConfig, num_parameters: int, run: Run) -> None:
    """Write `README.md`, `training.png` (when there is a log) and `command.txt` (when known) into `folder`."""
    if has_picture(run):
        draw_history(folder / PICTURE_FILE, run.history, exported_step=run.state and run.state["global_step"])
    if run.command is not None:
        (folder / COMMAND_FILE).write_text(run.command, encoding="utf-8")
    data = ModelCardData(
        library_name="transformers",
        license="apache-2.0",
        tags=TAGS,
        base_model=config.target_name_or_path if _is_hub_id(config) else None,
    )
    card = ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("templates") / "model_card.md"),
        config=config,
        num_parameters=num_parameters,
        run=run,
        tested=TESTED_TRANSFORMERS,
        has_picture=has_picture(run),
        without_folders=without_folders,
        revision_of=lambda revision: f"revision `{revision}`" if revision else "revision not recorded",
        **_use(config),
        **_data(config, run),
        **_figures(run),
        progress=_progress(run),
        settings=_settings(run),
    )
    text = re.sub("\n{3,}", "\n\n", card.content)  # of conditions that put nothing between two paragraphs
    (folder / "README.md").write_text(text.strip() + "\n", encoding="utf-8")


def _is_hub_id(config: HyperDFlashConfig) -> bool:
    # `init` stores a local target as its folder's own name, which has no slash.
    return "/" in (config.target_name_or_path or "")


def _use(config: HyperDFlashConfig) -> dict:
    """What the snippet needs to run, and to encode as in training."""
    target = config.target_name_or_path or "a DeepSeek-V4"
    encoding, options = config.encoding or {}, ""
    # Only what differs from the encoding's defaults, so that the snippet stays short
    if encoding.get("modes") == ["thinking"]:
        options += 'mode="thinking", '
    if encoding.get("generation", "preview") != "preview":
        options += f'generation="{encoding["generation"]}", '
    return {
        "target": target,
        "target_name": target if _is_hub_id(config) else f"<the folder of {target}>",
        "revision": f', revision="{config.target_revision}"' if config.target_revision else "",
        "encoding": options,
        "encoding_note": f" Its configuration records the encoding `{json.dumps(encoding)}`." if encoding else "",
    }


def _data(config: HyperDFlashConfig, run: Run) -> dict:
    """Target and data as the trainer saw them (`run.json`)."""
    facts = run.facts
    if facts is None:
        return {"facts": None}
    name = without_folders(facts["target"])
    # Two files without a hash are not the same data
    hashes = [{f["sha256"] for f in facts[key] or []} - {None} for key in ("train_data", "eval_data")]
    made_for = config.target_name_or_path
    return {
        "facts": facts,
        "facts_target": name,
        "made_for": made_for if made_for not in (None, name, Path(name).name) else None,
        "shared_data": bool(hashes[0] & hashes[1]),
    }


# ------------------------------------------------------------------------------------------------------------- figures


def _figures(run: Run) -> dict:
    """Figures of the exported checkpoint, each with its meaning, and the table of slots 1..K-1."""
    log = run.state["log_history"] if run.state else []
    evaluation = next((entry for entry in reversed(log) if "eval_loss" in entry), {})
    loss = next((entry["loss"] for entry in reversed(log) if "loss" in entry), None)
    # The figures of these weights: the last logged loss, then the last evaluation
    found = evaluation if loss is None else {"loss": loss, **evaluation}
    num_prompts = (run.recipe or {}).get("eval_decode_prompts")
    prompts = f" of {num_prompts} prompts of the evaluation data" if num_prompts else ""
    figures = [
        (f"`{name}`", _number(found[name]), meaning.format(prompts=prompts))
        for name, meaning in MEANINGS.items()
        if name in found
    ]
    slots = sorted(_slot(name) for name in evaluation if re.fullmatch(r"eval_slot_accuracy_\d+", name))
    rows = [("slot", *slots)] if slots else []
    for title, name in (("right", "eval_slot_accuracy"), ("right, and all before it", "eval_acceptance_rate")):
        rows += [(title, *(_number(evaluation[f"{name}_{k}"]) for k in slots))] if slots else []
    return {"evaluation": evaluation, "figures": figures, "slots": rows}


def _number(value: float) -> str:
    return f"{value:.4g}"


# ------------------------------------------------------------------------------------------------------------ training


def _progress(run: Run) -> list[str]:
    """Sentences: which step of the run the weights are, and how many parameters were trained."""
    text = []
    if run.state is not None:
        state, name = run.state, f"checkpoint-{run.state['global_step']}"
        steps = f" of {state['max_steps']}" if state.get("max_steps") else ""
        epochs = f", {state['epoch']:.4g} epochs" if state.get("epoch") is not None else ""
        # By name: the run may have been moved since
        best = Path(state.get("best_model_checkpoint") or "").name == name
        metric = (run.recipe or {}).get("metric_for_best_model")
        by = f"; the run's best by `{metric}`" if metric else "; the run's best"
        text.append(f"Step {state['global_step']}{steps}{epochs}{by if best else ''}.")
        speeds = [entry["tokens_per_second"] for entry in state["log_history"] if "tokens_per_second" in entry]
        text += [f"Median speed: {statistics.median(speeds):,.0f} tokens/s."] if speeds else []
    if run.facts is not None:
        trained, parameters = run.facts["num_trainable_parameters"], run.facts["num_parameters"]
        text.append(f"Trained: {trained:,} of {parameters:,} parameters.")
        text += [] if run.facts["finished"] else ["The run had not finished when this was exported."]
    return text + (["The weights were merged from a LoRA adapter."] if run.adapter else [])


def _settings(run: Run) -> list[tuple[str, str]]:
    """Rows of the table of settings."""
    settings = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in (run.recipe or {}).items()
        if name not in PLACES and not name.endswith("_token")
    }
    # A bar or a line break would end a cell of a Markdown table
    cells = {name: without_folders(text).replace("|", "\\|").replace("\n", " ") for name, text in settings.items()}
    return [(f"`{name}`", f"`{text}`") for name, text in cells.items()]


# ------------------------------------------------------------------------------------------------------------ pictures


def check_matplotlib() -> None:
    """Raises `ImportError` with pip's command. A trainer asks before its first step, not after its last."""
    check_installed("matplotlib", "the picture of the model card")


def draw_history(path: Path, history: list[dict], *, exported_step: int | None = None) -> None:
    """Draw loss, acceptance length and acceptance by slot of a `log_history` over steps, as a PNG."""
    from matplotlib.figure import Figure  # without pyplot: no global state, and Agg whatever the machine has

    panels = _panels(history)
    figure = Figure(figsize=(4.4 * len(panels), 4), dpi=110, layout="constrained")
    for i, (title, lines) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), i + 1, title=title, xlabel="step")
        _draw_lines(axes, lines)
        if exported_step is not None:
            axes.axvline(exported_step, color="0.5", linewidth=0.9, linestyle="--", label="these weights")
        # Every round yields the target's own token at least
        axes.set_ylim(bottom=1 if title == LENGTH else 0)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small", frameon=False)
    # Without matplotlib's version in it, the same log gives the same file
    figure.savefig(path, format="png", metadata={"Software": None})


def _panels(history: list[dict]) -> dict[str, list]:
    """Title -> lines (name, label, steps, values) for everything that the log has."""
    names = {name for entry in history for name in entry}
    rates = sorted((name for name in names if re.fullmatch(r"eval_acceptance_rate_\d+", name)), key=_slot)
    wanted = {**LABELS, "acceptance by slot, evaluation": {name: f"slot {_slot(name)}" for name in rates}}
    panels = {t: [(n, label, *_series(history, n)) for n, label in labels.items()] for t, labels in wanted.items()}
    return {title: lines for title, panel in panels.items() if (lines := [line for line in panel if line[2]])}


def _draw_lines(axes, lines: list) -> None:
    for i, (name, label, steps, values) in enumerate(lines):
        color = COLORS[name] if name in COLORS else SLOT_COLORS[i % len(SLOT_COLORS)]
        marker = "o" if name.startswith("eval_") else None
        axes.plot(steps, values, label=label, color=color, marker=marker, markersize=3.5, linewidth=1.2)


def _slot(name: str) -> int:
    return int(name.rsplit("_", 1)[1])


def _series(history: list[dict], name: str) -> tuple[list, list]:
    """Steps and values of one figure; of a long run, the means of `MAX_POINTS` equal stretches."""
    # matplotlib would break a line at a NaN, and a picture of 20,000 points is large
    points = [(entry["step"], entry[name]) for entry in history if name in entry and math.isfinite(entry[name])]
    stretch = max(1, -(-len(points) // MAX_POINTS))
    means = [
        tuple(map(statistics.fmean, zip(*points[i : i + stretch], strict=True)))
        for i in range(0, len(points), stretch)
    ]
    return [step for step, _ in means], [value for _, value in means]
