"""HyperDFlashTrainer: transformers' `Trainer` with the drafter's loss.

This file adds what the library cannot know. Denominators are counted over the whole accumulation window and all
processes before its first forward, so gradients do not depend on how a batch is split. Anchors come from seed, step
and sample, so a resumed run draws what the uninterrupted one would have drawn.

Legend: B batch, T sequence, A anchors, K block (anchor included), S slots that predict (of a HyperDFlash drafter all
but the anchor's), P slots with KL, D hidden; of the packed batch, N blocks and C context positions.
"""

import contextlib
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor
from transformers import DeepseekV4ForCausalLM, EvalPrediction, PreTrainedModel, Trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import ModelOutput, logging

from ..common.precision import has_bf16
from ..generation.comparison import timed_greedy
from ..generation_hyperdflash import SpeculativeStats
from .arguments import HyperDFlashTrainingArguments
from .blocks import (
    ATTENTIONS,
    FLEX_BLOCK,
    PackedBlocks,
    anchor_seed,
    draw_anchors,
    make_blocks,
    pack,
    packed_masks,
    previous_ids,
)
from .data import read_lengths
from .dataset import EpochSampler, SampleDataset, collate
from .feature_cache import CachedFeatures
from .losses import LossOutput, confidence_loss, drafter_loss
from .metrics import slot_sums, summarize
from .progress import StepLog
from .run_folder import STATE_FILE
from .target import Features, OnlineFeatures

if TYPE_CHECKING:  # costs a second to import
    import datasets

logger = logging.get_logger(__name__)

_BY_SLOT = ("last_hidden_state", "markov_states", "confidence_logits")  # outputs `(1, N * K, ...)`
EVALUATION_STEP = -1  # every evaluation draws the anchors of this step, so they are always the same


class EpochTrainer(Trainer):
    """A `Trainer` whose batches come in the order of `EpochSampler`."""

    def _get_train_sampler(self, train_dataset=None) -> EpochSampler:
        args = self.args
        self._sampler = EpochSampler(
            read_lengths(self.train_dataset.rows),
            self._train_batch_size * args.gradient_accumulation_steps * args.world_size,  # samples per step
            args.seed if args.data_seed is None else args.data_seed,
            group_by_length=args.train_sampling_strategy == "group_by_length",
        )
        return self._sampler

    def _run_epoch(self, *, epoch: int, **kwargs):
        self._sampler.set_epoch(epoch)  # the library does not reach it behind every wrapper that resuming adds
        return super()._run_epoch(epoch=epoch, **kwargs)


class HyperDFlashTrainer(EpochTrainer):
    """Trains a [`HyperDFlashModel`], or a `PeftModel` of one.

    Args:
        model: the drafter, in fp32; nothing of the target is part of it.
        args (`HyperDFlashTrainingArguments`)
        features (`OnlineFeatures` or `CachedFeatures`): the target's side of every batch.
        train_dataset, eval_dataset (`SampleDataset`)
        target (`DeepseekV4ForCausalLM`, *optional*): needed for `eval_decode_prompts`.

    Raises `ValueError` when a loss is not finite, naming the samples.
    """

    # A micro-batch's loss is a share of its window's: the library must not divide by the accumulation steps too
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: torch.nn.Module,
        args: HyperDFlashTrainingArguments,
        *,
        features: OnlineFeatures | CachedFeatures,
        train_dataset: SampleDataset,
        eval_dataset: SampleDataset | None = None,
        target: DeepseekV4ForCausalLM | None = None,
        **kwargs,
    ):
        super().__init__(
            model,
            args,
            data_collator=collate,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self._summarize_predictions,
            **kwargs,
        )
        if args.eval_decode_prompts and target is None:
            raise ValueError("eval_decode_prompts decodes with the target: pass target=")
        # Not known before `super().__init__`, which makes the accelerator
        if args.eval_decode_prompts and self.is_fsdp_enabled:
            raise ValueError("eval_decode_prompts needs the whole drafter in one process: set it to 0 under FSDP")
        self.features, self.decode_target = features, target
        self.head = features.head.to(args.device)  # the target may be on other devices
        # The logits' matrix products: most of a small drafter's step
        self.lm_head = self.head.lm_head if has_bf16(args.device) else self.head.lm_head.float()
        self.drafter_config = self._drafter.config
        self.noise_ids = self._drafter.new_noise_ids("cpu")[0]  # (K,)
        self.num_slots = self._drafter.max_drafts
        self.num_kl_slots = min(args.kl_num_slots, self.num_slots)
        # Training takes packed batches
        self._drafter.set_attn_implementation(
            ATTENTIONS[args.attention or ("flex_attention" if args.device.type == "cuda" else "eager")]
        )
        self.stopwatch: Stopwatch | None = None
        self._losses: list[tuple[torch.Tensor, list[int]]] = []  # of this step's micro-batches, and their samples
        self._start_window()
        # The library adds one of these two, by `disable_tqdm`; StepLog does the work of both
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(StepLog())

    @property
    def _drafter(self) -> PreTrainedModel:
        """The drafter without the wrappers of torch.compile, DDP or FSDP, and peft."""
        model = self.accelerator.unwrap_model(self.model)
        return model if isinstance(model, PreTrainedModel) else model.get_base_model()  # a PeftModel is not one

    # ------------------------------------------------------------------------------------------------------- batches

    def get_batch_samples(
        self, epoch_iterator: Iterator[dict], num_batches: int, device: torch.device
    ) -> tuple[list[dict], torch.Tensor]:
        """The micro-batches of one optimizer step with their blocks, and the valid slots of all of them, `(S,)`."""
        # The library counts a batch's `labels`, which here do not exist until anchors are drawn
        with self._timed("data"):
            batches = []
            for _ in range(num_batches):
                batch = next(epoch_iterator, None)
                if batch is not None:
                    batches.append(self._add_blocks(batch, self.state.global_step))
            counts = sum((batch["blocks"]["labels"] != -100).sum(0) for batch in batches)  # (S,)
            for batch in batches:
                lengths, blocks = batch["on_cpu"].lengths, batch["blocks"]
                self._window_tokens += sum(lengths)
                # Only batches of data: one of fillers alone (lengths 0) is normal at the end of an epoch
                self._window_empty += int(any(lengths) and not (blocks["labels"] != -100).any())
                batch["blocks"] = {name: _move(value, device) for name, value in blocks.items()}
            # A collective: EpochSampler gives every process the same number of windows
            return batches, self.accelerator.reduce(_move(counts, device), "sum")

    def _add_blocks(self, batch: dict, step: int) -> dict:
        args = self.args
        # On the CPU, whose generator draws the same anchors whatever device trains
        rows = batch["on_cpu"]
        seeds = [anchor_seed(args.seed, step, sample_id) for sample_id in rows.sample_ids]
        blocks = make_blocks(
            rows.input_ids,
            rows.loss_mask,
            draw_anchors(rows.loss_mask, args.num_anchors, seeds),
            block_size=len(self.noise_ids),
            mask_token_id=int(self.noise_ids[-1]),
            num_labels=self.num_slots,
        )
        packed = pack(blocks, FLEX_BLOCK if self.drafter_config._attn_implementation == "flex_attention" else 1)
        # As a dict: `_prepare_inputs` moves the tensors of dicts to the device, not those of a dataclass
        return {**batch, "blocks": vars(packed)}

    # ---------------------------------------------------------------------------------------------------------- loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,  # (S,)
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """This micro-batch's share of the window's loss, times the processes over which gradients are averaged.

        With `return_outputs`, also the sums of each sample `(B, 6, S)`.
        """
        args = self.args
        packed = PackedBlocks(**inputs["blocks"])
        N = sum(packed.num_anchors)  # without padding
        labels = packed.labels[:N]  # (N, S)
        with self._timed("target"):
            # Online features come from the target's device, which may be another one
            features = Features(*(x.to(args.device) for x in self.features(inputs)))
            residual = features.residual
            teacher = self._teacher(residual, packed, N, self.num_kl_slots, args.kl_teacher)
            # The confidence head estimates acceptance by the target itself, so it learns from hc_head whatever the
            # teacher of the KL term is
            verifier = None
            if self._drafter.confidence_head is not None:
                verifier = self._teacher(residual, packed, N, self.num_slots, "hc_head")
        drafted = self._draft(model, packed, **self._inputs(features.context_hidden_states, packed))
        # (N, S, ...): the anchor's slot, which is the first, may predict nothing
        slots = {
            name: x.view(len(packed.labels), -1, x.shape[-1])[:N, -self.num_slots :]
            for name, x in drafted.items()
            if name in _BY_SLOT
        }
        with self._timed("loss"):
            output = drafter_loss(
                slots["last_hidden_state"],
                labels,
                self.lm_head,
                teacher,
                gamma=args.gamma,
                alpha=args.kl_alpha,
                temperature=args.kl_temperature,
                counts=num_items_in_batch,
                chunk_size=args.loss_chunk_size,
                markov_states=slots.get("markov_states"),
                verifier_hidden=verifier,
                **self._loss_options(),
            )
            sums = slot_sums(output, labels, packed.samples[:N], len(inputs["input_ids"]))  # (B, 6, S)
            loss = output.loss
            if "confidence_logits" in slots:
                # Evaluation has no counts of a window, and does not use this loss
                counts = (labels != -100).sum(0) if num_items_in_batch is None else num_items_in_batch
                confidence = self._confidence_loss(slots["confidence_logits"], output, labels, counts)
                loss = loss + (confidence - confidence.detach())  # adds a gradient, but nothing to the reported loss
        self._losses.append((loss.detach(), inputs["on_cpu"].sample_ids))
        # Evaluations run inside a window and must not enter its figures
        if self.model.training:
            self._window_sums += sums.sum(0)
        else:
            self._check_losses()
        # DDP and FSDP average gradients over processes, but the shares of a window have to be added
        loss = loss * self.accelerator.num_processes
        return (loss, sums) if return_outputs else loss

    def _check_losses(self) -> None:
        """Raises `ValueError` where a micro-batch's loss was not finite, naming its samples."""
        losses, self._losses = self._losses, []
        for loss, samples in losses:
            if not torch.isfinite(loss):
                raise ValueError(
                    f"the loss is {float(loss)} at step {self.state.global_step}, samples {samples}: look at their "
                    "features, or lower the learning rate"
                )

    def _inputs(self, context: torch.Tensor, packed: PackedBlocks) -> dict[str, torch.Tensor]:
        """Of all blocks; the context comes as `(B, T, m, L * D)`."""
        positions = packed.position_ids[0, : len(packed.context_samples)]  # (C,)
        return {
            "noise_embeds": self.head.embed(packed.input_ids).float(),  # (1, N * K, D)
            "context_hidden_states": context[packed.context_samples.clamp(min=0), positions][None].float(),
            "position_ids": packed.position_ids,
        }

    # The three that differ for another drafter: its forward, and the losses of its heads

    def _draft(self, model: torch.nn.Module, packed: PackedBlocks, **inputs: torch.Tensor) -> ModelOutput:
        """The drafter's output for all blocks, its tensors `(1, N * K, ...)`."""
        return model(
            **inputs,
            attention_mask=packed_masks(packed, self.drafter_config),
            previous_ids=previous_ids(packed) if self.drafter_config.draft_head == "markov" else None,
        )

    def _loss_options(self) -> dict:
        """More arguments of `drafter_loss`."""
        markov_head = self._drafter.markov_head
        return {"markov_w2": None if markov_head is None else markov_head.markov_w2}

    def _confidence_loss(
        self, logits: torch.Tensor, output: LossOutput, labels: torch.LongTensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Of the confidence head's logits `(N, S, ...)`; `counts` `(S,)` are the window's."""
        return confidence_loss(logits, output, labels, counts.sum())

    def _teacher(
        self, residual: torch.Tensor, packed: PackedBlocks, num_blocks: int, num_slots: int, kind: str
    ) -> torch.Tensor:
        """The target's normed states that predict the first slots of the blocks, `(N, P, D)`."""
        samples, positions = packed.samples[:num_blocks, None], packed.teacher_positions[:num_blocks, :num_slots]
        return self.head.teacher_hidden(residual[samples, positions], kind)

    def training_step(self, model, inputs: dict, num_items_in_batch=None) -> torch.Tensor:
        with self._timed("step"):
            return super().training_step(model, inputs, num_items_in_batch)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: torch.Tensor | None = None) -> float | None:
        """The norm, before the optimizer's step. Raises `ValueError` where it is not finite: one such step would end
        in NaN weights, and the next checkpoint would replace a good one."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if norm is None:  # DeepSpeed may keep it to itself
            self._check_losses()
            return None
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)  # FSDP2's is spread over processes
        # Looked at once a step, as the device has to be waited for: a loss of NaN has such a gradient
        losses_are_finite = self.accelerator.scaler is None and math.isfinite(norm)
        self._losses = [] if losses_are_finite else self._losses
        self._check_losses()
        # Under fp16 the scaler skips such a step by itself, and lowers its scale
        if self.accelerator.scaler is None and not math.isfinite(norm):
            raise ValueError(
                f"the gradient's norm is {norm} at step {self.state.global_step}: no step was taken, and the last "
                "checkpoint is good. Look at the data and features of this step, or lower the learning rate"
            )
        return norm

    def floating_point_ops(self, inputs: dict) -> int:
        return 0  # not estimated

    # ------------------------------------------------------------------------------------------------------- logging

    def _start_window(self) -> None:
        # In fp64, as `slot_sums`: fp32 cannot count by ones above 2**24 slots
        self._window_sums = torch.zeros(6, self.num_slots, dtype=torch.float64, device=self.args.device)
        self._window_tokens, self._window_empty, self._window_start = 0, 0, time.perf_counter()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the window's CE, KL, expected acceptance length and speed to what the Trainer logs while training."""
        # Evaluations and the end of training log too, under other names
        if "loss" in logs:
            totals = torch.tensor([self._window_tokens, self._window_empty], device=self.args.device)
            tokens, empty = self.accelerator.reduce(totals, "sum").tolist()
            figures = self._summarize(self.accelerator.reduce(self._window_sums, "sum"))
            for name in ("ce", "kl", "expected_acceptance_length"):
                logs[name] = figures[name]
            logs["tokens_per_second"] = tokens / (time.perf_counter() - self._window_start)
            if empty:
                logs["batches_without_targets"] = empty
            self._start_window()
        super().log(logs, start_time)

    def _summarize(self, sums: torch.Tensor) -> dict:
        args = self.args
        return summarize(
            sums,
            gamma=args.gamma,
            alpha=args.kl_alpha,
            temperature=args.kl_temperature,
            num_kl_slots=self.num_kl_slots,
        )

    def _timed(self, part: str) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.stopwatch is None else self.stopwatch.part(part)

    # ---------------------------------------------------------------------------------------------------- evaluation

    def prediction_step(
        self, model, inputs: dict, prediction_loss_only: bool, ignore_keys=None
    ) -> tuple[None, torch.Tensor, torch.Tensor]:
        """Sums `(B, 6 * S)` at fixed anchors in place of the library's logits and labels, and no loss: the library
        would average over batches, the sums give the exact value."""
        # Blocks first, so that they go to the device with the rest of the batch
        inputs = self._prepare_inputs(self._add_blocks(inputs, EVALUATION_STEP))
        with torch.no_grad(), self.compute_loss_context_manager():
            _, sums = self.compute_loss(model, inputs, return_outputs=True)
        # A row per sample, so that the library can drop the duplicates that fill up the last batch of a process.
        # The labels are a stand-in: without any, it does not call `compute_metrics`
        return None, sums.flatten(1), sums.flatten(1)

    def _summarize_predictions(self, prediction: EvalPrediction) -> dict:
        sums = torch.from_numpy(prediction.predictions).sum(0)  # (6 * S,)
        return self._summarize(sums.view(6, -1))

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs) -> EvalLoopOutput:
        """As in transformers, with real decoding where `eval_decode_prompts` asks for it."""
        start = time.perf_counter()
        # The data loader draws a seed from the global generator: without this, an evaluation would change the
        # dropout of all steps after it
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
            if self.args.eval_decode_prompts:
                output.metrics[f"{metric_key_prefix}_acceptance_length"] = self._decode()
        self._window_start += time.perf_counter() - start  # evaluation time is not training time
        return output

    def _decode(self) -> float:
        """Acceptance length over all rounds of greedy decoding of `eval_decode_prompts` prompts."""
        # The other processes wait in `reduce` with a zero, so the sum is the first one's figure
        result = torch.zeros(1, dtype=torch.float64, device=self.args.device)
        if self.is_world_process_zero():
            args, rows = self.args, self.eval_dataset.rows
            result += decode_prompts(
                self._drafter, self.decode_target, rows, args.eval_decode_prompts, args.eval_decode_max_new_tokens
            )
        return float(self.accelerator.reduce(result, "sum"))

    def _save_checkpoint(self, model, trial) -> None:
        """Raises `OSError` for a full disk, whichever library reports it. A partial checkpoint is removed."""
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            # The state is written last: where it exists, only the removal of older checkpoints can have failed
            if self.args.should_save and not (folder / STATE_FILE).exists():
                shutil.rmtree(folder, ignore_errors=True)
            raise OSError(f"{folder} was not written: {error}. Earlier checkpoints are kept") from error

    def _save(self, output_dir=None, state_dict=None):
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            for file in folder.glob("*.safetensors"):  # safetensors makes them readable only for their owner
                file.chmod(folder.stat().st_mode & 0o666)


def spaced_prompts(rows: "datasets.Dataset", num_prompts: int) -> list[list[int]]:
    """The ids before the first answer of evenly spaced rows."""
    indices = torch.linspace(0, len(rows) - 1, min(num_prompts, len(rows))).long().tolist()
    # At least one token, as an answer may start at position 0
    return [row["input_ids"][: max(row["loss_mask"].index(1), 1)] for row in (rows[i] for i in indices)]


@torch.no_grad()
def decode_prompts(
    drafter: PreTrainedModel,
    target: DeepseekV4ForCausalLM,
    rows: "datasets.Dataset",
    num_prompts: int,
    max_new_tokens: int,
) -> float:
    """tau of greedy decoding from evenly spaced rows' prompts: 1 + accepted drafts per round.

    The drafter is left as it was: in training mode, with accelerate's forward and its own attention.
    """
    training, implementation = drafter.training, drafter.config._attn_implementation
    drafter.eval()
    if implementation == "flex_attention":  # compiled for the shapes of training
        drafter.set_attn_implementation("sdpa")
    autocast_forward = drafter.__dict__.pop("forward", None)  # accelerate's, under bf16: decoding has none
    stats = SpeculativeStats()
    try:
        for prompt in spaced_prompts(rows, num_prompts):
            out, _ = timed_greedy(target, torch.tensor([prompt], device=target.device), max_new_tokens, drafter)
            stats.extend(out.speculation)
    finally:
        drafter.train(training).set_attn_implementation(implementation)
        if autocast_forward is not None:
            drafter.forward = autocast_forward
    return stats.acceptance_length


def _move(value, device: torch.device):
    """A tensor of the CPU on the device; what is no tensor stays as it is."""
    if device.type != "cuda" or not isinstance(value, torch.Tensor):
        return value
    return value.pin_memory().to(device, non_blocking=True)  # from pinned memory, without waiting for the device


class Stopwatch:
    """Seconds spent in each part of a step; nested parts count for both."""

    def __init__(self, device: torch.device):
        self.device, self.seconds = device, {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        # Kernels run asynchronously: without this, their time falls to a later part
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
