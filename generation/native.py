"""What the drafters inside DeepSeek-V4's own checkpoints share: the native MTP module and DSpark.

Both lie under `mtp.*`, use the target's embedding and LM head, and are told apart by their tensors. They are read by
name, in the official naming or in transformers', from bf16, FP8 or FP4, and without the rest of the checkpoint.
"""

import re
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import DeepseekV4Config
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4ForCausalLM,
    DeepseekV4PreTrainedModel,
    DeepseekV4RotaryEmbedding,
)

from ..common.checkpoint import TargetCheckpoint, file_in, tensor_files
from ..generation_hyperdflash import HyperDFlashAssistant, check_devices
from ..pairing_hyperdflash import check_call

PREFIX = "mtp."
MTP, DSPARK = "mtp", "dspark"
# The tensor that tells a module, its name in a sentence, and which checkpoints have it
_SIGNS = {MTP: "mtp.0.e_proj.weight", DSPARK: "mtp.0.main_proj.weight"}
_NAMES = {MTP: "native MTP module", DSPARK: "DSpark module"}
_HOLDERS = {MTP: "the preview checkpoint has", DSPARK: "the 0731 and the DSpark checkpoints have"}

# transformers' name inside a decoder layer -> the official checkpoint's (experts are split per expert as well).
_OFFICIAL_NAMES = {
    "self_attn.q_a_proj.": "attn.wq_a.",
    "self_attn.q_b_proj.": "attn.wq_b.",
    "self_attn.q_a_norm.": "attn.q_norm.",
    "self_attn.kv_proj.": "attn.wkv.",
    "self_attn.kv_norm.": "attn.kv_norm.",
    "self_attn.o_a_proj.": "attn.wo_a.",
    "self_attn.o_b_proj.": "attn.wo_b.",
    "self_attn.sinks": "attn.attn_sink",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "attn_hc.": "hc_attn_",
    "ffn_hc.": "hc_ffn_",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.": "ffn.gate.",
    "mlp.shared_experts.gate_proj.": "ffn.shared_experts.w1.",
    "mlp.shared_experts.down_proj.": "ffn.shared_experts.w2.",
    "mlp.shared_experts.up_proj.": "ffn.shared_experts.w3.",
    "hc_head.hc_": "hc_head_",
}
_EXPERTS = re.compile(r"(?P<stem>mtp\.\d+\.)mlp\.experts\.(?P<part>gate_up_proj|down_proj)")
# Not needed here: copies of the target's embedding and head, and the router's bias for image tokens
_LEFT_ALONE = re.compile(r"mtp\.\d+\.(emb\.tok_emb\.weight|head\.weight|ffn\.gate\.bias_vl)")
_PACKED = ("I8", "U8")  # two FP4 values a byte


class NativeDrafter(HyperDFlashAssistant, DeepseekV4PreTrainedModel):
    """A drafter of `mtp.*`. A subclass has a `kind`, `checkpoint_name`, and what `HyperDFlashAssistant` asks for."""

    kind: str
    verification = "block"

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Whether the experts may run in one kernel, as the target's do. The library looks for its decorator in the
        text of the module that defines the class; it stands in DeepSeek-V4's module, not in this one."""
        return True

    def checkpoint_name(self, name: str) -> str:
        """The name in a checkpoint, in transformers' naming, of one of this module's tensors."""
        raise NotImplementedError

    def validate_call(
        self,
        target: DeepseekV4ForCausalLM,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
    ) -> None:
        """Raise `ValueError` for a call or a target that this module cannot draft for."""
        check_call(generation_mode, generation_config)
        check_devices(self, target)
        for name in ("vocab_size", "hidden_size", "hc_mult"):
            ours, theirs = getattr(self.config, name), getattr(target.config, name)
            if ours != theirs:
                raise ValueError(
                    f"this {_NAMES[self.kind]} was made for a target with {name} {ours}, but the target has {theirs}"
                )

    def official_state_dict(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        """The module's tensors under `mtp.*` in the official names; what V4 keeps in fp32 stays so, but for norms."""
        fp32 = ("attn_hc", "ffn_hc", "hc_head", "sinks", "e_score_correction_bias", "confidence_head")
        out = {}
        for name, tensor in self.state_dict().items():
            tensor = tensor.detach().to(torch.float32 if any(part in name for part in fp32) else dtype)
            sources = _sources(self.checkpoint_name(name), tensor.shape)
            parts = tensor.flatten(0, 1).chunk(len(sources)) if len(sources) > 1 else [tensor]
            out |= {stored: part.reshape(shape) for (stored, shape), part in zip(sources, parts, strict=True)}
        return {name: tensor.contiguous() for name, tensor in out.items()}


def check_kind(kind: str, names: Collection[str], where: str | Path) -> None:
    """Whether the tensors of a checkpoint have a module of this kind among them, told by their names alone.

    Raises `ValueError` when they have not; the other kind is named.
    """
    if _SIGNS[kind] in names:
        return
    other = DSPARK if kind == MTP else MTP
    if _SIGNS[other] in names:
        raise ValueError(
            f"{where} carries a {_NAMES[other]} under mtp.*, not the {_NAMES[kind]} that {_HOLDERS[kind]}: read it "
            f"with load_{other}, or name the method {other}"
        )
    raise ValueError(f"{where} holds no {_NAMES[kind]}: there is no tensor named {_SIGNS[kind]}")


def module_folder(kind: str, checkpoint: str | Path, revision: str | None = None) -> Path:
    """The folder with the files that hold a module: a folder itself, which may hold the module alone; of a Hub id,
    these files are fetched and no others. Raises `ValueError` as `check_kind` does, `OSError` for no weights."""
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        return fetch_module(kind, TargetCheckpoint(checkpoint, revision))
    check_kind(kind, tensor_files(partial(file_in, folder), checkpoint), checkpoint)
    return folder


def fetch_module(kind: str, repository: TargetCheckpoint) -> Path:
    """As `module_folder`, of a checkpoint that was looked at already."""
    check_kind(kind, repository.files, repository.name)
    return [repository.file(shard) for shard in module_shards(repository)][0].parent


def module_shards(repository: TargetCheckpoint) -> list[str]:
    """The names of a checkpoint's files that hold a module."""
    return sorted({file for name, file in repository.files.items() if name.startswith(PREFIX)})


def module_tensors(folder: Path) -> dict[str, str]:
    """The name of every tensor under `mtp.*` in a folder, and the file it is in."""
    names = tensor_files(partial(file_in, folder), folder)
    return {name: file for name, file in names.items() if name.startswith(PREFIX)}


def load_module(
    make: Callable[[], NativeDrafter], folder: Path, where: str | Path, config: DeepseekV4Config
) -> NativeDrafter:
    """A module with the tensors of a folder, in the dtype of the target's `config`; those in FP8 or FP4 are
    dequantised. Hyper-connections, norms and router bias stay in fp32, as in the target.

    Raises `ValueError` that names them for tensors that are missing, of other shapes, or not of such a module, before
    any is read.
    """
    with torch.device("meta"):  # 256 experts of V4-Flash need no random values first
        drafter = make()
    drafter.rotary_emb = DeepseekV4RotaryEmbedding(drafter.config)  # no checkpoint has its buffers
    dtype = config.dtype or torch.get_default_dtype()
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # as config.json has it
    files = module_tensors(folder)
    plan = {}
    for name, value in drafter.state_dict().items():
        stored = drafter.checkpoint_name(name)
        plan[name] = [(stored, value.shape)] if stored in files else _sources(stored, value.shape)
    needed = {stored: shape for sources in plan.values() for stored, shape in sources}
    what = f"the {_NAMES[drafter.kind]} of {where}"
    _check_names(needed, files, what)
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(folder / file, framework="pt")) for file in set(files.values())}
        _check_shapes(needed, opened, files, what)
        state = {}
        for name, value in drafter.state_dict().items():
            keep = any(part in name for part in drafter._keep_in_fp32_modules_strict)
            state[name] = torch.empty(value.shape, dtype=torch.float32 if keep else dtype)
            # Read one by one, so that no more than one is held twice
            parts = state[name].flatten(0, 1).chunk(len(plan[name])) if len(plan[name]) > 1 else [state[name]]
            for (stored, _), part in zip(plan[name], parts, strict=True):
                part.copy_(_read(opened, files, stored).view(part.shape))
    drafter.load_state_dict(state, assign=True)
    return drafter.eval()


def _sources(name: str, shape: torch.Size) -> list[tuple[str, tuple[int, ...]]]:
    """The official tensors that a tensor in transformers' naming is put together from, in order, with their shapes:
    one, or those of all experts."""
    if match := _EXPERTS.fullmatch(name):
        parts = ("w1", "w3") if match["part"] == "gate_up_proj" else ("w2",)
        stem, rows = f"{match['stem']}ffn.experts.", shape[1] // len(parts)
        return [(f"{stem}{i}.{part}.weight", (rows, shape[2])) for i in range(shape[0]) for part in parts]
    prefix, number, inside = name.split(".", 2)
    for ours, official in _OFFICIAL_NAMES.items():
        if inside.startswith(ours):
            inside = official + inside.removeprefix(ours)
            break
    return [(f"{prefix}.{number}.{inside}", tuple(shape))]


def _scale(name: str, names: Collection[str]) -> str | None:
    """The scale beside a weight, which says that it is quantised."""
    stem = name.removesuffix("weight")
    found = [scale for scale in (f"{stem}scale", f"{stem}weight_scale_inv") if scale in names]
    return found[0] if stem != name and found else None


def _check_names(needed: Collection[str], files: Collection[str], what: str) -> None:
    if missing := [name for name in needed if name not in files]:
        more = f", and {len(missing) - 1} more are missing" if len(missing) > 1 else ""
        raise ValueError(f"{what} is incomplete: there is no tensor named {missing[0]}{more}")
    known = {*needed, *(_scale(name, files) for name in needed)}
    prefixes = tuple({".".join(name.split(".", 2)[:2]) + "." for name in needed})  # not those of a second module
    extra = sorted(name for name in files if name.startswith(prefixes) and name not in known)
    if extra := [name for name in extra if not _LEFT_ALONE.fullmatch(name)]:
        names = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
        raise ValueError(f"{what} has tensors of another architecture: {names}")


def _check_shapes(needed: dict[str, tuple[int, ...]], opened: dict, files: dict[str, str], what: str) -> None:
    for name, shape in needed.items():
        part = opened[files[name]].get_slice(name)
        found = tuple(part.get_shape())
        if part.get_dtype() in _PACKED and _scale(name, files):
            found = (*found[:-1], 2 * found[-1])
        if found != tuple(shape):
            raise ValueError(f"{what} does not fit the target's config: {name} is {found}, expected {tuple(shape)}")


def _read(opened: dict, files: dict[str, str], name: str) -> torch.Tensor:
    """One tensor of the checkpoint, in bf16 where a scale beside it says that it is quantised."""
    tensor = opened[files[name]].get_tensor(name)
    if (scale := _scale(name, files)) is None:
        return tensor
    pair = {"weight": tensor, "weight_scale_inv": opened[files[scale]].get_tensor(scale)}
    return Fp8Dequantize(None).convert(pair)["weight"]
