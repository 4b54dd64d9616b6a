"""The arguments of a training run, and recipes: flat YAML files of them.

    hyperdflash train training/recipes/tiny_headline.yaml learning_rate=1e-3      # key=value overrides the file

Every key is a field of [`HyperDFlashTrainingArguments`], so every field of transformers' `TrainingArguments` can
be set. An unknown key stops with a suggestion.
"""

import difflib
import math
import sys
import types
import typing
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path

import yaml
from transformers import TrainingArguments
from transformers.training_args import trainer_log_levels

from ..common.console import UsageError, check_installed
from ..common.options import DRAFTER_OPTIONS as OPTIONS
from ..common.precision import has_bf16
from ..configuration_hyperdflash import HyperDFlashConfig
from ..encoding_deepseek_v4 import check_options

FEATURES, ON_MISSING = ("online", "offline", "server"), ("generate", "error")
# Fields of transformers that this trainer cannot follow, with the value that leaves each off, and why
UNSUPPORTED = {
    "neftune_noise_alpha": (None, "the drafter has no embedding of its own to add noise to"),
    "label_smoothing_factor": (0.0, "the loss is the paper's, which has none"),
    "include_for_metrics": ([], "evaluation keeps sums, neither inputs nor losses"),
    "eval_do_concat_batches": (True, "evaluation adds up the sums of all batches"),
    "remove_unused_columns": (False, "the loss mask is such a column"),
    "parallelism_config": (None, "use accelerate launch, or fsdp"),
    "use_liger_kernel": (False, "it has no kernels for a drafter"),
    "batch_eval_metrics": (False, "evaluation adds up the sums of all batches"),
}
KL_TEACHERS = ("mean_pool", "hc_head")
ATTENTIONS = (None, "eager", "sdpa", "flex_attention")
# max_length: one position of context, an anchor, and a token to predict
AT_LEAST = {
    **{"max_length": 3, "num_anchors": 1, "loss_chunk_size": 1, "kl_num_slots": 0, "eval_decode_max_new_tokens": 1},
    **{"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1},
}
NOT_NEGATIVE = (
    *("gamma", "kl_alpha", "eval_decode_prompts"),
    *("learning_rate", "weight_decay", "max_grad_norm", "dataloader_num_workers"),
)


class RecipeError(UsageError):
    """A recipe that cannot be run as written."""


@dataclass
class HyperDFlashTrainingArguments(TrainingArguments):
    """Arguments of [`HyperDFlashTrainer`], in addition to transformers' own.

    Args:
        target (`str`):
            Folder or Hub id of the DeepSeek-V4 to draft for.
        target_revision (`str`, *optional*), target_dtype (`str`, *optional*, defaults to `"auto"`):
            Commit of a Hub id, and the dtype the target is loaded in.
        drafter (`dict`, *optional*):
            Options of `hyperdflash init` for a new drafter: `block_size`, `num_hidden_layers`, `mask_token_id`, ...
        init_from (`str`, *optional*):
            Folder or Hub id of a drafter whose weights training starts from, with a new optimizer (stage 2). Of a
            run's folder it is the best or last checkpoint.
        train_data (`list[str]`), eval_data (`list[str]`, *optional*):
            Files, globs or Hub data sets (`"org/name@revision:config:split"`); see `training/data.py`.
        train_weights (`list[float]`, *optional*):
            Shares of the entries of `train_data`, one for each, in the rows drawn of them; no row is repeated.
        max_samples (`int`, *optional*):
            How many rows of `train_data` to draw at most, by `data_seed` (else `seed`); by default all.
        dataset_num_proc (`int`, *optional*):
            Processes that encode the data.
        mode, effort, generation (`str`):
            Of the chat encoding, for rows that do not set their own.
        max_length (`int`, *optional*, defaults to 3072):
            Tokens of a sample; longer ones are cut.
        skip_bad_rows (`bool`, *optional*, defaults to `False`):
            Leave out rows that cannot be read, instead of stopping at the first.
        features (`str`, *optional*, defaults to `"online"`):
            `"online"`: the target runs in every step. `"offline"`: its residuals come from `features_dir`, written by
            `hyperdflash features`. `"server"`: from there too, and vLLM is asked for those that are missing.
        attention (`str`, *optional*):
            Of the drafter in training: `"flex_attention"` (compiled, a batch at once; by default on a GPU), `"eager"`
            (a sample at a time; by default on a CPU) or `"sdpa"` (likewise, torch's fused one).
        features_server (`list[str]`, *optional*), on_missing (`str`, *optional*, defaults to `"generate"`):
            Addresses of the servers; `"error"` asks none of them.
        keep_features (`bool`, *optional*, defaults to `True`):
            Whether what a server wrote for this run stays in `features_dir`, or is removed once it is read.
        num_anchors (`int`, *optional*, defaults to 512):
            Blocks drawn from every sample, again at every step.
        gamma (`float`, *optional*, defaults to 4.0):
            Slot k has the weight `exp(-(k - 1) / gamma)` in the cross-entropy; 0 weighs all alike.
        kl_alpha (`float`, defaults to 0.15), kl_num_slots (`int`, defaults to 2), kl_temperature (`float`, 1.0):
            Weight of the KL term, the number of first slots it acts on, T_KD (paper, section 2.3).
        kl_teacher (`str`, *optional*, defaults to `"mean_pool"`):
            `"mean_pool"`: the target's head on the averaged paths, as in the paper. `"hc_head"`: the target's own
            distribution.
        loss_chunk_size (`int`, *optional*, defaults to 256):
            Slots whose logits exist at the same time.
        lora (`dict`, *optional*):
            peft's `LoraConfig` arguments; the gate is always trained whole.
        eval_decode_prompts (`int`, *optional*, defaults to 0):
            Prompts of `eval_data` that every evaluation really decodes, logged as `eval_acceptance_length`.
        eval_decode_max_new_tokens (`int`, *optional*, defaults to 128):
            Length of each.
        resume_from_checkpoint (`bool` or `str`, *optional*):
            True resumes from the last complete checkpoint of `output_dir`, or starts where there is none.
    """

    target: str | None = None
    target_revision: str | None = None
    target_dtype: str = "auto"
    drafter: dict = field(default_factory=dict)
    init_from: str | None = None
    train_data: list[str] = field(default_factory=list)
    eval_data: list[str] = field(default_factory=list)
    train_weights: list[float] = field(default_factory=list)
    max_samples: int | None = None
    dataset_num_proc: int | None = None
    mode: str = "non-thinking"
    effort: str | None = None
    generation: str = "preview"
    max_length: int = 3072
    skip_bad_rows: bool = False
    features: str = "online"
    features_dir: str | None = None
    attention: str | None = None
    features_server: list[str] = field(default_factory=list)
    on_missing: str = "generate"
    keep_features: bool = True
    num_anchors: int = 512
    gamma: float = 4.0
    kl_alpha: float = 0.15
    kl_num_slots: int = 2
    kl_temperature: float = 1.0
    kl_teacher: str = "mean_pool"
    loss_chunk_size: int = 256
    lora: dict | None = None
    eval_decode_prompts: int = 0
    eval_decode_max_new_tokens: int = 128
    resume_from_checkpoint: bool | str | None = None

    # transformers' fields whose defaults differ here
    learning_rate: float = 8e-4
    warmup_steps: float = 0.04  # below 1, a share of all steps
    lr_scheduler_type: str = "cosine"
    per_device_train_batch_size: int = 4
    per_device_eval_batch_size: int = 4
    num_train_epochs: float = 5.0
    logging_steps: float = 1
    logging_nan_inf_filter: bool = False  # it would log an average in place of a NaN
    remove_unused_columns: bool = False  # the drafter's `forward` takes none of the columns by name
    fsdp: bool | str | None = None
    ddp_find_unused_parameters: bool | None = False  # every parameter is used
    use_cache: bool = True  # is written into the published config

    def __post_init__(self):
        # Before `super()`, which sets up the device and the group of processes
        self._check_values()
        self._cast_mappings()
        self._check_together()
        if self.disable_tqdm is None:  # a bar for a terminal, plain lines for a log file
            self.disable_tqdm = not sys.stderr.isatty()
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            # The library takes every name but those ending in "loss" for one of which more is better
            self.greater_is_better = not self.metric_for_best_model.endswith(("loss", "ce", "kl"))
        try:
            super().__post_init__()
        except TypeError as error:
            if not self.accelerator_config:
                raise
            raise RecipeError(f"accelerator_config: {error}") from error
        if self.bf16 and not has_bf16(self.device):
            self.mixed_precision = "no"  # `bf16` itself stays: it is what a resumed run is compared by
        # Both change which process gets which sample; the order of epochs is ours (EpochSampler)
        if self.accelerator_config.split_batches or self.accelerator_config.dispatch_batches:
            raise RecipeError(
                "accelerator_config: split_batches and dispatch_batches are not supported; leave them out"
            )

    def _check_values(self) -> None:
        """Each value alone."""
        for name, allowed in (
            ("features", FEATURES),
            ("on_missing", ON_MISSING),
            ("kl_teacher", KL_TEACHERS),
            ("attention", ATTENTIONS),
            ("train_sampling_strategy", ("random", "group_by_length")),
            ("log_level", tuple(trainer_log_levels)),
            ("log_level_replica", tuple(trainer_log_levels)),
        ):
            if getattr(self, name) not in allowed:
                raise RecipeError(f"{name} is one of {', '.join(filter(None, allowed))}; got {getattr(self, name)!r}")
        try:
            check_options(self.mode, self.effort, self.generation)
        except ValueError as error:
            raise RecipeError(str(error)) from error
        for name, least in AT_LEAST.items():
            if getattr(self, name) < least:
                raise RecipeError(f"{name} must be at least {least}; got {getattr(self, name)}")
        for name in ("max_samples", "dataset_num_proc"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise RecipeError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise RecipeError(f"{name} must be at least 0 and below 1; got {getattr(self, name)}")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise RecipeError(f"{name} must not be negative; got {getattr(self, name)}")
        if self.max_steps <= 0 and self.num_train_epochs <= 0:
            raise RecipeError(f"num_train_epochs must be above 0; got {self.num_train_epochs}")
        if self.kl_temperature <= 0:
            raise RecipeError(f"kl_temperature must be above 0; got {self.kl_temperature}")
        for name, (off, reason) in UNSUPPORTED.items():
            if getattr(self, name) != off:
                raise RecipeError(f"{name} is not supported ({reason}): leave it out")

    def _cast_mappings(self) -> None:
        """The options of `drafter` and `lora`, in their types."""
        # Not `get_type_hints`, which also resolves the base class's, whose torch is imported for type checkers only
        hints = {**{name: HyperDFlashConfig.__annotations__[name] | None for name in OPTIONS}, "seed": int}
        self.drafter = _cast_options("drafter", self.drafter, hints)
        if self.lora is not None:
            check_installed("peft", "lora")
            from peft import LoraConfig

            self.lora = _cast_options("lora", self.lora, typing.get_type_hints(LoraConfig))

    def _check_together(self) -> None:
        """Settings that need or exclude each other."""
        if self.features != "online" and not self.features_dir:
            raise RecipeError(f"features: {self.features} needs features_dir, the folder that they are read from")
        if self.features == "server" and self.on_missing == "generate" and not self.features_server:
            raise RecipeError("features: server needs features_server, the address of a vLLM: http://HOST:8000")
        if self.target_dtype == "float16":
            raise RecipeError(
                "target_dtype: DeepSeek-V4 does not run in float16 in transformers: choose bfloat16, float32 or auto"
            )
        weights, entries = self.train_weights, self.train_data
        if weights and (len(weights) != len(entries) or not all(type(w) in (int, float) and w > 0 for w in weights)):
            raise RecipeError(f"train_weights has a number above 0 for each of {len(entries)} entries; got {weights}")
        if self.eval_decode_prompts and not self.eval_data:
            raise RecipeError("eval_decode_prompts takes its prompts from eval_data, which is empty")
        if self.init_from and self.drafter:
            raise RecipeError("init_from determines the drafter's sizes: leave out `drafter`")
        if self.lora is not None and not self.init_from:
            raise RecipeError("lora adapts a trained drafter: give it in init_from")
        if self.init_from and isinstance(self.resume_from_checkpoint, str):
            raise RecipeError(
                f"resume_from_checkpoint={self.resume_from_checkpoint!r} restores optimizer, schedule and step of "
                f"that run, init_from={self.init_from!r} starts a new one from weights: give one of them "
                "(resume_from_checkpoint=true resumes from this run's own checkpoints)"
            )


def load_recipe(path: str | Path, overrides: list[str] | None = None) -> HyperDFlashTrainingArguments:
    """Arguments from a YAML file and `key=value` strings, which win. Raises as `recipe_values` does."""
    return HyperDFlashTrainingArguments(**recipe_values(path, overrides))


def recipe_values(path: str | Path, overrides: list[str] | None = None) -> dict:
    """The values that a recipe and `key=value` strings, which win, give to fields of the arguments.

    Raises `RecipeError` for a file that is not a flat YAML mapping, unknown keys, and values of the wrong type;
    `OSError` for a missing file.
    """
    if not Path(path).is_file():
        folder = Path(__file__).with_name("recipes")
        names = ", ".join(sorted(recipe.name for recipe in folder.glob("*.yaml")))
        raise FileNotFoundError(f"no recipe {path}; {folder} has {names}")
    hints = _hints()
    values = {name: _cast(name, value, hints[name]) for name, value in read_recipe(path).items()}
    for override in overrides or []:
        name, separator, text = override.partition("=")  # the first one: values may have more
        if not separator:
            raise RecipeError(f"{override!r} is not key=value")
        values[name] = _cast(name, _from_text(name, text), hints[name])
    for required in ("target", "train_data", "output_dir"):
        if not values.get(required):
            raise RecipeError(f"{path} has no {required}: add it there, or {required}=... to the command")
    return values


def read_recipe(path: str | Path) -> dict:
    """The file's mapping, keys checked."""
    try:
        values = _load_yaml(Path(path).read_text(encoding="utf-8-sig"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} has no `key: value` lines")
    for name in values:
        _check_name(str(name))  # YAML allows numbers and null as keys
    return values


class _UniqueKeys(yaml.SafeLoader):
    """YAML without duplicate keys, of which the last would win silently."""

    def construct_mapping(self, node, deep=False):
        keys = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} appears twice: remove one", key.start_mark
                )
            keys.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


def _load_yaml(text: str):
    return yaml.load(text, _UniqueKeys)  # a SafeLoader


def _check_name(name: str) -> None:
    if name in _hints():
        return
    raise RecipeError(f"unknown key {name!r}{_suggestion(name, _hints())}")


def _suggestion(name: str, known) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _hints() -> dict:
    # `get_type_hints` resolves the text of annotations; fields without `init` are not settings
    settable = {f.name for f in fields(HyperDFlashTrainingArguments) if f.init}
    return {
        name: hint for name, hint in typing.get_type_hints(HyperDFlashTrainingArguments).items() if name in settable
    }


def _kinds(hint) -> set:
    """The plain types that a field takes: `list[str] | None` -> {list, NoneType}."""
    # `X | None` and `Optional[X]` are different types: transformers writes the one, peft the other
    options = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else [hint]
    )
    return {typing.get_origin(option) or option for option in options}


def _is_choice(kinds: set) -> bool:
    return any(isinstance(kind, type) and issubclass(kind, Enum) for kind in kinds)


def _from_text(name: str, text: str):
    """The value of `name=text` on the command line."""
    _check_name(name)
    kinds = _kinds(_hints()[name])
    # Text stays text: YAML would make a number of the name 1234, and a date of 2024-01-01
    if (kinds <= {str, type(None)} or _is_choice(kinds)) and text not in ("null", "none", "None", ""):
        return text
    try:
        return _load_yaml(text)
    except yaml.YAMLError as error:
        raise RecipeError(f"{name}={text} is not readable YAML: {' '.join(str(error).split())}") from error


def _cast_options(key: str, options: dict, hints: dict) -> dict:
    """The options under a recipe's key `drafter` or `lora`, in their types."""
    known = hints.keys() - {"return"}
    for name in options:
        if name not in known:
            raise RecipeError(f"{key} has no option {name!r}{_suggestion(str(name), known)}")
    return {name: _cast(f"{key}.{name}", value, hints[name]) for name, value in options.items()}


def _cast(name: str, value, hint):
    """`value` in the type that `hint` asks for; YAML reads 8e-4 as text, for one."""
    kinds = _kinds(hint)
    if value is False and _is_choice(kinds):
        value = "no"  # which YAML takes for a false
    # A key with nothing behind it: for a list, that is an empty one
    if value is None:
        value = [] if list in kinds and type(None) not in kinds else None
    # A single file need not be written as a list
    if list in kinds and isinstance(value, str) and str not in kinds:
        value = [value]
    if isinstance(value, str) and str not in kinds and kinds & {int, float}:
        try:
            value = float(value)
        except ValueError:
            raise _wrong_type(name, value, kinds) from None
    if isinstance(value, float) and not math.isfinite(value):
        raise RecipeError(f"{name} must be a finite number; got {value}")
    if isinstance(value, float) and float not in kinds and int in kinds and value.is_integer():
        value = int(value)
    # `type`, as a truth value is an int too
    if type(value) is int and float in kinds and int not in kinds:
        value = float(value)
    known = {bool, int, float, str, list, dict, type(None)}
    plain = kinds & known
    # What is left of `kinds` (choices, other classes) is written as text or as a mapping
    if type(value) not in plain and not (kinds - known and isinstance(value, str | dict)):
        raise _wrong_type(name, value, kinds)
    return value


def _wrong_type(name: str, value, kinds: set) -> RecipeError:
    wanted = " or ".join(sorted(kind.__name__ for kind in kinds if kind is not type(None)))
    return RecipeError(f"{name} takes {wanted}; got {value!r}")
