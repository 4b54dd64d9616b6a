"""What a run's folder holds: written when training starts, compared when it is resumed, read for the model card.

`run.json` (target, data, versions), `recipe.yaml` (settings), `command.txt`, the Trainer's checkpoints with their
`trainer_state.json` (the log), and under LoRA `base/`, the drafter that the adapter belongs to.
"""

import json
import re
import shlex
import shutil
import zipfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from ..common.files import write_atomically, written_whole
from ..modeling_hyperdflash import HyperDFlashModel
from .arguments import HyperDFlashTrainingArguments, RecipeError
from .data import DataReport, read_lengths
from .target import TargetHead

if TYPE_CHECKING:  # costs a second to import
    import datasets

logger = logging.get_logger(__name__)

RUN_FILE, RECIPE_FILE, COMMAND_FILE = "run.json", "recipe.yaml", "command.txt"
STATE_FILE = "trainer_state.json"
# What the card takes from run.json.
FACTS = (
    "target",
    "target_revision",
    "train_data",
    "eval_data",
    "data_report",
    "mode",
    "effort",
    "generation",
    "num_parameters",
    "num_trainable_parameters",
    "versions",
    "finished",
)
# A run cannot change these settings when it is resumed; it can change those of RUN_LENGTH, with a warning.
FIXED = (
    *("seed", "data_seed", "train_sampling_strategy", "num_anchors", "gamma"),
    *("kl_alpha", "kl_num_slots", "kl_temperature", "kl_teacher"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    # The optimizer's state has these, and would silently win over the recipe, or not fit it at all
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("bf16", "fp16"),
)
RUN_LENGTH = ("num_train_epochs", "max_steps")
# The card shows these settings even where they are the defaults.
SHOWN = (
    *("learning_rate", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("max_length", "num_anchors", "gamma", "kl_alpha", "kl_num_slots", "kl_temperature", "kl_teacher"),
)
BASE_FOLDER = "base"  # the drafter that a run's adapter belongs to
FINAL = "final"  # the sub-folder that is published
ADAPTER_CONFIG = "adapter_config.json"


@dataclass
class Run:
    """The content of a run's files; None, or empty, for a file that does not exist.

    Attributes:
        facts (`dict`, *optional*): `run.json`.
        recipe (`dict`, *optional*): `recipe.yaml`.
        command (`str`, *optional*): `command.txt`, without access tokens and folders of the machine.
        state (`dict`, *optional*): the exported checkpoint's `trainer_state.json`.
        history (`list[dict]`): the run's whole log, also past a checkpoint that is not the last.
        adapter (`bool`): whether the weights were merged from a LoRA adapter.
    """

    facts: dict | None = None
    recipe: dict | None = None
    command: str | None = None
    state: dict | None = None
    history: list[dict] = field(default_factory=list)
    adapter: bool = False

    def is_known(self) -> bool:
        """Whether anything is known about the training."""
        return any(part is not None for part in (self.facts, self.recipe, self.command, self.state))


def read_run(checkpoint: Path, run_dir: Path | None) -> Run:
    """Read the files of a checkpoint's run that exist. Raises `ValueError` naming a file that cannot be parsed."""
    state = read_state(checkpoint)
    own = state["log_history"] if state else []
    folders = [run_dir, *list_checkpoints(run_dir)] if run_dir is not None else []
    logs = [other["log_history"] for path in folders if (other := read_state(path)) is not None]
    folder = run_dir if run_dir is not None else checkpoint
    command = _read(folder / COMMAND_FILE, str)
    return Run(
        facts=_read(folder / RUN_FILE, _mapping(json.loads, *FACTS)),
        recipe=_read(folder / RECIPE_FILE, _mapping(yaml.safe_load)),
        command=command and public_command(command),
        state=state,
        # Only a log that continues this checkpoint's: the folder may hold remains of another run.
        history=max([own, *(log for log in logs if log[: len(own)] == own)], key=len),
        adapter=(checkpoint / ADAPTER_CONFIG).is_file(),
    )


def public_command(command: str) -> str:
    """A command without access tokens and without the folders of the machine it ran on."""
    lines = []
    for line in command.splitlines():
        try:
            lines.append(shlex.join(without_folders(word) for word in shlex.split(line)))
        except ValueError:  # edited by hand: an open quote
            lines.append(without_folders(line))
    # Access tokens of the Hub start with hf_, wherever they stand
    return re.sub(r"(token=)\S+|\bhf_\w{20,}", r"\1<removed>", "".join(line + "\n" for line in lines))


def without_folders(text: str) -> str:
    """The text with absolute paths cut down: below the working directory relative to it, elsewhere the last name."""
    text = text.replace(f"{Path.cwd()}/", "")
    # A slash after a word, a colon or < does not start a path: owner/name, https://, </think>
    return re.sub(r"(?<![\w.:/<-])~?/(?:[^/\s=,:'\"()\[\]{}`][^/=,:'\"()\[\]{}`]*/)+", "", text)


def list_checkpoints(run_dir: Path) -> list[Path]:
    """A run's checkpoints by step, complete or not."""
    folders = [path for path in run_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    # As numbers: as text, checkpoint-1000 comes before checkpoint-200
    return sorted(folders, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def choose_checkpoint(run_dir: Path) -> Path:
    """The best checkpoint by the run's metric; without one, the last complete one."""
    states = {path: state for path in list_checkpoints(run_dir) if (state := read_state(path)) is not None}
    if not states:
        raise ValueError(f"{run_dir} has no complete checkpoint: none of its checkpoint-* folders has a {STATE_FILE}")
    last = list(states)[-1]  # its state knows the best of all before it
    best = states[last].get("best_model_checkpoint")
    if best is None:
        return last
    chosen = run_dir / Path(best).name  # the run may have been moved since
    if chosen not in states:
        raise ValueError(
            f"{chosen.name}, the best checkpoint according to {last.name}, is missing from {run_dir} or incomplete: "
            f"name the one to export, for example {last}"
        )
    return chosen


def starting_weights(init_from: str) -> str:
    """Where the weights lie that a run starts from: for the folder of another run, its best or last checkpoint, which
    has them in fp32 where `final/` has them rounded to bf16. Raises `ValueError` for a run without a whole one."""
    folder = Path(init_from).expanduser()
    if not (folder / RUN_FILE).is_file():
        return init_from
    checkpoint = choose_checkpoint(folder)
    # An adapter is no drafter: merged, it is in `final/` alone
    return str(folder / FINAL if (checkpoint / ADAPTER_CONFIG).is_file() else checkpoint)


def read_state(folder: Path) -> dict | None:
    """A folder's `trainer_state.json`; None where it is missing or cut short: the Trainer writes it last."""
    try:
        state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return state if isinstance(state, dict) and {"global_step", "log_history"} <= state.keys() else None


def _read(path: Path, parse):
    if not path.is_file():
        return None
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(
            f"{path} cannot be read: {problem}. Repair it, or move it away to export without it"
        ) from error


def _mapping(parse, *required: str):
    """`parse`, for a mapping that must have these keys."""

    def parse_mapping(text: str) -> dict:
        values = parse(text)
        if not isinstance(values, dict):
            raise ValueError(f"expected a mapping, got {type(values).__name__}")
        if lacking := [name for name in required if name not in values]:
            raise ValueError(f"it lacks {', '.join(lacking)}")
        return values

    return parse_mapping


def check_run_folder(args: HyperDFlashTrainingArguments, dry_run: bool) -> None:
    """Raises `FileExistsError` for a folder in use, unless its run is to be resumed or nothing is to be written."""
    output = Path(args.output_dir)
    if output.exists() and not output.is_dir():
        raise FileExistsError(f"output_dir {output} is a file")
    resume, is_run = args.resume_from_checkpoint, (output / RUN_FILE).is_file()
    resumes = is_run and resume and (resume is True or Path(resume).resolve().is_relative_to(output.resolve()))
    # `should_save` is the first process's alone: the others may already see what it writes
    if dry_run or resumes or not args.should_save or not output.is_dir():
        pass
    elif any(not path.name.endswith(".partial") for path in output.iterdir()):  # else killed before it began
        way_out = "resume with resume_from_checkpoint=true, " if is_run else ""
        raise FileExistsError(f"output_dir {output} is not empty: {way_out}choose another, or remove it")
    if args.eval_strategy != "no" and not args.eval_data:
        raise RecipeError(f"eval_strategy {args.eval_strategy.value} needs eval_data")


def resume_point(args: HyperDFlashTrainingArguments, facts: dict) -> Path | None:
    """The checkpoint to resume from, or None. Raises `ValueError` where the run was another one, or where a file of
    the checkpoint is missing or damaged.

    Folders of checkpoints that were being written when a run was killed are removed.
    """
    resume = args.resume_from_checkpoint
    if not resume:
        return None
    if isinstance(resume, str):
        if read_state(Path(resume)) is None:
            raise FileNotFoundError(
                f"resume_from_checkpoint {resume} is not a complete checkpoint: it has no whole {STATE_FILE}"
            )
        check_unchanged(Path(resume).parent, facts)
        return check_checkpoint(Path(resume), args.world_size)
    output = Path(args.output_dir)
    check_unchanged(output, facts)
    # The state is written last: a folder without one was cut short, and nothing can be resumed from it
    complete = [folder for folder in list_checkpoints(output) if (folder / STATE_FILE).exists()]
    for folder in complete:
        # Its weights and optimizer may be whole, so this is the user's to decide
        if read_state(folder) is None:
            damage = find_damage(folder / STATE_FILE) or "is not a state of the Trainer"
            raise ValueError(
                f"{folder / STATE_FILE} {damage}. Fetch it again, or remove {folder} to resume from the checkpoint "
                "before it"
            )
    if args.should_save:
        for folder in set(list_checkpoints(output)) - set(complete):
            logger.warning(f"{folder} was not written completely: removed")
            shutil.rmtree(folder)
    if not complete:
        logger.warning(f"{output} has no complete checkpoint: starting from the beginning")
    return check_checkpoint(complete[-1], args.world_size) if complete else None


# Besides the state, exact resuming needs one file of each row; the Trainer and accelerate name them differently
CHECKPOINT_FILES = {
    "weights": ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors", "pytorch_model*"),
    "optimizer.pt": ("optimizer.pt", "optimizer.bin", "optimizer_*", "global_step*"),
    "scheduler.pt": ("scheduler.pt",),
    "rng_state.pth": ("rng_state*.pth",),
}


def check_checkpoint(checkpoint: Path, world_size: int = 1) -> Path:
    """The checkpoint; raises `ValueError` that names the file without which a run could not be resumed exactly.

    The library resumes without a missing optimizer, schedule or generator, silently on another course.
    """
    missing = [
        name for name, files in CHECKPOINT_FILES.items() if not any(any(checkpoint.glob(file)) for file in files)
    ]
    if world_size > 1:
        # Where it was saved by fewer processes, those of higher rank never had one
        ranks = {int(file.stem.removeprefix("rng_state_")) for file in checkpoint.glob("rng_state_[0-9]*.pth")}
        missing += [f"rng_state_{rank}.pth" for rank in range(max(ranks, default=0)) if rank not in ranks]
        if ranks and max(ranks) + 1 < world_size:
            logger.warning(
                f"{checkpoint} has random states of {max(ranks) + 1} processes, not of {world_size}: the others draw "
                "from new ones"
            )
    way_out = (
        f"remove {checkpoint} to resume from the one before it, or start a new run from its weights with "
        f"init_from={checkpoint}"
    )
    if len(missing) == 3 and "weights" not in missing:
        raise ValueError(
            f"{checkpoint} was saved without optimizer and schedule (save_only_model): a run cannot be resumed from "
            f"it; {way_out}"
        )
    if missing:
        raise ValueError(f"{checkpoint} has no {', '.join(missing)}: {way_out}")
    for path in sorted(checkpoint.iterdir()):
        if path.is_file() and (damage := find_damage(path)):
            raise ValueError(f"{path} {damage}. Fetch it again, or {way_out}")
    return checkpoint


def find_damage(path: Path) -> str | None:
    """What is wrong with a file of a checkpoint (empty, cut short, a Git LFS pointer), or None; reads no weights."""
    try:
        with path.open("rb") as file:
            head = file.read(64)
        if not head:
            return "is empty"
        if head.startswith(b"version https://git-lfs"):
            return "is a Git LFS pointer, not the file itself (git lfs pull)"
        if path.suffix == ".safetensors":
            # Opening compares the header's sizes with the file's, without reading a tensor
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix in (".pt", ".pth", ".bin"):
            zipfile.ZipFile(path).close()  # what torch.save writes; its table of contents comes last
        elif path.name.endswith(".index.json"):
            shards = set(json.loads(path.read_text())["weight_map"].values())
            if gone := sorted(name for name in shards if not (path.parent / name).is_file()):
                return f"names {', '.join(gone)}, which the folder does not have"
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (SafetensorError, zipfile.BadZipFile, ValueError, KeyError) as error:
        return f"is damaged or cut short ({error})"
    return None


def check_unchanged(run_dir: Path, facts: dict) -> None:
    """Raises `ValueError` where the run was made with other settings; warns where only its length changes."""
    recorded = run_dir / RUN_FILE
    if not recorded.is_file():
        return
    before = json.loads(recorded.read_text())
    for name, value in facts["fixed"].items():
        # Runs of earlier versions recorded fewer settings
        if name in before["fixed"] and (old := before["fixed"][name]) != value:
            shown = {"samples_a_step": "samples per step"}.get(name, name)
            raise ValueError(
                f"{run_dir} was trained with {shown} {old!r}, now it is {value!r}: a run cannot change it; "
                "choose another output_dir (init_from starts a new run from the weights)"
            )
    for name, value in facts["length"].items():
        if (old := before["length"].get(name)) != value:
            logger.warning(f"{run_dir} resumes with {name} {value!r} instead of {old!r}: the learning rate follows")


def run_facts(
    args: HyperDFlashTrainingArguments,
    rows: "datasets.Dataset",
    report: DataReport,
    eval_files: list[dict],
    drafter: HyperDFlashModel,
    head: TargetHead,
    data_sha256: str,
) -> dict:
    """Facts for the card and for a later resume."""
    return {
        "target": drafter.config.target_name_or_path,
        "target_revision": drafter.config.target_revision,
        "train_data": report.files,
        "eval_data": eval_files,
        "data_report": report.lines(),
        "num_samples": len(rows),
        "num_tokens": int(read_lengths(rows).sum()),
        "mode": args.mode,
        "effort": args.effort,
        "generation": args.generation,
        "num_parameters": drafter.num_parameters(),
        "block_size": drafter.config.block_size,
        "init_from": lineage(args.init_from),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate", "datasets")},
        "fixed": {  # a resumed run must have the same, or its checkpoints would be those of another run
            "target": head.sha256,
            "init_from": args.init_from,
            "drafter": args.drafter,
            "lora": args.lora,
            "data_sha256": data_sha256,
            # The product alone: the denominators are exact, so the split over devices may change
            "samples_a_step": args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size,
            **{name: getattr(args, name) for name in FIXED},
        },
        "length": {name: getattr(args, name) for name in RUN_LENGTH},
        "finished": False,
    }


def lineage(init_from: str | None) -> dict | None:
    """What is known about the run whose weights this one starts from: its data and their size."""
    if init_from is None:
        return None
    # Of a run's folder, or one above its checkpoint or its `final`; a Hub id has none
    folder = Path(init_from).expanduser()
    recorded = [path for path in (folder / RUN_FILE, folder.parent / RUN_FILE) if path.is_file()]
    before = json.loads(recorded[0].read_text()) if recorded else {}
    return {"name": init_from, **{key: before.get(key) for key in ("train_data", "num_samples", "num_tokens")}}


def write_run_files(
    output: Path,
    args: HyperDFlashTrainingArguments,
    values: dict,
    command: str,
    facts: dict,
    drafter: HyperDFlashModel,
) -> None:
    """Recipe, command and facts of the run; under LoRA also `base/`, the drafter that the adapter belongs to."""
    output.mkdir(parents=True, exist_ok=True)
    command = public_command(command)
    if (output / COMMAND_FILE).is_file():  # resumed: the first command stays
        before = (output / COMMAND_FILE).read_text()
        command = before if before.endswith(command) else before + command  # a job that is requeued repeats one
    # As the user gave them: the library has changed some of the arguments since
    shown = {name: getattr(args, name) for name in SHOWN} | values
    shown = {name: value for name, value in shown.items() if not name.endswith("_token")}
    write_facts(output, facts)  # first: it makes the folder a run's
    write_atomically(output / RECIPE_FILE, yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).encode())
    write_atomically(output / COMMAND_FILE, command.encode())
    if args.lora is not None and not (output / BASE_FOLDER).exists():
        with written_whole(output / BASE_FOLDER) as folder:
            drafter.save_pretrained(folder)


def write_facts(output: Path, facts: dict) -> None:
    write_atomically(output / RUN_FILE, (json.dumps(facts, indent=2, ensure_ascii=False) + "\n").encode())
