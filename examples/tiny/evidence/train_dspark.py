"""Train DeepSeek's own drafter, a DSpark module (`hyperdflash/generation/dspark.py`), for the tiny target.

    python examples/tiny/evidence/train_dspark.py --seed 42    # resumes; writes the features that are missing

From scratch. Data, budget, batches, anchors and schedule are those of `training/recipes/tiny_headline.yaml`, the
drafters' recipe, and so are the options of `drafter` that a DSpark module has too: `block_size` (anchor and drafts),
`mask_token_id`, `target_layer_ids` (by default the last three, as in DeepSeek's), `markov_rank`. Its sizes are the
target's, in three stages, and its hyper-connections begin as the target's do (`make/target_config.py` says why).

The loss is DeepSeek's own (arXiv 2607.05147; `deepspec/modeling/dspark/loss.py` in deepseek-ai/DeepSpec), to have the
rival that it is elsewhere: a tenth of cross-entropy and nine tenths of the L1 distance to the target's distribution,
both with slot weights, and the binary cross-entropy of the confidence head, which unlike that of our drafters reaches
the layers. Evaluations log the cross-entropy as their loss.

Writes `build/baselines/dspark-SEED/final`, which `load_dspark` and `dspark:N=FOLDER` of the benchmark read.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from train_mtp import NativeWeights  # beside this file
from transformers import AttentionInterface, AutoConfig, DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import eager_attention_forward
from transformers.utils import logging

from hyperdflash.common.files import written_whole
from hyperdflash.configuration_hyperdflash import HyperDFlashConfig
from hyperdflash.generation.dspark import SETTINGS, DeepseekV4DSpark
from hyperdflash.training import features
from hyperdflash.training.arguments import RecipeError, load_recipe, recipe_values
from hyperdflash.training.blocks import PackedBlocks, SampleMasks, attend_by_sample, previous_ids
from hyperdflash.training.losses import LossOutput, slot_weights
from hyperdflash.training.run_folder import FINAL, check_run_folder, list_checkpoints, resume_point, write_run_files
from hyperdflash.training.train import make_trainer, prepare, run_steps
from hyperdflash.training.trainer import HyperDFlashTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "make"))
from target_config import start_hyper_connections  # noqa: E402

RECIPE = "training/recipes/tiny_headline.yaml"
L1 = 0.9  # the share of the cross-entropy that the distance takes
SOURCE = {"context_source": "hidden_layers", "reducer": "fc", "draft_head": "markov", "markov_rank": 64}

# V4's attention with its sinks, a sample at a time
AttentionInterface.register(
    "packed_sinks", lambda *args, **kw: attend_by_sample(*args, attend=eager_attention_forward, **kw)
)


class DSparkTrainer(NativeWeights, HyperDFlashTrainer):
    """Every slot predicts, the anchor's too; the context is a window before the block."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._drafter.set_attn_implementation("packed_sinks")

    def _draft(self, model: torch.nn.Module, packed: PackedBlocks, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        config, drafter = self.drafter_config, self._drafter
        mask = SampleMasks(packed, config.dspark_block_size, config.sliding_window, window_moves=False)
        hidden, collapsed = model(**inputs, attention_mask=mask)  # (1, N * K, D)
        states = drafter.markov_head.markov_w1(previous_ids(packed))  # (1, N * K, R)
        confidence = drafter.confidence_head(collapsed.flatten(0, 1), states.flatten(0, 1))  # (N * K,)
        return {"last_hidden_state": hidden, "markov_states": states, "confidence_logits": confidence[None, :, None]}

    def _loss_options(self) -> dict:
        return {"markov_w2": self._drafter.markov_head.markov_w2.weight, "l1": L1}

    def _confidence_loss(
        self, logits: torch.Tensor, output: LossOutput, labels: torch.LongTensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Binary cross-entropy of the probability that a sampled draft is accepted; logits `(N, S, 1)`."""
        weights = slot_weights(self.num_slots, self.args.gamma, logits.device)
        loss = F.binary_cross_entropy_with_logits(logits[..., 0].float(), output.overlap, reduction="none")
        return (loss * weights * (labels != -100)).sum() / (weights * counts).sum().clamp(min=1e-8)


def new_module(drafter: HyperDFlashConfig, target: DeepseekV4Config, seed: int) -> DeepseekV4DSpark:
    """With random weights, in fp32; its experts run one by one, as those of `train_mtp.py` do."""
    settings = {
        "dspark_block_size": drafter.block_size - 1,
        "dspark_target_layer_ids": drafter.target_layer_ids,
        "dspark_noise_token_id": drafter.mask_token_id,
        "dspark_markov_rank": drafter.markov_rank,
    }
    torch.manual_seed(seed)
    module = DeepseekV4DSpark(DeepseekV4Config(**{**target.to_dict(), **settings}))
    start_hyper_connections(module)
    module.set_experts_implementation("eager")
    return module


def complete(overrides: list[str]) -> list[str]:
    """The overrides of the recipe with what a DSpark module reads, and its loss; what is given wins."""
    recipe = load_recipe(RECIPE, overrides)
    target = AutoConfig.from_pretrained(recipe.target, revision=recipe.target_revision)
    drafter = {**SOURCE, "target_layer_ids": list(range(target.num_hidden_layers))[-3:], **recipe.drafter}
    if drafter["context_source"] != "hidden_layers":
        raise RecipeError(
            f"a DSpark module reads 'hidden_layers'; drafter.context_source is {drafter['context_source']!r}"
        )
    if recipe.attention not in (None, "eager"):
        raise RecipeError(
            f"a DSpark module's attention has sinks, which 'eager' knows alone; got {recipe.attention!r}"
        )
    settings = ["kl_alpha=0", "attention=eager", "resume_from_checkpoint=true"]
    return [*settings, *overrides, f"drafter={json.dumps(drafter)}"]


def train(overrides: list[str]) -> Path:
    """Run the recipe with these overrides; returns the module's folder. Errors as in `hyperdflash train`."""
    overrides = complete(overrides)
    args = load_recipe(RECIPE, overrides)
    output = Path(args.output_dir)
    check_run_folder(args, dry_run=False)
    if args.features == "offline":
        features.run(argparse.Namespace(recipe=RECIPE, overrides=overrides, verify=False))
    parts = prepare(args)
    parts.drafter = parts.model = new_module(parts.drafter.config, parts.features.head.config, args.seed)
    trainer = make_trainer(args, parts, DSparkTrainer)
    parts.facts["num_parameters"] = parts.facts["num_trainable_parameters"] = parts.drafter.num_parameters()
    parts.facts["fixed"]["drafter"] = {"kind": "dspark", **args.drafter}  # no other drafter's run is resumed
    checkpoint = resume_point(args, parts.facts)
    command = shlex.join(["python", "examples/tiny/evidence/train_dspark.py", *overrides])
    write_run_files(output, args, recipe_values(RECIPE, overrides), command, parts.facts, parts.drafter)
    run_steps(trainer, args, parts, checkpoint, profile=False)
    trainer._load_from_checkpoint(str(list_checkpoints(output)[-1]))  # a finished run was not trained again
    with written_whole(output / FINAL, overwrite=True) as folder:
        save_file(parts.drafter.official_state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
        settings = {name: getattr(parts.drafter.config, name) for name in SETTINGS}
        (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", **settings}, indent=2) + "\n")
    return output / FINAL


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe")
    args = parser.parse_args()
    out = args.output or Path(__file__).resolve().parents[1] / "build" / "baselines" / f"dspark-{args.seed}"
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    train([f"seed={args.seed}", f"output_dir={out}", *args.overrides])


if __name__ == "__main__":
    main()
