"""Train all drafters that the documents compare, one after the other: `make tiny-baselines`. Resumable.

    python examples/tiny/evidence/baselines.py                       # all runs: hours; resumes after a stop
    python examples/tiny/evidence/baselines.py --only dflash-42      # one of them, or a group

All runs of a group have the same text and number of steps, from `training/recipes/tiny_headline.yaml`: the headline
methods and the heads beyond the paper have three seeds and the whole budget, the ablations one seed and a fifth of it.
Weights go to `build/baselines/NAME/final`; a finished run adds a line to `docs/results/training.jsonl`.
"""

import argparse
import json
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from evidence import TRAINING_FILE, read_training  # beside this file
from torch.utils.flop_counter import FlopCounterMode

from hyperdflash.common.checkpoint import TargetCheckpoint
from hyperdflash.common.files import write_atomically, written_whole
from hyperdflash.training.arguments import load_recipe
from hyperdflash.training.dataset import collate
from hyperdflash.training.features import read_drafter_config
from hyperdflash.training.init import new_drafter
from hyperdflash.training.run_folder import list_checkpoints, read_state
from hyperdflash.training.target import TargetHead
from hyperdflash.training.train import make_trainer, prepare

ROOT = Path(__file__).resolve().parents[3]
BUILD = Path("examples/tiny/build")  # relative to the root, where commands are run
RECIPE = "training/recipes/tiny_headline.yaml"
RANDOM_GATE = BUILD / "baselines" / "random-gate-init"
ABLATION_STEPS = 844
SEEDS = (42, 43, 44)
NOT_CURVES = ("eval_strategy=no",)  # learning curves are drawn of one seed only


@dataclass
class Run:
    """One training run.

    Attributes:
        group: `headline`, `ablations`, `seeds`, `texts` or `heads`.
        drafter: options of the drafter that differ from the recipe's.
        settings: other `key=value` of the recipe.
        what: what it is there to show.
    """

    name: str
    group: str
    what: str
    drafter: dict = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    seed: int = SEEDS[0]

    @property
    def output(self) -> Path:
        return BUILD / "baselines" / self.name

    @property
    def is_mtp(self) -> bool:
        return self.name.startswith("mtp")

    @property
    def drafter_options(self) -> dict:
        return load_recipe(RECIPE).drafter | self.drafter

    @property
    def method(self) -> str:
        """As `hyperdflash benchmark --methods` takes it."""
        drafter = self.drafter_options
        kind = {"hidden_layers": "dflash", "fc": "fc", "mean": "mean"}
        name = kind.get(drafter.get("context_source"), kind.get(drafter.get("reducer"), "hyperdflash"))
        if drafter.get("draft_head") == "markov":
            name = "dspark-like" if name == "dflash" else f"{name}+markov"
        return f"{name}:{drafter['block_size'] - 1}={self.output / 'final'}"

    def overrides(self) -> list[str]:
        if self.is_mtp:
            return list(self.settings)
        from_weights = any(setting.startswith("init_from=") for setting in self.settings)
        drafter = {} if from_weights else self.drafter_options  # sizes come with the weights
        return [f"output_dir={self.output}", f"seed={self.seed}", f"drafter={json.dumps(drafter)}", *self.settings]

    def command(self) -> list[str]:
        if self.is_mtp:
            return ["examples/tiny/evidence/train_mtp.py", "--seed", str(self.seed), *self.overrides()]
        return ["-m", "hyperdflash", "train", RECIPE, *self.overrides(), "resume_from_checkpoint=true"]


HIDDEN = {"context_source": "hidden_layers", "reducer": "fc"}
SAME_LAYERS = {**HIDDEN, "target_layer_ids": [1, 2, 3]}  # the layers that four would read, for drafters with fewer
HIDDEN_FEATURES = f"features_dir={BUILD / 'features-hidden-layers'}"
LAST_FEATURES = f"features_dir={BUILD / 'features-last-layers'}"
MARKOV = {"draft_head": "markov", "markov_rank": 64}
METHODS = {
    "hyperdflash": ("the method: gated reducer, KL on two slots", {}, ()),
    "mtp": ("the target's own MTP module, trained further on the target's text", {}, ()),
    "dflash": (
        "vanilla DFlash: intermediate layers, dense projection, no KL",
        HIDDEN,
        ("kl_alpha=0", HIDDEN_FEATURES),
    ),
    "mean": ("HyperDFlash with the average of the paths", {"reducer": "mean"}, ()),
    "fc": ("HyperDFlash with a dense projection of the paths", {"reducer": "fc"}, ()),
}
ABLATIONS = {
    "base": ("the method", {}, ()),
    "kl-off": ("without KL", {}, ("kl_alpha=0",)),
    "kl-hc-head": ("KL to the target's exact distribution", {}, ("kl_teacher=hc_head",)),
    "gate-random": ("gate at random instead of the target's", {}, (f"init_from={RANDOM_GATE}",)),
    "no-path-norm": ("without the norm of each path", {"reducer_path_norm": False}, ()),
    "mean": ("average of the paths", {"reducer": "mean"}, ()),
    "fc": ("dense projection of the paths", {"reducer": "fc"}, ()),
    "hidden-layers": ("intermediate layers, dense projection", HIDDEN, (HIDDEN_FEATURES,)),
    "dflash": ("the same without KL: vanilla DFlash", HIDDEN, ("kl_alpha=0", HIDDEN_FEATURES)),
    "dflash-last-layers": (
        "vanilla DFlash that reads the last three layers",
        {**HIDDEN, "target_layer_ids": [3, 4, 5]},
        ("kl_alpha=0", LAST_FEATURES),
    ),
    "first-layer": (
        "the target's first layer alone: nearly the embeddings",
        {**HIDDEN, "target_layer_ids": [0]},
        (f"features_dir={BUILD / 'features-first-layer'}",),
    ),
    "kl-1-slot": ("KL on one slot", {}, ("kl_num_slots=1",)),
    "kl-6-slots": ("KL on all six slots", {}, ("kl_num_slots=6",)),
    "gamma-0": ("all slots weigh alike", {}, ("gamma=0",)),
    "gamma-2": ("slot weights decay twice as fast", {}, ("gamma=2",)),
    "layers-1": ("one layer", {"num_hidden_layers": 1}, ()),
    "layers-1-hidden": (
        "one layer; intermediate layers, dense projection",
        {"num_hidden_layers": 1, **SAME_LAYERS},
        (HIDDEN_FEATURES,),
    ),
    "layers-2": ("two layers", {"num_hidden_layers": 2}, ()),
    "layers-2-hidden": (
        "two layers; intermediate layers, dense projection",
        {"num_hidden_layers": 2, **SAME_LAYERS},
        (HIDDEN_FEATURES,),
    ),
    "block-4": ("three drafts", {"block_size": 4}, ()),
    "block-10": ("nine drafts", {"block_size": 10}, ()),
}
SAMPLED = (
    f'train_data=["{BUILD}/texts/sampled-*.jsonl"]',
    f"features_dir={BUILD / 'features-sampled'}",
    f"max_steps={ABLATION_STEPS}",
    *NOT_CURVES,
)
HEADS = {
    "markov": (
        "HyperDFlash with a Markov head, and a confidence head, which gives its layers no gradient",
        {**MARKOV, "draft_confidence": True},
        (),
    ),
    "dspark-like": (
        "mean of the paths of the last three layers, dense projection, with a Markov head",
        {**HIDDEN, "target_layer_ids": [3, 4, 5], **MARKOV},
        (LAST_FEATURES,),
    ),
    "mean-markov": ("average of the final paths, with a Markov head", {"reducer": "mean", **MARKOV}, ()),
}


def runs() -> list[Run]:
    """All runs in order."""
    ablations = []
    for name, (what, drafter, settings) in ABLATIONS.items():
        settings = (*settings, f"max_steps={ABLATION_STEPS}", *NOT_CURVES)
        ablations.append(Run(f"ablation-{name}", "ablations", what, drafter, settings))
    for seed in SEEDS[1:]:  # of two ablations, to see what a difference between two of them means
        for name in ("base", "dflash"):
            what, drafter, settings = ABLATIONS[name]
            settings = (*settings, f"max_steps={ABLATION_STEPS}", *NOT_CURVES)
            ablations.append(Run(f"ablation-{name}-{seed}", "seeds", what, drafter, settings, seed))
    sampled = Run("texts-sampled", "texts", "trained on answers sampled at temperature 1 alone", {}, SAMPLED)
    return [*_with_seeds("headline", METHODS), *ablations, sampled, *_with_seeds("heads", HEADS)]


def _with_seeds(group: str, methods: dict) -> list[Run]:
    out = []
    for seed in SEEDS:
        for name, (what, drafter, settings) in methods.items():
            if name == "fc" and seed != SEEDS[0]:
                continue
            settings = settings if seed == SEEDS[0] else (*settings, *NOT_CURVES)
            out.append(Run(f"{name}-{seed}", group, what, drafter, settings, seed))
    return out


def train(run: Run) -> None:
    """Make what the run needs, then run its command. Raises `CalledProcessError`."""
    if any(setting.startswith("features_dir=") for setting in run.settings):
        features = ["-m", "hyperdflash", "features", RECIPE, *run.overrides()]
        subprocess.run([sys.executable, *features], cwd=ROOT, check=True)
    if f"init_from={RANDOM_GATE}" in run.settings and not (ROOT / RANDOM_GATE).exists():
        write_random_gate()
    subprocess.run([sys.executable, *run.command()], cwd=ROOT, check=True)


def write_random_gate() -> None:
    """A new drafter with a random gate instead of the target's."""
    args = load_recipe(RECIPE)
    head = TargetHead.from_checkpoint(TargetCheckpoint(args.target), args.target_dtype)
    drafter = new_drafter(read_drafter_config(args), head.identity(), seed=SEEDS[0])  # the base run's
    torch.manual_seed(0)
    drafter._init_weights(drafter.reducer)
    with written_whole(RANDOM_GATE) as folder:
        drafter.save_pretrained(folder)


def summarize(run: Run) -> None:
    """Record the run's settings, budget and learning curve."""
    state = read_state(list_checkpoints(ROOT / run.output)[-1])
    parameters, flops, tokens_an_epoch = costs(run, load_recipe(RECIPE, run.overrides()))
    steps = state["global_step"]
    tokens = round(tokens_an_epoch * state["epoch"])
    names = ("eval_acceptance_length", "eval_expected_acceptance_length", "eval_ce", "eval_kl")
    curve = [
        {"step": entry["step"], "tokens": round(tokens * entry["step"] / steps)}
        | {name.removeprefix("eval_"): entry[name] for name in names if name in entry}
        for entry in state["log_history"]
        if "eval_acceptance_length" in entry
    ]
    summary = {
        "name": run.name,
        "what": run.what,
        "command": shlex.join(["python", *run.command()]),
        "seed": run.seed,
        "steps": steps,
        "tokens": tokens,
        "parameters": parameters,
        "flops_per_token": round(flops),
        "curve": curve,
    }
    write_summary(summary)
    print(f"{run.name}: {tokens:,} tokens, {flops / 1e6:.1f} MFLOP per token", flush=True)


def write_summary(summary: dict) -> None:
    """Add a run to the file, or replace an earlier one of the same name; one run per line, sorted by name."""
    summaries = {**read_training(), summary["name"]: summary}
    text = "".join(json.dumps(summaries[name]) + "\n" for name in sorted(summaries))
    write_atomically(TRAINING_FILE, text.encode())


def costs(run: Run, args) -> tuple[int, float, int]:
    """Parameters, FLOP per token of forward and backward (matrix products, sixteen texts), tokens per epoch."""
    from train_mtp import load_module, mtp_loss  # beside this file

    parts = prepare(args)
    batch = collate([parts.train_dataset[i] for i in range(0, 1600, 100)])
    with FlopCounterMode(display=False) as counter:
        if run.is_mtp:
            model = load_module(args.target, parts.features.head.config)
            mtp_loss(model, parts.features, batch).backward()
        else:
            model, trainer = parts.drafter, make_trainer(args, parts)
            trainer.compute_loss(model, trainer._add_blocks(batch, 0)).backward()
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, counter.get_total_flops() / int(batch["lengths"].sum()), sum(parts.train_dataset.rows["length"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {name for run in runs() for name in (run.name, run.group)}
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"runs or groups of {', '.join(sorted(names))}")
    parser.add_argument("--methods", action="store_true", help="print the ablations as methods of a benchmark")
    args = parser.parse_args()
    if args.methods:
        print(*(run.method for run in runs() if run.group == "ablations"))
        return
    chosen = [run for run in runs() if not args.only or {run.name, run.group} & set(args.only)]
    if unknown := set(args.only or ()) - names:
        parser.error(f"no run named {', '.join(sorted(unknown))}")
    torch.set_num_threads(1)
    failed, summaries = [], read_training()
    for run in chosen:
        if run.name in summaries and (ROOT / run.output / "final").exists():
            print(f"{run.name}: done", flush=True)
            continue
        print(f"{run.name}: {run.what}", flush=True)
        try:
            train(run)
        except subprocess.CalledProcessError as error:
            print(f"{run.name} failed: {shlex.join(error.cmd)}", file=sys.stderr, flush=True)
            failed.append(run.name)
        else:
            summarize(run)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
