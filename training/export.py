"""Make a Hub folder from what a training run wrote: `hyperdflash export CHECKPOINT OUT`.

    hyperdflash export runs/stage2 my-drafter                   # the run's best checkpoint, else its last complete one
    hyperdflash export runs/stage2/checkpoint-200 my-drafter    # this one
    hyperdflash export my-drafter served --format vllm          # what vLLM loads: docs/serving.md; or sglang
    hf upload someone/my-drafter my-drafter                     # everything in the folder is for the public

OUT is self-contained: configuration, code, weights in bf16 (the gate in fp32), `custom_generate/`, the chat encoding,
a model card with the run's figures and pictures, `command.txt`. A LoRA adapter is merged into the drafter that it was
trained on. Optimizer state and pickles are left out. With `--format vllm` or `sglang` it is the folder of
`serving/vllm_format.py` or `serving/sglang_format.py` instead.
"""

import argparse
import json
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import logging

from ..common.console import check_installed
from ..common.files import check_output, copy_encoding, written_whole
from ..modeling_hyperdflash import HyperDFlashModel
from ..serving import sglang_format
from ..serving.vllm_format import check_servable, is_served, write_vllm
from .model_card import check_matplotlib, has_picture, write_card
from .run_folder import (
    ADAPTER_CONFIG,
    BASE_FOLDER,
    STATE_FILE,
    choose_checkpoint,
    list_checkpoints,
    read_run,
    read_state,
)

logger = logging.get_logger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"


FORMATS = ("hf", "vllm", "sglang")


def export_drafter(
    checkpoint: str | Path,
    output: str | Path,
    *,
    run_dir: str | Path | None = None,
    overwrite: bool = False,
    format: str = "hf",
) -> Path:
    """Make a self-contained Hub folder of a trained drafter, atomically.

    Args:
        checkpoint: a run's folder (its best checkpoint is taken, else its last complete one), a checkpoint's (full
            weights or a LoRA adapter), or a drafter's.
        output: the folder to make; it must not exist, or be empty.
        run_dir: where the files lie that the card is written from; by default the run that the checkpoint is part of.
        overwrite: replace `output` if it is a drafter's folder, in any format.
        format: `"hf"`, or `"vllm"` or `"sglang"` for the folder that the plug-in for that engine loads, which has no
            model card of the run.

    Returns the folder's path.

    Raises `ValueError` for a folder without a complete drafter, files that cannot be parsed, or a drafter that the
    engine does not serve, `OSError` when `output` is in use or something is missing, `ImportError` when the card's
    picture needs matplotlib, or an adapter peft, and it is not installed. `output` is untouched then.
    """
    if format not in FORMATS:
        raise ValueError(f"format is one of {', '.join(FORMATS)}; got {format!r}")
    checkpoint, run_dir = find_checkpoint(checkpoint, run_dir)
    output = _check_replaceable(output, checkpoint) if overwrite else check_output(output)
    # What can be refused without the weights is refused before they are loaded
    run = read_run(checkpoint, run_dir) if format == "hf" else None
    if run is not None and has_picture(run):
        check_matplotlib()
    drafter = load_trained(checkpoint, run_dir)
    check_finite(drafter, checkpoint)
    if format != "hf":
        check_servable(drafter.config)
    round_to_bf16(drafter)
    with written_whole(output, overwrite=overwrite) as folder:
        if format == "vllm":
            write_vllm(folder, drafter)
        elif format == "sglang":
            sglang_format.write_sglang(folder, drafter)
        else:
            drafter.save_pretrained(folder)
            copy_encoding(folder)
            write_card(folder, drafter.config, drafter.num_parameters(), run)
    return output


def _check_replaceable(output: str | Path, checkpoint: Path) -> Path:
    """The resolved path, when nothing but an earlier export would be lost."""
    output = Path(output).expanduser().resolve()
    try:
        return check_output(output)
    except FileExistsError:
        # Replacing a folder removes it, and the weights to export with it
        if checkpoint.is_relative_to(output):
            raise ValueError(f"{output} holds the checkpoint itself, {checkpoint}: choose another folder") from None
        config = _config(output)
        # Only a folder that an export can make again is replaced
        if config.get("model_type") != "hyperdflash" and not is_served(config) and not sglang_format.is_served(config):
            raise
        return output


def _config(folder: Path) -> dict:
    path = folder / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


# ---------------------------------------------------------------------------------------------------- which checkpoint


def find_checkpoint(folder: str | Path, run_dir: str | Path | None = None) -> tuple[Path, Path | None]:
    """The folder of the weights, and the folder of their run (None when they belong to no run).

    Raises `ValueError` for a checkpoint that was cut short, a run without a whole one, or one whose best is gone;
    `FileNotFoundError` for a path that is not a folder.
    """
    folder = Path(folder).expanduser().resolve()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: export takes a run's, a checkpoint's or a drafter's")
    run_dir = Path(run_dir).expanduser().resolve() if run_dir is not None else None
    if run_dir is not None and not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is not a folder of a run")
    if list_checkpoints(folder):
        return choose_checkpoint(folder), run_dir or folder
    if re.fullmatch(r"checkpoint-\d+", folder.name):
        if read_state(folder) is None:
            raise ValueError(
                f"{folder} was cut short while it was written: it has no complete {STATE_FILE}. Export "
                f"{folder.parent} for its last complete checkpoint"
            )
        run_dir = run_dir or folder.parent
    return folder, run_dir


# ------------------------------------------------------------------------------------------------------------- weights


def load_trained(checkpoint: Path, run_dir: Path | None = None) -> HyperDFlashModel:
    """The trained drafter in fp32, an adapter merged. Errors as in `export_drafter`."""
    if (checkpoint / ADAPTER_CONFIG).is_file():
        return merge_adapter(checkpoint, run_dir)
    if any(checkpoint.glob("pytorch_model_fsdp*")) and not (checkpoint / "config.json").is_file():
        raise ValueError(
            f"{checkpoint} holds FSDP's shards instead of a whole drafter: resume the run for a step with "
            "fsdp_state_dict_type FULL_STATE_DICT, and export that checkpoint"
        )
    config = _config(checkpoint)
    if is_served(config):
        raise ValueError(
            f"{checkpoint} is a folder for vLLM: export the drafter that it was made from, or read it back with "
            "hyperdflash.serving.vllm_format.read_vllm"
        )
    if sglang_format.is_served(config):
        raise ValueError(f"{checkpoint} is a folder for SGLang: export the drafter that it was made from")
    model_type = config.get("model_type")
    if model_type != "hyperdflash":
        found = f"a config.json of model_type {model_type!r}" if model_type else "no config.json"
        raise ValueError(f"{checkpoint} is not a folder of a drafter, a checkpoint or a run: it has {found}")
    # Before loading, whose own error does not name the file
    for path in checkpoint.glob("*.safetensors"):
        _check_readable(path)
    return HyperDFlashModel.from_pretrained(checkpoint, dtype=torch.float32)


def check_finite(drafter: HyperDFlashModel, checkpoint: Path) -> None:
    """Raises `ValueError` for weights that no training should have left behind."""
    tensors = drafter.state_dict()
    if broken := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(
            f"{len(broken)} of {len(tensors)} tensors in {checkpoint} have NaN or infinite values "
            f"({', '.join(broken[:3])}, ...): export an earlier checkpoint"
        )


def _check_readable(path: Path) -> set[str]:
    """The names of a file's tensors."""
    try:
        with safe_open(path, framework="pt") as f:
            return set(f.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file (cut short?): {error}") from error


def merge_adapter(checkpoint: Path, run_dir: Path | None = None) -> HyperDFlashModel:
    """The adapter's drafter with the adapter merged in fp32; modules that were trained whole replace its own.

    The drafter is the one in the run's `base` folder, else the one that the adapter's configuration names.
    """
    check_installed("peft", "merging a LoRA adapter")
    from peft import PeftConfig, PeftModel, get_peft_model_state_dict

    config = PeftConfig.from_pretrained(checkpoint)
    # The run's own copy first: what the adapter's configuration names may have changed since
    if run_dir is not None and (run_dir / BASE_FOLDER).is_dir():
        base = load_trained(run_dir / BASE_FOLDER)
    else:
        base = _load_base(checkpoint, config.base_model_name_or_path, config.revision)
    if not (checkpoint / ADAPTER_WEIGHTS).is_file():
        raise FileNotFoundError(f"{checkpoint} has an {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}")
    stored = _check_readable(checkpoint / ADAPTER_WEIGHTS)
    try:
        adapted = PeftModel.from_pretrained(base, checkpoint)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"the adapter in {checkpoint} does not fit {base.name_or_path}: {error}") from error
    # peft only warns of tensors that it did not find, and would merge nothing in their place
    # `save_embedding_layers`: by default, peft asks the Hub for the base's configuration
    if differing := stored ^ get_peft_model_state_dict(adapted, save_embedding_layers=False).keys():
        names = ", ".join(sorted(differing)[:5])
        raise ValueError(f"the adapter in {checkpoint} does not fit {base.name_or_path}: {names}")
    # safe_merge: a NaN raises an error instead of ending in the weights
    return adapted.merge_and_unload(safe_merge=True)


def _load_base(checkpoint: Path, name: str | None, revision: str | None) -> HyperDFlashModel:
    remedy = f"Set base_model_name_or_path in {checkpoint / ADAPTER_CONFIG} to the drafter it was trained on"
    if not name:
        raise ValueError(f"{checkpoint} is an adapter that does not name its drafter. {remedy}")
    try:
        return HyperDFlashModel.from_pretrained(name, revision=revision, dtype=torch.float32)
    except OSError as error:
        raise FileNotFoundError(
            f"{name}, which the adapter in {checkpoint} belongs to, could not be loaded. {remedy}"
        ) from error


def round_to_bf16(drafter: HyperDFlashModel) -> None:
    """Round everything but the gate, in place: loading in bf16 keeps the gate in fp32 too."""
    kept = drafter._keep_in_fp32_modules_strict  # the gate
    for name, parameter in drafter.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if kept & set(name.split(".")) else torch.bfloat16)


# ---------------------------------------------------------------------------------------------------- the command line


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Raises what `export_drafter` raises."""
    output = export_drafter(args.checkpoint, args.output, format=args.format)
    files = [path for path in output.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{output}: {len(files)} files, {size / 1e6:.1f} MB. Publish it with: hf upload <repository> {output}")
    if args.format != "hf":
        print(f"Serve it with the plug-in hyperdflash-{args.format} installed; README.md in it has the command")
    return 0
