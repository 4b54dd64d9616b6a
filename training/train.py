"""`hyperdflash train RECIPE.yaml [key=value ...]`: a drafter from data to a Hub folder.

    hyperdflash train training/recipes/tiny_headline.yaml                          # two cores, the tiny world
    hyperdflash train training/recipes/tiny_headline.yaml --dry-run                # the plan, and one step
    hyperdflash train training/recipes/tiny_headline.yaml resume_from_checkpoint=true
    accelerate launch --num_processes 8 -m hyperdflash train training/recipes/stage1.yaml

`output_dir` gets the Trainer's checkpoints, the resolved recipe, and at the end `final/`, which is ready for
`hf upload`.
"""

import argparse
import copy
import shlex
import sys
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import HfApi
from transformers import DeepseekV4ForCausalLM, PreTrainedTokenizerBase, get_scheduler
from transformers.utils import logging

from ..common.checkpoint import check_drafter_type, load_target_model, load_tokenizer, resolve_checkpoint
from ..common.console import check_installed
from ..common.precision import load_dtype
from ..configuration_hyperdflash import HyperDFlashConfig
from ..modeling_hyperdflash import HyperDFlashModel
from ..pairing_hyperdflash import check_shapes, fingerprint_differences, target_fingerprint
from .arguments import HyperDFlashTrainingArguments, RecipeError, recipe_values
from .data import DataReport, hash_data, load_recipe_data
from .dataset import SampleDataset
from .dry_run import count_parameters, print_plan, print_profile, steps_of
from .export import export_drafter
from .feature_cache import CachedFeatures
from .features import check_features, open_features, read_drafter_config
from .init import new_drafter, warn_of_ordinary_token
from .metrics import figure_names
from .model_card import check_matplotlib
from .run_folder import (
    BASE_FOLDER,
    FINAL,
    check_run_folder,
    list_checkpoints,
    read_state,
    resume_point,
    run_facts,
    starting_weights,
    write_facts,
    write_run_files,
)
from .target import OnlineFeatures, TargetHead
from .trainer import HyperDFlashTrainer, Stopwatch

if TYPE_CHECKING:
    import datasets
    from peft import PeftModel

logger = logging.get_logger(__name__)

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
REPORT_PACKAGES = ("tensorboard", "wandb", "trackio")


@dataclass
class Parts:
    """Everything a trainer needs, and the facts about the run for its card."""

    drafter: HyperDFlashModel
    model: torch.nn.Module  # trained: the drafter, or a copy of it with adapters
    features: OnlineFeatures | CachedFeatures
    target: DeepseekV4ForCausalLM | None
    train_dataset: SampleDataset
    eval_dataset: SampleDataset | None
    facts: dict


def train(values: dict, *, command: str, dry_run: bool = False, profile: bool = False) -> Path | None:
    """Run a recipe's values; returns the Hub folder, or None after a dry run.

    Raises `RecipeError`, `ValueError` or `OSError` for wrong input, before any work.
    """
    args = HyperDFlashTrainingArguments(**values)
    check_run_folder(args, dry_run)
    push, args.push_to_hub = args.push_to_hub, False  # the library would push checkpoints; we push the result
    api = HfApi(token=args.hub_token)
    args.hub_token = None  # checkpoints hold a pickle of the arguments
    if push:
        api.whoami()  # a wrong token fails here, not after the last step
    for package in set(args.report_to) & set(REPORT_PACKAGES):
        check_installed(package, f"report_to: {package}")
    if dry_run:
        args.keep_features = False  # a server writes the features of its one step
    else:
        check_matplotlib()  # the card's picture, after the last step
    if args.bf16 and args.mixed_precision == "no" and args.should_log:
        print("bf16      not on this CPU, which has no instructions for it: computing in fp32", flush=True)
    parts = prepare(args)
    if dry_run:
        if args.should_log:
            print_plan(args, parts)
        return take_one_step(args, parts)
    output = Path(args.output_dir)
    checkpoint = resume_point(args, parts.facts)
    trainer = make_trainer(args, parts)
    if args.should_save:
        # After the trainer is made: its refusals must not leave a folder that looks like a run's
        write_run_files(output, args, values, command, parts.facts, parts.drafter)
    run_steps(trainer, args, parts, checkpoint, profile)
    final = output / FINAL
    if args.should_save:
        # Before the export, whose model card reads it
        parts.facts["finished"] = True
        write_facts(output, parts.facts)
        # A run resumed from another folder's last checkpoint has none in its own
        export_drafter(output if list_checkpoints(output) else checkpoint, final, run_dir=output, overwrite=True)
        print(f"{final}: ready for `hf upload`")
        if push:
            publish(api, final, args)
    # The folder is whole when any process returns, not only the one that exports
    trainer.accelerator.wait_for_everyone()
    return final


def run_steps(
    trainer: HyperDFlashTrainer,
    args: HyperDFlashTrainingArguments,
    parts: Parts,
    checkpoint: Path | None,
    profile: bool,
) -> None:
    """Train from the checkpoint, or from the beginning, to the run's last step. A finished run stays as it is."""
    *_, num_steps = steps_of(args, len(parts.train_dataset))
    if checkpoint is not None:
        step = read_state(checkpoint)["global_step"]
        # The library would take one more step, past the end of the schedule
        if step >= num_steps:
            if args.should_log:
                print(f"{checkpoint} is at step {step} of {num_steps}: nothing is left to train", flush=True)
            return
        if args.should_log:
            print(f"resuming from {checkpoint}", flush=True)
    if profile:
        trainer.stopwatch = Stopwatch(args.device)
    try:
        with trainer._timed("run"):
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    except KeyboardInterrupt:
        print(
            f"stopped at step {trainer.state.global_step}: run it again with resume_from_checkpoint=true to resume",
            file=sys.stderr,
        )
        raise
    if profile and args.should_save:
        print_profile(trainer.stopwatch.seconds)
    # The export reads a checkpoint, so a run ends with one even where none was asked for
    if args.save_strategy == "no":
        trainer._save_checkpoint(trainer.model_wrapped, trial=None)


# ------------------------------------------------------------------------------------------------------------- parts


def prepare(args: HyperDFlashTrainingArguments) -> Parts:
    """Load data, target or features, and the drafter, after every check that needs no training step."""
    # Once, so that everything is read from the same commit: a branch may move meanwhile
    args.target, args.target_revision = resolve_checkpoint(args.target, args.target_revision)
    init_from = resolve_checkpoint(starting_weights(args.init_from)) if args.init_from else None
    if init_from:
        check_drafter_type(*init_from)
    config = read_drafter_config(args, init_from)
    # Cheap checks first: encoding the data takes minutes, loading the target longer
    check_settings(args, config)
    tokenizer = load_tokenizer(args.target, args.target_revision)
    if not init_from:
        words = {index: word for word, index in tokenizer.get_vocab().items()}
        warn_of_ordinary_token(config.mask_token_id, set(tokenizer.get_added_vocab().values()), words)
    train_rows, report = load_rows(args, args.train_data, tokenizer)
    eval_rows, eval_files = None, []
    if args.eval_data:
        eval_rows, eval_report = load_rows(args, args.eval_data, tokenizer)
        eval_files = eval_report.files
    stored = None
    if args.features != "online":
        stored = open_features(args, config)
        splits = {"train": train_rows, "eval": eval_rows}
        check_features(stored, {split: rows for split, rows in splits.items() if rows is not None}, args.process_index)
    target = None
    if stored is None or args.eval_decode_prompts:
        dtype = load_dtype(args.target_dtype, args.device)
        target = load_target_model(args.target, args.target_revision, dtype)
        target.requires_grad_(False).to(args.device)
    head = stored.head if stored else TargetHead.from_target(target)
    drafter = make_drafter(args, head, config, init_from)
    drafter.config.encoding = {
        "generation": args.generation,
        "modes": sorted(set(train_rows.select_columns("mode")[:]["mode"])),
    }
    # A copy: peft changes modules in place, and `base/` holds the drafter as it was
    model = drafter if args.lora is None else with_lora(copy.deepcopy(drafter), args.lora, args.seed)
    return Parts(
        drafter=drafter,
        model=model,
        features=stored or OnlineFeatures(target, drafter.config),
        target=target,
        train_dataset=SampleDataset(train_rows, stored),
        eval_dataset=None if eval_rows is None else SampleDataset(eval_rows, stored),
        facts=run_facts(args, train_rows, report, eval_files, drafter, head, hash_data(train_rows))
        | {"num_trainable_parameters": count_parameters(model)[0]},
    )


def load_rows(
    args: HyperDFlashTrainingArguments, files: list[str], tokenizer: PreTrainedTokenizerBase
) -> "tuple[datasets.Dataset, DataReport]":
    """Rows and a report of those left out, printed once."""
    rows, report = load_recipe_data(args, files, tokenizer)
    if args.should_log:
        print("\n".join(report.lines()), flush=True)
    return rows, report


def check_settings(args: HyperDFlashTrainingArguments, config: HyperDFlashConfig) -> None:
    """Raises `RecipeError`, `ValueError` or `ImportError` for settings that would fail once data is encoded and the
    target is loaded: what chooses the best checkpoint, the optimizer, the schedule, the adapter."""
    if args.metric_for_best_model is not None:
        names = [*figure_names(config.block_size - 1), *["acceptance_length"] * bool(args.eval_decode_prompts)]
        if args.metric_for_best_model.removeprefix("eval_") not in names:
            raise RecipeError(
                f"metric_for_best_model {args.metric_for_best_model!r} is not a figure of this run's evaluations, "
                f"which have {', '.join(names)}"
            )
    HyperDFlashTrainer.get_optimizer_cls_and_kwargs(args)  # raises for a package that is not installed
    try:
        # Only making the schedule shows whether its arguments fit
        optimizer = torch.optim.SGD([torch.zeros(1)])
        get_scheduler(
            args.lr_scheduler_type, optimizer, 0, 1, scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {})
        )
    except TypeError as error:
        raise RecipeError(f"lr_scheduler_kwargs do not fit {args.lr_scheduler_type.value}: {error}") from error
    if args.torch_compile_mode and args.torch_compile_mode not in (modes := torch._inductor.list_mode_options()):
        raise RecipeError(f"torch_compile_mode is one of {', '.join(modes)}; got {args.torch_compile_mode!r}")
    if args.lora is not None:
        with torch.device("meta"):  # sizes and names, without memory
            with_lora(HyperDFlashModel(config), args.lora)


def make_drafter(
    args: HyperDFlashTrainingArguments,
    head: TargetHead,
    config: HyperDFlashConfig,
    init_from: tuple[str, str | None] | None,
) -> HyperDFlashModel:
    """A new drafter, or `init_from`'s weights (a folder or Hub id, and the commit), in fp32: the masters of mixed
    precision."""
    if init_from:
        base = Path(args.output_dir) / BASE_FOLDER  # what a resumed adapter was made for, whatever init_from is now
        source, revision = (base, None) if args.resume_from_checkpoint is True and base.is_dir() else init_from
        drafter = HyperDFlashModel.from_pretrained(source, revision=revision, dtype=torch.float32)
        check_drafter(drafter.config, head, args.init_from)
        if args.should_log and not args.resume_from_checkpoint:
            print(f"weights of {args.init_from}, with a new optimizer and schedule", flush=True)
        # From here on it is trained for this target, whichever it was made for
        drafter.config.target_name_or_path = config.target_name_or_path
        drafter.config.target_revision = config.target_revision
        drafter.config.target_fingerprint = target_fingerprint(head.identity())
    else:
        drafter = new_drafter(config, head.identity(), args.drafter.get("seed", args.seed))
    return drafter


def check_drafter(config: HyperDFlashConfig, head: TargetHead, name: str) -> None:
    """Raises `ValueError` for shapes that differ from the target's; warns of a target with other weights."""
    check_shapes(config, head.config)
    if lines := fingerprint_differences(config.target_fingerprint or {}, head.identity()):
        logger.warning(f"init_from {name} was trained for other weights: {'; '.join(lines)}")


def with_lora(drafter: HyperDFlashModel, options: dict, seed: int = 0) -> "PeftModel":
    """The drafter with low-rank adapters on its projections; reducer, gate and heads are trained whole."""
    check_installed("peft", "lora")
    from peft import LoraConfig, get_peft_model

    heads = {name for name, _ in drafter.named_children() if name in ("markov_head", "confidence_head")}
    # peft adapts linear layers, but the gate and the Markov head hold bare parameters
    saved = sorted({"reducer", *heads, *(options.get("modules_to_save") or [])})
    config = LoraConfig(**{"target_modules": LORA_TARGETS, **options, "modules_to_save": saved})
    # A resumed run makes the same adapter, and the global generator stays where it was
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(drafter, config)


def make_trainer(
    args: HyperDFlashTrainingArguments, parts: Parts, kind: type[HyperDFlashTrainer] = HyperDFlashTrainer
) -> HyperDFlashTrainer:
    """Raises `ValueError` for a number of processes, or a kind of shards, that the trainer cannot work with."""
    # The library would use DataParallel, and average over GPUs what the loss counts by processes
    if args.n_gpu > 1:
        raise ValueError(
            f"one process for {args.n_gpu} GPUs: start one per GPU with `accelerate launch -m hyperdflash train ...`,"
            " or choose one with CUDA_VISIBLE_DEVICES"
        )
    trainer = kind(
        parts.model,
        args,
        features=parts.features,
        train_dataset=parts.train_dataset,
        eval_dataset=parts.eval_dataset,
        target=parts.target,
    )
    if args.fsdp and not trainer.is_fsdp_enabled:  # accelerate ignores it silently
        raise ValueError("fsdp needs accelerators and a launcher (accelerate launch, torchrun): leave it out")
    if trainer.is_fsdp_enabled:
        shards = str(trainer.accelerator.state.fsdp_plugin.state_dict_type)
        if "FULL_STATE_DICT" not in shards:
            raise ValueError(f"FSDP's state dict type is {shards}; checkpoints are exported whole: FULL_STATE_DICT")
    return trainer


# --------------------------------------------------------------------------------------------------- folder and files


def publish(api: HfApi, folder: Path, args: HyperDFlashTrainingArguments) -> None:
    """Upload the result to `hub_model_id`, by default named like the output folder."""
    repo = api.create_repo(
        args.hub_model_id or Path(args.output_dir).resolve().name, private=args.hub_private_repo, exist_ok=True
    )
    api.upload_folder(repo_id=repo.repo_id, folder_path=folder, commit_message="HyperDFlash drafter")
    print(f"published {repo.repo_id}")


def take_one_step(args: HyperDFlashTrainingArguments, parts: Parts) -> None:
    """Take a run's first step in a temporary folder, and print an estimate for the others."""
    *_, num_steps = steps_of(args, len(parts.train_dataset))
    with tempfile.TemporaryDirectory() as folder:
        args.output_dir, args.max_steps = folder, 1
        args.save_strategy = args.eval_strategy = "no"
        args.load_best_model_at_end, args.report_to, args.logging_steps = False, [], 1
        args.eval_on_start = False
        trainer = make_trainer(args, parts)
        trainer.stopwatch = Stopwatch(args.device)
        trainer.train()
    if args.should_log:
        seconds = int(trainer.stopwatch.seconds["step"] * num_steps)
        print(f"time      {timedelta(seconds=seconds)} estimated from this first step, which is the slowest")
        if args.device.type == "cuda":
            print(f"memory    {torch.cuda.max_memory_allocated() / 2**30:8.2f} GiB  peak of this step")


# ---------------------------------------------------------------------------------------------------- the command line


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Raises what `train` raises."""
    # command.txt and the model card are published
    public = [override for override in args.overrides if not override.partition("=")[0].endswith("_token")]
    command = shlex.join(["hyperdflash", "train", args.recipe, *public])
    values = recipe_values(args.recipe, args.overrides)
    train(values, command=command, dry_run=args.dry_run, profile=args.profile)
    return 0
