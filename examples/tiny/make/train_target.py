"""Train the tiny DeepSeek-V4 and its native MTP module together, from scratch, on two CPU cores (an hour and a half).

    torchrun --nproc-per-node 2 examples/tiny/make/train_target.py     # resumes from examples/tiny/build/pretraining

Writes `build/pretrained/` (bf16 safetensors with `mtp.0.*` in the same file) and `target_report.json` in it: held-out
perplexity of every domain, and the MTP module's accuracy on the token after the next. `post_train.py` goes on from
there.
"""

import argparse
import json
import math
import re
from pathlib import Path

import torch
from batching import DOMAINS, load_documents, make_batches, pad
from muon import make_optimizer
from safetensors.torch import load_file, save_file
from speed import fast_hyper_connections, head_loss
from target_config import config, fill_hash_tables, start_hyper_connections
from torch import nn
from transformers import AutoTokenizer, DeepseekV4ForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.models.deepseek_v4.modeling_deepseek_v4 import load_balancing_loss_func
from transformers.trainer_utils import get_last_checkpoint

from hyperdflash.generation.mtp import DeepseekV4MTP, load_mtp

TINY = Path(__file__).resolve().parents[1]
MTP_WEIGHT = 0.3
BALANCE_WEIGHT = 0.01


class TargetWithMTP(nn.Module):
    """Next-token loss of the target plus `MTP_WEIGHT` times the loss of its MTP module on the token after it."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.config = config(vocab_size)
        self.target = DeepseekV4ForCausalLM(self.config)
        fill_hash_tables(self.target)
        self.mtp = DeepseekV4MTP(self.config)
        start_hyper_connections(self.target, self.mtp)

    def forward(self, input_ids, labels):
        residual = None

        def keep(module, args):
            nonlocal residual
            residual = args[0]

        handle = self.target.model.hc_head.register_forward_pre_hook(keep)
        try:
            out = self.target.model(input_ids, use_cache=False, output_router_logits=True)
        finally:
            handle.remove()
        loss, _ = head_loss(out.last_hidden_state[:, :-1], self.target.lm_head.weight, labels[:, 1:])
        # The module at position t sees the residual of t and the token t + 1, and predicts t + 2.
        next_ids = input_ids[:, 1:-1]
        hidden, _ = self.mtp(self.target.model.embed_tokens(next_ids), residual[:, :-2], next_ids)
        mtp_loss, mtp_accuracy = head_loss(hidden, self.target.lm_head.weight, labels[:, 2:])
        balance = load_balancing_loss_func(out.router_logits, self.config.n_routed_experts, 2)
        total = loss + MTP_WEIGHT * mtp_loss + BALANCE_WEIGHT * balance
        return {
            "loss": total,
            "next_token_loss": loss.detach(),
            "mtp_loss": mtp_loss.detach(),
            "mtp_accuracy": mtp_accuracy,
        }


class TargetTrainer(Trainer):
    """Without weight decay on hyper-connections: over a long run it would take their start back, towards base 0."""

    def get_decay_parameter_names(self, model) -> list[str]:
        return [name for name in super().get_decay_parameter_names(model) if "hc" not in re.split(r"[._]", name)]

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            model = self.model if model is None else model
            decayed = self.get_decay_parameter_names(model)
            self.optimizer = make_optimizer(model, decayed, self.args.learning_rate, self.args.weight_decay)
        return self.optimizer


@torch.no_grad()
def evaluate(model: TargetWithMTP, build: Path, pad_token_id: int) -> dict:
    """Held-out perplexity and MTP accuracy of every domain, averaged over batches weighted by their tokens."""
    model.eval()
    report = {}
    for domain in DOMAINS:
        sums = torch.zeros(3)
        for batch in make_batches(load_documents(build, "heldout", domain), 4096, seed=0):
            inputs = pad(batch, pad_token_id)
            tokens = (inputs["labels"] != -100).sum()
            out = model(**inputs)
            sums += torch.stack([tokens, tokens * out["next_token_loss"], tokens * out["mtp_accuracy"]])
        tokens, loss, accuracy = sums.tolist()
        report[domain] = {
            "tokens": int(tokens),
            "perplexity": round(math.exp(loss / tokens), 3),
            "mtp_accuracy": round(accuracy / tokens, 4),
        }
    return report


def save(model: TargetWithMTP, folder: Path) -> None:
    """The target as `save_pretrained` writes it, in bf16 (what V4 keeps in fp32 stays so), with `mtp.0.*` added."""
    mtp = model.mtp.official_state_dict()
    fp32 = model.target.state_dict()
    target = DeepseekV4ForCausalLM(model.config).to(torch.bfloat16)
    keep = tuple(model.target._keep_in_fp32_modules_strict)
    for module_name, module in target.named_modules():
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            full = f"{module_name}.{name}"
            if full in fp32:
                dtype = fp32[full].dtype if any(k in full for k in keep) else tensor.dtype
                tensor.data = fp32[full].to(dtype)
    target.config.dtype = torch.bfloat16
    target.config.use_cache = target.generation_config.use_cache = True  # the Trainer switches it off
    target.save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **mtp}, file, metadata={"format": "pt"})


def load(model: TargetWithMTP, folder: Path) -> None:
    """Put what `save` wrote back into the model, so that the report is about the saved weights."""
    saved = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.target.load_state_dict(saved.state_dict())
    model.mtp.load_state_dict(load_mtp(folder, model.config).state_dict())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=TINY / "build")
    parser.add_argument("--tokenizer", type=Path, default=TINY / "target")
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--tokens-per-batch", type=int, default=2048, help="per process")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(0)
    fast_hyper_connections(compiled=True)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    documents = [doc for domain in DOMAINS for doc in load_documents(args.build, "train", domain)]
    batches = make_batches(documents, args.tokens_per_batch, seed=0)
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} tokens, {len(batches)} batches")
    model = TargetWithMTP(len(tokenizer))
    out, folder = args.build / "pretraining", args.build / "pretrained"
    trainer = TargetTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out),
            use_cpu=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=True,  # the indexers', which never choose
            max_steps=args.steps,
            per_device_train_batch_size=1,
            learning_rate=args.learning_rate,
            weight_decay=0.1,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.05},
            warmup_steps=100,
            max_grad_norm=1.0,
            logging_steps=10,
            save_steps=100,
            save_total_limit=1,
            remove_unused_columns=False,
            dataloader_num_workers=0,
            report_to="none",
        ),
        train_dataset=batches,
        data_collator=lambda items: pad(items[0], tokenizer.pad_token_id),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(out) if out.is_dir() else None)
    if not trainer.is_world_process_zero():
        return
    save(model, folder)
    tokenizer.save_pretrained(folder)
    load(model, folder)
    report = evaluate(model, args.build, tokenizer.pad_token_id)
    seen = sum(len(d) for b in batches for d in b) * trainer.state.epoch  # of all processes together
    report["training"] = {
        "steps": args.steps,
        "tokens": int(seen),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    (folder / "target_report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
