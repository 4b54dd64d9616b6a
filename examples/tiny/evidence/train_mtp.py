"""Train the tiny target's native MTP module further on text written by the target: the stronger MTP baseline.

    python examples/tiny/evidence/train_mtp.py --seed 42    # resumes; needs the features of `hyperdflash features`

Data, stored residuals, budget and batches are those of `training/recipes/tiny_headline.yaml`, the drafters' recipe. As
in its original training, the module predicts one token from the target's residual and is not trained on its own
output. Writes `build/baselines/mtp-SEED/final/model.safetensors`.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, TrainerControl, TrainingArguments, set_seed
from transformers.utils import logging

from hyperdflash.common.checkpoint import load_target
from hyperdflash.common.files import written_whole
from hyperdflash.common.precision import has_bf16
from hyperdflash.generation.mtp import DeepseekV4MTP, load_mtp
from hyperdflash.training.arguments import load_recipe
from hyperdflash.training.data import load_recipe_data
from hyperdflash.training.dataset import SampleDataset, collate
from hyperdflash.training.features import open_features, read_drafter_config
from hyperdflash.training.run_folder import list_checkpoints, read_state
from hyperdflash.training.trainer import EpochTrainer, decode_prompts

RECIPE = "training/recipes/tiny_headline.yaml"
LEARNING_RATE = 1e-3


class NativeWeights:
    """A trainer of a module of `mtp.*` that reads a checkpoint's weights by itself, and all of them: the library reads
    `config.json` as that of any model, to which V4's kinds of layers are unknown."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        (model or self.model).load_state_dict(load_file(Path(resume_from_checkpoint) / "model.safetensors"))


class MTPTrainer(NativeWeights, EpochTrainer):
    """Cross-entropy of the token after the next one; evaluation is real decoding with six drafts.

    Args:
        recipe (`HyperDFlashTrainingArguments`): the drafters' recipe.
        target, features: the target, and its stored residuals (`CachedFeatures`).
    """

    def __init__(self, model, args, *, recipe, target, features, **kwargs):
        super().__init__(model, args, data_collator=collate, **kwargs)
        self.recipe, self.target, self.features = recipe, target, features

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The module at position t reads the residual of t and the token t + 1, and predicts t + 2."""
        return mtp_loss(model, self.features, inputs)

    def evaluate(self, *args, metric_key_prefix: str = "eval", **kwargs) -> dict[str, float]:
        recipe = self.recipe
        tau = decode_prompts(
            self.accelerator.unwrap_model(self.model),
            self.target,
            self.eval_dataset.rows,
            recipe.eval_decode_prompts,
            recipe.eval_decode_max_new_tokens,
        )
        metrics = {f"{metric_key_prefix}_acceptance_length": tau}
        self.log(metrics)
        self.control: TrainerControl = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def load_module(target: str, config) -> DeepseekV4MTP:
    """The target's module in fp32; its experts run one by one, which all runs did and whose FLOP can be counted."""
    mtp = load_mtp(target, config, max_drafts=6).float()
    mtp.set_experts_implementation("eager")
    return mtp


def mtp_loss(model, features, batch: dict) -> torch.Tensor:
    """Cross-entropy of tokens written by the target that follow another token of the target."""
    input_ids, supervised = batch["input_ids"], batch["loss_mask"].bool()
    next_ids, residual, head = input_ids[:, 1:-1], features(batch).residual[:, :-2].float(), features.head
    hidden, _ = model(head.embed(next_ids).float(), residual, next_ids)
    keep = supervised[:, 1:-1] & supervised[:, 2:]  # as in decoding, the token t + 1 is the target's own
    dtype = head.lm_head.dtype if has_bf16(hidden.device) else torch.float32
    with torch.autocast(hidden.device.type, enabled=False):
        logits = F.linear(hidden[keep].to(dtype), head.lm_head.to(dtype)).float()
    return F.cross_entropy(logits, input_ids[:, 2:][keep])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe")
    args = parser.parse_args()
    out = args.output or Path(__file__).resolve().parents[1] / "build" / "baselines" / f"mtp-{args.seed}"

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    set_seed(args.seed)
    recipe = load_recipe(RECIPE, args.overrides)
    tokenizer = AutoTokenizer.from_pretrained(recipe.target)
    target, _ = load_target(recipe.target, None, "float32")
    target.requires_grad_(False)
    rows, _ = load_recipe_data(recipe, recipe.train_data, tokenizer)
    eval_rows, _ = load_recipe_data(recipe, recipe.eval_data, tokenizer)
    stored = open_features(recipe, read_drafter_config(recipe))
    trainer = MTPTrainer(
        load_module(recipe.target, target.config),
        TrainingArguments(
            output_dir=str(out),
            seed=args.seed,
            use_cpu=True,
            bf16=has_bf16(),
            max_steps=recipe.max_steps,
            train_sampling_strategy=recipe.train_sampling_strategy,
            per_device_train_batch_size=recipe.per_device_train_batch_size,
            learning_rate=args.learning_rate,
            adam_beta2=recipe.adam_beta2,
            weight_decay=recipe.weight_decay,
            lr_scheduler_type=recipe.lr_scheduler_type,
            lr_scheduler_kwargs=recipe.lr_scheduler_kwargs,
            warmup_steps=recipe.warmup_steps,
            max_grad_norm=recipe.max_grad_norm,
            logging_steps=recipe.logging_steps,
            save_steps=recipe.save_steps,
            save_total_limit=1,
            eval_strategy=recipe.eval_strategy,
            eval_steps=recipe.eval_steps,
            remove_unused_columns=False,
            report_to="none",
        ),
        recipe=recipe,
        target=target,
        features=stored,
        train_dataset=SampleDataset(rows, stored),
        eval_dataset=SampleDataset(eval_rows),
    )
    whole = [folder for folder in list_checkpoints(out) if read_state(folder) is not None]
    if whole and read_state(whole[-1])["global_step"] >= recipe.max_steps:  # the Trainer would take one more step
        trainer._load_from_checkpoint(str(whole[-1]))
    else:
        trainer.train(resume_from_checkpoint=str(whole[-1]) if whole else None)
    with written_whole(out / "final", overwrite=True) as folder:
        save_file(trainer.model.official_state_dict(), folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
