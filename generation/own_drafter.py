"""The drafter inside a target's own checkpoint, by its kind, `mtp` or `dspark`: found, checked and loaded."""

from pathlib import Path

from transformers import DeepseekV4Config

from ..common.checkpoint import TargetCheckpoint
from .dspark import check_num_drafts, dspark_config, load_dspark
from .mtp import load_mtp
from .native import DSPARK, MTP, NativeDrafter, fetch_module


def find_own_drafter(kind: str, target: TargetCheckpoint, num_drafts: int | None = None) -> Path:
    """The folder of the target's own drafter, of which no tensor is read yet; of a Hub id its files are fetched.

    Raises `ValueError` as `check_kind` and `check_native` do.
    """
    folder = fetch_module(kind, target)
    check_native(kind, folder, target.config, num_drafts, target.name)
    return folder


def check_native(kind: str, folder: Path, config: DeepseekV4Config, num_drafts: int | None, where: str) -> None:
    """Raises `ValueError` for settings that cannot be, and for more drafts per round than the module has slots; an MTP
    module drafts as many as it is asked for."""
    if kind == DSPARK:
        block_size = dspark_config(folder, config, where).dspark_block_size
        check_num_drafts(num_drafts or 1, block_size, f"{num_drafts} drafts per round of {where}")


def load_native(kind: str, folder: Path, config: DeepseekV4Config, num_drafts: int | None = None) -> NativeDrafter:
    """A module in the dtype of the target's `config`; errors as in `load_mtp` and `load_dspark`.

    Args:
        num_drafts: the most that will be asked of an MTP module (default: 3).
    """
    return load_mtp(folder, config, num_drafts or 3) if kind == MTP else load_dspark(folder, config)
