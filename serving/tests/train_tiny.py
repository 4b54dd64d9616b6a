"""A DeepSeek-V4 that both engines take, and a drafter for it, really trained: acceptance in vLLM against transformers.

    .venv/bin/python serving/tests/train_tiny.py make                    # minutes, resumable; serving/build/trained
    .venv/bin/python serving/tests/train_tiny.py replay SEQUENCES OUT    # rounds of transformers on given sequences

The text is the standard library's own source, byte by byte. The target (three sliding layers) goes on from pieces of
it; the drafter is trained on what the target wrote. `replay` decodes nothing: it drafts along the sequences that vLLM
wrote and counts how many drafts each round would have had accepted.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset
from make_tiny import BUILD, LAYERS, MASK_TOKEN_ID, drafter_config, export, target_config
from official import save_official
from tqdm import tqdm
from transformers import DeepseekV4ForCausalLM
from transformers.utils import logging

from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.training.batches import SampleDataset
from hyperdflash.training.target import OnlineFeatures
from hyperdflash.training.trainer import HyperDFlashTrainer, HyperDFlashTrainingArguments

TRAINED = BUILD / "trained"
STEPS, BATCH, LENGTH, LEARNING_RATE = 250, 8, 256, 2e-3
PROMPT_LENGTH, NUM_TEXTS, NEW_TOKENS = 48, 320, 208
DRAFTER = {"block_size": 7, "sliding_window": 64, "initializer_range": 0.02}
DRAFTER_STEPS = 240


def corpus() -> torch.LongTensor:
    """Bytes of the standard library's modules, and of nothing installed beside them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    files = [path for path in sorted(root.rglob("*.py")) if not skipped & set(path.relative_to(root).parts)]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def pieces(text: torch.Tensor, number: int, length: int, seed: int) -> torch.LongTensor:
    """`(number, length)` pieces of the text at random places."""
    starts = torch.randint(len(text) - length, (number,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([text[i : i + length] for i in starts.tolist()])


def train_target(text: torch.Tensor) -> DeepseekV4ForCausalLM:
    """Next-byte prediction; goes on from the last fiftieth step that was saved."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(target_config(LAYERS["sliding"], initializer_range=0.04))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    state_file, first = TRAINED / "target.pt", 0
    if state_file.is_file():
        state = torch.load(state_file, weights_only=True)
        first = state["step"]
        for part, name in ((model, "model"), (optimizer, "optimizer"), (schedule, "schedule")):
            part.load_state_dict(state[name])
    bar = tqdm(range(first, STEPS), initial=first, total=STEPS, desc="target", disable=None)
    for step in bar:
        ids = pieces(text, BATCH, LENGTH, seed=step)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
        if (step + 1) % 50 == 0 or step + 1 == STEPS:
            parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
            state = {"step": step + 1, **{name: part.state_dict() for name, part in parts.items()}}
            torch.save(state, state_file.with_suffix(".partial"))
            state_file.with_suffix(".partial").rename(state_file)
            print(f"target: step {step + 1} of {STEPS}, loss {loss.item():.3f}", flush=True)
    return model.eval()


def write_texts(target, text: torch.Tensor) -> torch.LongTensor:
    """Greedy continuations of pieces of the text, `(NUM_TEXTS, PROMPT_LENGTH + NEW_TOKENS)`."""
    file = TRAINED / "texts.pt"
    if file.is_file():
        return torch.load(file, weights_only=True)
    prompts = pieces(text, NUM_TEXTS, PROMPT_LENGTH, seed=10**6)
    written = [
        target.generate(batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        for batch in tqdm(prompts.split(64), desc="texts", disable=None)
    ]
    torch.save(torch.cat(written), file)
    return torch.cat(written)


def train_drafter(target, texts: torch.Tensor) -> HyperDFlashModel:
    """By the package's own trainer, features from the target in every step."""
    torch.manual_seed(1)
    drafter = HyperDFlashModel(drafter_config(target, **DRAFTER))
    with torch.no_grad():
        for name in ("hc_fn", "hc_base", "hc_scale"):
            getattr(drafter.reducer, name).copy_(getattr(target.model.hc_head, name))
    mask = [0] * PROMPT_LENGTH + [1] * NEW_TOKENS
    rows = Dataset.from_list(
        [{"input_ids": ids, "loss_mask": mask, "length": len(ids), "source": "tiny"} for ids in texts.tolist()]
    )
    out = TRAINED / "drafter-run"
    args = HyperDFlashTrainingArguments(
        output_dir=str(out),
        num_anchors=24,
        max_steps=DRAFTER_STEPS,
        learning_rate=2e-3,
        per_device_train_batch_size=8,
        warmup_steps=20,
        save_steps=60,
        save_total_limit=1,
        logging_steps=50,
        bf16=True,
        use_cpu=True,
    )
    trainer = HyperDFlashTrainer(
        drafter, args, features=OnlineFeatures(target, drafter.config), train_dataset=SampleDataset(rows)
    )
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")) or None)
    return drafter.eval()


def make() -> None:
    """Target, texts, drafter, and the prompts that acceptance is measured on; a finished part is left as it is."""
    if (TRAINED / "prompts.json").is_file():
        print(f"{TRAINED} is made")
        return
    TRAINED.mkdir(parents=True, exist_ok=True)
    text = corpus()
    target = train_target(text[: len(text) * 9 // 10])
    save_official(target, TRAINED / "target")
    rounded = target.to(torch.bfloat16)
    for name, parameter in rounded.named_parameters():
        if any(part in name for part in target._keep_in_fp32_modules_strict or ()):
            parameter.data = parameter.data.float()
    rounded.save_pretrained(TRAINED / "target-hf")
    target = load_target(torch.float32)
    drafter = train_drafter(target, write_texts(target, text[: len(text) * 9 // 10]))
    export(drafter, TRAINED / "drafter")
    held_out = pieces(text[len(text) * 9 // 10 :], 32, PROMPT_LENGTH, seed=2 * 10**6)
    (TRAINED / "prompts.json").write_text(json.dumps(held_out.tolist()))


def load_target(dtype: torch.dtype) -> DeepseekV4ForCausalLM:
    """The target as rounded for vLLM, in transformers."""
    return DeepseekV4ForCausalLM.from_pretrained(TRAINED / "target-hf", dtype=dtype).eval()


@torch.no_grad()
def replay_rounds(target, drafter, ids: list[int], num_prompt: int) -> list[int]:
    """Accepted drafts of each round, had greedy decoding of the prompt given `ids`."""
    K = drafter.config.block_size
    kept = []
    hook = target.model.hc_head.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    target.model(torch.tensor([ids]), use_cache=False)
    hook.remove()
    rounds, anchor = [], num_prompt  # the first new token is the prefill's own
    while anchor + 1 < len(ids):
        noise = torch.full((1, K), MASK_TOKEN_ID)
        noise[0, 0] = ids[anchor]
        logits = drafter.draft(kept[0][:, :anchor], noise, anchor, K - 1, target, None)
        right = logits.argmax(-1).tolist()
        truth = ids[anchor + 1 : anchor + K]
        accepted = next((i for i, token in enumerate(truth) if token != right[i]), len(truth))
        rounds.append(accepted)
        anchor += accepted + 1
    return rounds


def replay(sequences: Path, out: Path) -> None:
    """SEQUENCES is a list of `{"ids", "num_prompt"}`; OUT becomes the rounds of each."""
    target = load_target(torch.bfloat16)
    drafter = HyperDFlashModel.from_pretrained(TRAINED / "drafter" / "hf", dtype=torch.bfloat16).eval()
    items = json.loads(sequences.read_text())
    rounds = [replay_rounds(target, drafter, **item) for item in tqdm(items, desc="replay", disable=None)]
    out.write_text(json.dumps(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make")
    replayed = commands.add_parser("replay")
    replayed.add_argument("sequences", type=Path)
    replayed.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    make() if args.command == "make" else replay(args.sequences, args.out)


if __name__ == "__main__":
    main()
