"""The model card of a trained drafter, and its pictures: written from the files of its run, and from nothing else.

    hyperdflash export run my-drafter    # writes my-drafter/README.md and my-drafter/training.png with the weights

A run's folder holds `run.json` (target, data, versions), `recipe.yaml` (settings),
`command.txt`, and in every checkpoint transformers' `trainer_state.json` (the log). What is not there is said to be
missing. Nothing here reads weights.
"""

import json
import math
import re
import statistics
from pathlib import Path

from huggingface_hub import ModelCardData

from ..common.colors import BLUE, GREEN, PINK, SKY, VERMILION
from ..common.console import check_installed
from ..configuration_hyperdflash import HyperDFlashConfig
from .run_folder import COMMAND_FILE, STATE_FILE, Run

PICTURE_FILE = "training.png"
TAGS = ["speculative-decoding", "deepseek-v4", "dflash", "hyperdflash"]


# Where a run happened and what it was called: no setting that another run would repeat, and no business of a reader's.
PLACES = (
    "eval_data",
    "features_dir",
    "hub_model_id",
    "hub_token",
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
MAX_POINTS = 400

# name of a figure in the log -> what it means
MEANINGS = {
    "loss": "cross-entropy + alpha x KL, training, the last logged step",
    "eval_loss": "cross-entropy + alpha x KL, evaluation data",
    "eval_ce": "weighted cross-entropy of the slots against the text, nats",
    "eval_kl": "KL divergence from the target's distribution on the first slots, nats",
    "eval_expected_acceptance_length": "1 + the rates in the table's last row: tokens a round, the target's own "
    "included, if the target said what the evaluation data says. Fixed anchors, no decoding",
    "eval_acceptance_length": "real greedy decoding{prompts}: tokens a round, the target's own included (tau)",
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
    sections = [_head(config, num_parameters), _use(config)]
    if run.is_known():
        sections += [_data(config, run), _figures(config, run), _training(run)]
    else:
        sections.append(
            "## Training\n\nNothing is known about how these weights were trained: they were exported from a folder "
            "that belongs to no training run." + _encoding_of(config)
        )
    sections.append(
        "## License\n\nThe code in this folder is Apache-2.0, and so are the weights as far as this tool can tell: "
        "change `license` above if your target's or your data's licence asks for another."
    )
    (folder / "README.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _target(config: HyperDFlashConfig) -> str:
    return config.target_name_or_path or "a DeepSeek-V4"


def _is_hub_id(config: HyperDFlashConfig) -> bool:
    # `init` stores a local target as its folder's own name, which has no slash.
    return "/" in (config.target_name_or_path or "")


def _head(config: HyperDFlashConfig, num_parameters: int) -> str:
    data = ModelCardData(
        library_name="transformers",
        license="apache-2.0",
        tags=TAGS,
        base_model=config.target_name_or_path if _is_hub_id(config) else None,
    )
    source = "final residual" if config.context_source == "pre_hc_head" else "hidden states"
    gate = ", its gate in fp32" if config.reducer == "hc_gate" else ""
    return (
        f"---\n{data.to_yaml()}\n---\n\n# HyperDFlash drafter for {_target(config)}\n\n"
        f"One pass of this drafter drafts {config.block_size - 1} tokens from the target's own {source}; the target "
        "checks them in one forward. Greedy decoding gives the ids of plain decoding, up to floating-point ties, and "
        "sampling keeps the target's distribution.\n\n"
        f"{num_parameters:,} parameters in bf16{gate}: {config.num_hidden_layers} layers, reducer "
        f"`{config.reducer}`, context `{config.context_source}`{_heads(config)}. Embedding and LM head are "
        "the target's and are not stored here. An independent implementation of HyperDFlash (arXiv 2606.26744)."
    )


def _heads(config: HyperDFlashConfig) -> str:
    """The heads beyond the paper."""
    head = "" if config.draft_head == "none" else f", head `{config.draft_head}` of rank {config.markov_rank}"
    return head + (", confidence head" if config.draft_confidence else "")


def _use(config: HyperDFlashConfig) -> str:
    target = config.target_name_or_path if _is_hub_id(config) else f"<the folder of {_target(config)}>"
    revision = f', revision="{config.target_revision}"' if config.target_revision else ""
    return f"""## Use

```python
from transformers import AutoModel, AutoModelForCausalLM

drafter = AutoModel.from_pretrained("<this repository or folder>", trust_remote_code=True)
target = AutoModelForCausalLM.from_pretrained("{target}"{revision}, device_map="auto")
out = target.generate(**inputs, assistant_model=drafter)  # batch size 1; out has plain decoding's ids
```

The folder carries its code and needs torch and transformers alone. Pin what you trust from the Hub: `revision=`."""


def _encoding_of(config: HyperDFlashConfig) -> str:
    return f" Its configuration says the encoding `{json.dumps(config.encoding)}`." if config.encoding else ""


def _data(config: HyperDFlashConfig, run: Run) -> str:
    """Target and data; `run.json` is what the trainer saw."""
    facts = run.facts
    if facts is None:
        return (
            f"## Target and data\n\n- Target: `{_target(config)}`, {_revision(config.target_revision)}\n"
            "- Data and chat encoding: not known, the run's `run.json` is missing." + _encoding_of(config)
        )
    name = _place(facts["target"])
    lines = [f"- Target: `{name}`, {_revision(facts['target_revision'])}"]
    if config.target_name_or_path not in (None, name, Path(name).name):
        lines.append(f"- The drafter was made for `{_target(config)}`, {_revision(config.target_revision)}")
    lines.append(
        f"- Chat encoding: generation `{facts['generation']}`, mode `{facts['mode']}`, effort "
        f"`{facts['effort'] or 'none'}`; rows may bring their own"
    )
    for title, key in (("Training data", "train_data"), ("Evaluation data", "eval_data")):
        files = facts[key] or []
        lines.append(f"- {title}:" if files else f"- {title}: none")
        lines += [f"  - `{_place(f['file'])}`" + (f", sha256 `{f['sha256']}`" if f["sha256"] else "") for f in files]
    hashes = [{f["sha256"] for f in facts[key] or []} - {None} for key in ("train_data", "eval_data")]
    if hashes[0] & hashes[1]:
        lines.append("- Training and evaluation share a file: the evaluation's figures are of texts it was trained on")
    lines += [f"- {line}" for line in facts["data_report"] or []]
    if before := facts.get("init_from"):
        files = ", ".join(f"`{_place(f['file'])}`" for f in before["train_data"] or [])
        known = f"{before['num_samples']:,} samples of {files}" if files else "data not known"
        lines.append(f"- Before that: training started from the weights of `{_place(before['name'])}` ({known})")
    return "## Target and data\n\n" + "\n".join(lines)


def _revision(revision: str | None) -> str:
    return f"revision `{revision}`" if revision else "revision not recorded"


def _place(place: str) -> str:
    """Of an absolute path, the name alone: the folders of somebody's machine say nothing to a reader."""
    return Path(place).name if Path(place).is_absolute() else place


# ------------------------------------------------------------------------------------------------------------- figures


def _figures(config: HyperDFlashConfig, run: Run) -> str:
    """Figures of the exported checkpoint, each with its meaning."""
    picture = [f"![loss, acceptance length and acceptance by slot over the run's steps]({PICTURE_FILE})"]
    if run.state is None:
        parts = [f"## Figures\n\nOf these weights not known: the exported folder has no `{STATE_FILE}`."]
    else:
        log = run.state["log_history"]
        evaluation = next((entry for entry in reversed(log) if "eval_loss" in entry), {})
        when = f" (evaluated at step {evaluation['step']})" if evaluation else ""
        parts = [
            f"## Figures\n\nAt step {run.state['global_step']}{when}, of the weights in fp32; here they are rounded "
            "to bf16."
        ]
        parts += _meanings({**_last(log, "loss"), **evaluation}, (run.recipe or {}).get("eval_decode_prompts"))
        parts += _slots(config, evaluation)
        if not evaluation:
            parts.append("This run had evaluated nothing yet, or was not told to.")
        elif "eval_acceptance_length" not in evaluation:
            parts.append("Acceptance in real decoding was not measured in this run.")
    return "\n\n".join(parts + (picture if has_picture(run) else []))


def _meanings(figures: dict, num_prompts: int | None) -> list[str]:
    """The table of figures that the log has."""
    prompts = f" of {num_prompts} prompts of the evaluation data" if num_prompts else ""
    rows = [
        f"| `{name}` | {_number(figures[name])} | {meaning.format(prompts=prompts)} |"
        for name, meaning in MEANINGS.items()
        if name in figures
    ]
    return ["\n".join(["| figure | value | what it is |", "|---|---|---|", *rows])] if rows else []


def _last(log: list[dict], name: str) -> dict:
    return next(({name: entry[name]} for entry in reversed(log) if name in entry), {})


def _slots(config: HyperDFlashConfig, evaluation: dict) -> list[str]:
    """The table of slots 1..K-1, when the log has them."""
    slots = sorted(int(name.rsplit("_", 1)[1]) for name in evaluation if re.fullmatch(r"eval_slot_accuracy_\d+", name))
    if not slots:
        return []
    rows = [f"| slot | {' | '.join(map(str, slots))} |", "|---" * (len(slots) + 1) + "|"]
    for title, name in (("right", "eval_slot_accuracy"), ("right, and all before it", "eval_acceptance_rate")):
        cells = [_number(evaluation[f"{name}_{k}"]) for k in slots]
        rows.append(f"| {title} | {' | '.join(cells)} |")
    given = "" if config.draft_head == "none" else ", given the text's token before it"
    return [
        f"Share of the evaluation's anchors at which a slot's first choice is the text's token{given}:\n\n"
        + "\n".join(rows)
    ]


def _number(value: float) -> str:
    return f"{value:.4g}"


# ------------------------------------------------------------------------------------------------------------ training


def _training(run: Run) -> str:
    parts = ["## Training", *_progress(run), _settings(run)]
    if run.command is None:
        parts.append(f"The command is not known: the run's `{COMMAND_FILE}` is missing.")
    else:
        parts.append(f"The command (`{COMMAND_FILE}`):\n\n```\n{run.command.strip()}\n```")
    versions = (run.facts or {}).get("versions")
    text = ", ".join(f"{name} {version}" for name, version in versions.items()) if versions else "not recorded"
    return "\n\n".join([*parts, f"Versions: {text}."])


def _progress(run: Run) -> list[str]:
    """Which step of the run the weights are, and how many parameters were trained."""
    text = []
    if run.state is not None:
        state, name = run.state, f"checkpoint-{run.state['global_step']}"
        steps = f" of {state['max_steps']}" if state.get("max_steps") else ""
        epochs = f", {state['epoch']:.4g} epochs" if state.get("epoch") is not None else ""
        best = Path(state.get("best_model_checkpoint") or "").name == name
        metric = (run.recipe or {}).get("metric_for_best_model")
        by = f"; the run's best by `{metric}`" if metric else "; the run's best"
        text.append(f"Step {state['global_step']}{steps}{epochs}{by if best else ''}.")
        speeds = [entry["tokens_per_second"] for entry in state["log_history"] if "tokens_per_second" in entry]
        text += [f"Median speed: {statistics.median(speeds):,.0f} tokens/s."] if speeds else []
    if run.facts is not None:
        text.append(
            f"Trained: {run.facts['num_trainable_parameters']:,} of {run.facts['num_parameters']:,} parameters."
        )
        text += [] if run.facts["finished"] else ["The run had not finished when this was exported."]
    text += ["The weights were merged from a LoRA adapter."] if run.adapter else []
    return [" ".join(text)] if text else []


def _settings(run: Run) -> str:
    if run.recipe is None:
        return "The settings are not known: the run's `recipe.yaml` is missing."
    settings = {
        name: value for name, value in run.recipe.items() if name not in PLACES and not name.endswith("_token")
    }
    rows = [f"| `{name}` | `{_cell(name, value)}` |" for name, value in settings.items()]
    return "Settings:\n\n| setting | value |\n|---|---|\n" + "\n".join(rows)


def _cell(name: str, value) -> str:
    text = _place(value) if name in ("init_from", "resume_from_checkpoint") and isinstance(value, str) else value
    return (text if isinstance(text, str) else json.dumps(text)).replace("|", "\\|").replace("\n", " ")


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
        axes.set_ylim(bottom=1 if title == LENGTH else 0)
        axes.grid(alpha=0.25)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, fontsize="small", frameon=False)
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
    points = [(entry["step"], entry[name]) for entry in history if name in entry and math.isfinite(entry[name])]
    stretch = max(1, -(-len(points) // MAX_POINTS))
    means = [
        tuple(map(statistics.fmean, zip(*points[i : i + stretch], strict=True)))
        for i in range(0, len(points), stretch)
    ]
    return [step for step, _ in means], [value for _, value in means]
