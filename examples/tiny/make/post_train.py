"""Post-training: the tiny target becomes sure of its words, and learns from its own good answers.

    python examples/tiny/make/post_train.py        # from build/pretrained to target/; goes on where it was stopped

Instruction tuning and reinforcement learning do both to real models: half of a reasoning model's tokens have under
0.01 nats (arXiv 2506.01939), where a freshly pretrained tiny one has two and more. First the LM head is multiplied by
1 / `TEMPERATURE`, which is where training on endless answers drawn at that temperature would end. Training on a few
hundred instead, twice, left one answer for half of the prompts. Then a round answers training prompts
(`hyperdflash data regenerate`), leaves out answers that repeat themselves or do not end, trains target and MTP module
on the others, and measures `criteria.py`; rounds go on until the criteria hold, at least one and at most `--rounds`.

`build/post/round-N/` keeps a round's answers, checkpoint and report. The last round's target goes to `--target`,
with `target_report.json`: its criteria, those of every round, and the held-out perplexity before post-training.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from batching import DOMAINS, MAX_LENGTH
from criteria import LIMITS, NEW_TOKENS, measure, repeated
from safetensors.torch import load_file, save_file
from speed import fast_hyper_connections
from train_target import TargetTrainer, TargetWithMTP, load, save
from transformers import AutoTokenizer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hyperdflash.common.files import write_atomically, written_whole
from hyperdflash.training.regenerate import regenerate
from hyperdflash.training.writers import Sampling, TargetWriter

TINY = Path(__file__).resolve().parents[1]
TEMPERATURE = 0.55  # at which the pretrained target's own text has about as much entropy as the criteria allow
MOST_REPEATED = 0.25  # of the 4-grams of an answer; 1.3% of the training answers have more


def sharpen(before: Path, after: Path, temperature: float) -> None:
    """The target in `before` with a head that gives at temperature 1 what its own gives at `temperature`."""
    shutil.copytree(before, after, dirs_exist_ok=True)
    file = after / "model.safetensors"
    tensors = load_file(file)
    tensors["head.weight"] = tensors["head.weight"] / temperature
    save_file(tensors, file, metadata={"format": "pt"})


def answer_prompts(folder: Path, out: Path, prompts: Path, number: int, per_domain: int) -> None:
    """Let the target in `folder` answer the round's training prompts: `out/answers-{domain}.jsonl`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for domain in DOMAINS:
        lines = (prompts / f"post-{domain}.jsonl").open(encoding="utf-8").readlines()
        first = (number - 1) * per_domain
        chosen = [lines[i % len(lines)] for i in range(first, first + per_domain)]
        questions = out / f"prompts-{domain}.jsonl"
        questions.write_text("".join(chosen), encoding="utf-8")
        sampling = Sampling(NEW_TOKENS[domain], temperature=1.0, seed=number)
        writer = TargetWriter(str(folder), batch_size=128, dtype="float32")
        print(regenerate([str(questions)], out / f"answers-{domain}.jsonl", writer, tokenizer, sampling=sampling))


def read_answers(file: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and mask of every conversation, all its answers in the loss; without those with an answer that repeats
    itself or was cut by the limit.

    A line is one answer and begins with the conversation before it, so the longest line of a conversation holds all.
    """
    found: dict[str, tuple[list[int], np.ndarray, float]] = {}
    for line in file.open(encoding="utf-8"):
        row = json.loads(line)
        ids, mask = row["input_ids"], np.array(row["loss_mask"], dtype=bool)
        worst = repeated([i for i, kept in zip(ids, mask, strict=True) if kept])
        worst = worst if row["finish_reason"] == "stop" else 1.0
        source = row["source"].rpartition("#")[0]
        if source in found:
            mask[: len(found[source][1])] |= found[source][1]
            worst = max(worst, found[source][2])
        found[source] = ids, mask, worst
    for ids, mask, worst in found.values():
        if worst <= MOST_REPEATED:
            yield np.array(ids[:MAX_LENGTH]), mask[:MAX_LENGTH]


def make_batches(rows: list[tuple[np.ndarray, np.ndarray]], tokens_per_batch: int, seed: int) -> list[list]:
    """Batches of rows of similar length, at most `tokens_per_batch` padded tokens each, in a seeded order."""
    rng = np.random.default_rng(seed)
    batches, batch = [], []
    for row in sorted(rows, key=lambda row: len(row[0])):
        if batch and len(row[0]) * (len(batch) + 1) > tokens_per_batch:
            batches.append(batch)
            batch = []
        batch.append(row)
    batches.append(batch)
    rng.shuffle(batches)
    return batches


def pad(batch: list[tuple[np.ndarray, np.ndarray]], pad_token_id: int) -> dict[str, torch.Tensor]:
    """`input_ids` and `labels` (-100 outside the answers), each `(B, T)`, padded on the right."""
    length = max(len(ids) for ids, _ in batch)
    input_ids = torch.full((len(batch), length), pad_token_id)
    labels = torch.full((len(batch), length), -100)
    for row, (ids, mask) in enumerate(batch):
        input_ids[row, : len(ids)] = torch.from_numpy(ids)
        labels[row, : len(ids)][torch.from_numpy(mask)] = torch.from_numpy(ids[mask])
    return {"input_ids": input_ids, "labels": labels}


def train(model: TargetWithMTP, out: Path, args: argparse.Namespace, number: int, tokenizer) -> dict:
    """One pass over the round's answers; only they are learnt. Raises `ValueError` where none is good."""
    pad_token_id = tokenizer.pad_token_id
    rows = [row for domain in DOMAINS for row in read_answers(out / f"answers-{domain}.jsonl")]
    if not rows:
        raise ValueError(f"{out}: every answer repeats itself or was cut: train the target longer (train_target.py)")
    batches = make_batches(rows, args.tokens_per_batch, seed=number)
    trainer = TargetTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(out / "training"),
            use_cpu=True,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=1,
            learning_rate=args.learning_rate,
            weight_decay=0.1,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.2},
            warmup_steps=10,
            max_grad_norm=1.0,
            logging_steps=10,
            logging_first_step=True,
            save_steps=50,
            save_total_limit=1,
            remove_unused_columns=False,
            report_to="none",
            seed=number,
        ),
        train_dataset=batches,
        data_collator=lambda items: pad(items[0], pad_token_id),
    )
    folder = out / "training"
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if folder.is_dir() else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "answers": len(rows),
        "tokens": int(sum(mask.sum() for _, mask in rows)),
        "steps": trainer.state.global_step,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def run_round(number: int, before: Path, out: Path, model: TargetWithMTP, args: argparse.Namespace) -> dict:
    """Answer, train, measure; returns the round's report, which is in `out/report.json` afterwards."""
    report = out / "report.json"
    if report.is_file():
        return json.loads(report.read_text())
    out.mkdir(parents=True, exist_ok=True)
    tokenizer, start = AutoTokenizer.from_pretrained(before), time.time()
    answer_prompts(before, out, args.build / "prompts", number, args.answers)
    answered = time.time()
    load(model, before)
    training = train(model, out, args, number, tokenizer)
    save(model, out / "target")
    tokenizer.save_pretrained(out / "target")
    trained = time.time()
    figures = measure(out / "target", args.build / "prompts")
    seconds = {"answering": answered - start, "training": trained - answered, "measuring": time.time() - trained}
    training |= {"seconds": {name: round(value) for name, value in seconds.items()}}
    write_atomically(report, (json.dumps(figures | {"training": training}, indent=1) + "\n").encode())
    shutil.rmtree(out / "training")
    return json.loads(report.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=TINY / "build")
    parser.add_argument("--target", type=Path, default=TINY / "target")
    parser.add_argument("--rounds", type=int, default=8, help="at most")
    parser.add_argument("--answers", type=int, default=400, help="per domain and round")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--temperature", type=float, default=TEMPERATURE)
    parser.add_argument("--tokens-per-batch", type=int, default=1024)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    args = parser.parse_args()

    torch.set_num_threads(1)
    set_seed(0)
    fast_hyper_connections(compiled=True)
    folder = args.build / "pretrained"
    model = TargetWithMTP(len(AutoTokenizer.from_pretrained(folder)))
    first = args.build / "post" / "pretrained.json"
    if not first.is_file():
        first.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(first, json.dumps(measure(folder, args.build / "prompts"), indent=1).encode())
    rounds = [json.loads(first.read_text())]
    sharpened = args.build / "post" / "sharpened"
    if not sharpened.is_dir():
        with written_whole(sharpened) as out:
            sharpen(folder, out, args.temperature)
    folder = sharpened
    for number in range(1, args.rounds + 1):
        if number > 1 and all(rounds[-1]["met"].values()):
            break
        out = args.build / "post" / f"round-{number}"
        rounds.append(run_round(number, folder, out, model, args))
        folder = out / "target"
        print(number, json.dumps(rounds[-1]), flush=True)
    names = [*LIMITS, "training"]
    table = [{name: one[name] for name in names if name in one} for one in rounds]
    shutil.copytree(folder, args.target, dirs_exist_ok=True)
    pretraining = json.loads((args.build / "pretrained" / "target_report.json").read_text())
    report = {"criteria": {k: v for k, v in rounds[-1].items() if k != "training"}, "rounds": table}
    report["temperature"] = args.temperature
    report["pretraining"] = pretraining
    (args.target / "target_report.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
