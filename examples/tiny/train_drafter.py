"""Train the tiny drafter on the texts that the tiny target wrote.

    python examples/tiny/train_drafter.py --steps 1500    # resumes from examples/tiny/build/drafter if it exists

The target's residuals are computed once and kept in memory in bf16 (1.5 kB a token). Writes `examples/tiny/drafter/`,
with the expected acceptance length on held-out texts in `drafter_report.json`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from data import make_batches
from tokenizer import MASK_TOKEN
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hyperdflash.generation.init import init_drafter
from hyperdflash.generation_hyperdflash import ResidualTap
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.training.blocks import draw_anchors, make_blocks
from hyperdflash.training.losses import drafter_loss

HERE = Path(__file__).resolve().parent


def new_drafter(target: Path, build: Path) -> HyperDFlashModel:
    """What `hyperdflash init` makes for the tiny target: four layers as wide as it, which see 256 positions."""
    folder = build / "new-drafter"
    if not folder.exists():
        init_drafter(
            target,
            folder,
            mask_token_id=AutoTokenizer.from_pretrained(target).convert_tokens_to_ids(MASK_TOKEN),
            block_size=7,
            num_hidden_layers=4,
            intermediate_size=512,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=32,
            sliding_window=256,
        )
    drafter = HyperDFlashModel.from_pretrained(folder, dtype=torch.float32)
    drafter.config.target_name_or_path = "tiny-deepseek-v4"
    drafter.config.encoding = {"generation": "preview", "modes": ["non-thinking"]}
    return drafter


def round_to_bf16(drafter: HyperDFlashModel) -> None:
    """Everything but the gate, which stays in fp32 as it does in the target."""
    for name, parameter in drafter.named_parameters():
        if not any(kept in name for kept in drafter._keep_in_fp32_modules_strict):
            parameter.data = parameter.data.to(torch.bfloat16)


def load_texts(build: Path, split: str) -> list[np.ndarray]:
    """Texts as arrays `(T, 2)` of token id and loss mask."""
    texts = []
    for file in sorted((build / "texts").glob(f"{split}-*.npz")):
        if "partial" in file.name:
            continue
        with np.load(file) as part:
            rows = np.stack([part["input_ids"].astype(np.int64), part["loss_mask"].astype(np.int64)], axis=1)
            texts += [rows[a:b] for a, b in zip(part["offsets"], part["offsets"][1:], strict=False)]
    return texts


def pad(batch: list[np.ndarray]) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`input_ids` and `loss_mask`, each `(B, T)`, padded on the right."""
    padded = torch.zeros(len(batch), max(map(len, batch)), 2, dtype=torch.long)
    for row, text in enumerate(batch):
        padded[row, : len(text)] = torch.from_numpy(text)
    return padded[..., 0], padded[..., 1]


class DrafterTraining(nn.Module):
    """The drafter's loss on one batch. The target is no submodule: nothing of it is trained, moved or saved."""

    def __init__(self, drafter: HyperDFlashModel, target, args):
        super().__init__()
        self.drafter = drafter
        self.__dict__["target"] = target
        self.args = args
        self.residuals: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def residual(self, index: int, input_ids: torch.LongTensor) -> torch.Tensor:
        """The target's residual `(B, T, m, D)` of a batch, from memory after the first time."""
        if index not in self.residuals:
            with ResidualTap(self.target, self.drafter.config) as tap, torch.autocast("cpu", enabled=False):
                self.target.model(input_ids, use_cache=False)
                self.residuals[index] = tap.take().to(torch.bfloat16)
        return self.residuals[index].float()

    def forward(self, index, input_ids, loss_mask, anchors):
        config, target = self.drafter.config, self.target
        blocks = make_blocks(
            input_ids,
            loss_mask,
            anchors,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            window=config.sliding_window,
        )
        residual = self.residual(int(index), input_ids)
        hidden = self.drafter(
            noise_embeds=target.model.embed_tokens(blocks.input_ids).detach(),
            context_hidden_states=residual,
            attention_mask=blocks.attention_mask,
            position_ids=blocks.position_ids,
        ).last_hidden_state
        B, A, S = blocks.labels.shape
        hidden = hidden.view(B, A, S + 1, -1)[:, :, 1:]
        kept = (blocks.labels != -100).any(-1)
        return drafter_loss(
            target.lm_head(hidden[kept]),
            self.teacher(residual, blocks.teacher_positions)[kept],
            blocks.labels[kept],
            gamma=self.args.gamma,
            alpha=self.args.alpha,
            temperature=1.0,
            num_kl_slots=2,
        )

    @torch.no_grad()
    def teacher(self, residual, positions):
        """The target's own logits for the first two slots, `(B, A, 2, V)`."""
        rows = torch.arange(len(residual))[:, None, None]
        picked = residual[rows, positions[..., :2]]  # (B, A, 2, m, D)
        hidden = self.target.model.norm(self.target.model.hc_head(picked.flatten(0, 1)))
        return self.target.lm_head(hidden).view(*positions.shape[:2], 2, -1)


@torch.no_grad()
def evaluate(model: DrafterTraining, texts: list[np.ndarray], num_anchors: int) -> dict:
    """Accuracy by slot and expected acceptance length (1 + sum of cumulative products) at fixed anchors."""
    model.eval()
    correct, valid = 0, 0
    for index, batch in enumerate(make_batches(texts, 3072, seed=0)):
        input_ids, loss_mask = pad(batch)
        anchors = draw_anchors(loss_mask, num_anchors, torch.Generator().manual_seed(index))
        out = model(-1 - index, input_ids, loss_mask, anchors)
        correct, valid = correct + out["num_correct"], valid + out["num_valid"]
    model.train()
    accuracy = correct / valid.clamp(min=1)
    return {
        "slot_accuracy": [round(x, 4) for x in accuracy.tolist()],
        "expected_acceptance_length": round(float(1 + accuracy.cumprod(0).sum()), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=HERE / "build")
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--output", type=Path, default=HERE / "drafter")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--tokens-per-batch", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=32, help="anchors drawn from every text at every step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--alpha", type=float, default=0.15, help="weight of the KL term")
    parser.add_argument("--gamma", type=float, default=4.0, help="decay of the slot weights")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    set_seed(0)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval().requires_grad_(False)
    drafter = new_drafter(args.target, args.build)
    model = DrafterTraining(drafter, target, args)
    batches = make_batches(load_texts(args.build, "train"), args.tokens_per_batch, seed=0)
    num_tokens = sum(len(text) for batch in batches for text in batch)
    print(f"{sum(map(len, batches))} texts, {num_tokens:,} tokens, {len(batches)} batches")

    def collate(items):
        input_ids, loss_mask = pad(batches[items[0]])
        anchors = draw_anchors(loss_mask, args.anchors, None)
        return {"index": torch.tensor(items[0]), "input_ids": input_ids, "loss_mask": loss_mask, "anchors": anchors}

    out = args.build / args.output.name
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out),
            use_cpu=True,
            bf16=True,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            learning_rate=args.learning_rate,
            adam_beta2=0.95,
            weight_decay=0.05,
            lr_scheduler_type="cosine",
            warmup_steps=0.04,
            max_grad_norm=1.0,
            logging_steps=50,
            save_steps=250,
            save_total_limit=1,
            remove_unused_columns=False,
            report_to="none",
        ),
        train_dataset=list(range(len(batches))),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if out.is_dir() else None)
    report = evaluate(model, load_texts(args.build, "heldout"), args.anchors)
    round_to_bf16(drafter)
    drafter.save_pretrained(args.output)
    report["training"] = {"steps": args.steps, "tokens_per_epoch": num_tokens, "epochs": trainer.state.epoch}
    report["training"] |= {k: v for k, v in vars(args).items() if not isinstance(v, Path)}
    report["training"]["parameters"] = drafter.num_parameters()
    (args.output / "drafter_report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
