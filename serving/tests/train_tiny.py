"""A DeepSeek-V4 that both engines take, and a drafter for it, really trained: acceptance in vLLM against transformers.

    .venv/bin/python serving/tests/train_tiny.py make                            # minutes; serving/build/trained
    .venv/bin/python serving/tests/train_tiny.py replay DRAFTER SEQUENCES OUT    # its rounds on given sequences, and
                                                                 # with --without-head those of its layers alone

The text is the standard library's own source, byte by byte: pieces of it train the target (three sliding layers), and
the drafter, which goes on with a sequential head as a second one. Minutes would not teach the head much: it starts as
what the text's pairs of bytes say. `replay` decodes nothing: it drafts along the sequences that vLLM wrote and counts
how many drafts each round would have had accepted. What is finished is not made again, unless this file or one that it
writes with is another.
"""

import argparse
import hashlib
import json
import shutil
import sysconfig
from pathlib import Path

import torch
from datasets import Dataset
from make_tiny import BUILD, LAYERS, VOCAB_SIZE, drafter_config, export, target_config
from official import save_official
from tqdm import tqdm
from transformers import DeepseekV4ForCausalLM, Trainer, TrainingArguments
from transformers.utils import logging

from hyperdflash.common.console import progress_is_hidden
from hyperdflash.generation_hyperdflash import DraftRequest
from hyperdflash.modeling_hyperdflash import HyperDFlashModel
from hyperdflash.target_hyperdflash import ResidualTap
from hyperdflash.training.dataset import SampleDataset
from hyperdflash.training.init import new_drafter
from hyperdflash.training.target import OnlineFeatures, TargetHead
from hyperdflash.training.trainer import HyperDFlashTrainer, HyperDFlashTrainingArguments

TRAINED = BUILD / "trained"
STEPS, BATCH, LENGTH, LEARNING_RATE = 150, 8, 256, 2e-3
PROMPT_LENGTH = 48
DRAFTER = {"block_size": 7, "sliding_window": 64, "initializer_range": 0.02}
MARKOV = {"draft_head": "markov", "markov_rank": 64, "markov_gate": True, "draft_confidence": True}
DRAFTERS = {"drafter": (DRAFTER, 150), "markov": ({**DRAFTER, **MARKOV}, 50)}  # options and steps; each from the last


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


def pair_factors(text: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`w1`, `w2` `(V, rank)`: `w2 @ w1[a]` is about log p(b after a) - log p(b), by the pairs of the text."""
    counts = torch.full((VOCAB_SIZE, VOCAB_SIZE), 0.1)
    counts.index_put_((text[:-1], text[1:]), torch.ones(len(text) - 1), accumulate=True)
    after, alone = counts / counts.sum(1, keepdim=True), counts.sum(0) / counts.sum()
    U, S, V = torch.svd(after.log() - alone.log())
    return tuple(side[:, :rank] * S[:rank].sqrt() for side in (U, V))


def train_target(text: torch.Tensor) -> DeepseekV4ForCausalLM:
    """Next-byte prediction."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(target_config(LAYERS["sliding"], initializer_range=0.04, use_cache=False))
    samples = [{"input_ids": ids, "labels": ids} for ids in pieces(text, STEPS * BATCH, LENGTH, seed=0)]
    args = TrainingArguments(
        output_dir=str(TRAINED / "target-run"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="cosine",
        warmup_steps=STEPS // 10,
        weight_decay=0.05,
        adam_beta2=0.95,
        logging_steps=25,
        save_strategy="no",
        report_to="none",
        disable_tqdm=progress_is_hidden(),
        bf16=True,
        use_cpu=True,
    )
    Trainer(model, args, train_dataset=samples).train()
    model.config.use_cache = True
    return model.eval()


def train_drafter(target, text: torch.Tensor, options: dict, steps: int, start=None) -> HyperDFlashModel:
    """By the package's own trainer, features from the target in every step; from the weights of `start`, if given.

    Pieces of the text do for what the target would write: it is sampled from where acceptance is measured.
    """
    drafter = new_drafter(drafter_config(target, **options), TargetHead.from_target(target).identity(), seed=1)
    if start is not None:
        drafter.load_state_dict(start.state_dict(), strict=False)  # a head that it lacks is new
        w1, w2 = pair_factors(text, options["markov_rank"])
        with torch.no_grad():
            drafter.markov_head.markov_w1.copy_(w1)
            drafter.markov_head.markov_w2.copy_(w2)
    row = {"loss_mask": [1] * LENGTH, "length": LENGTH, "source": "tiny"}
    samples = pieces(text, steps * BATCH, LENGTH, seed=steps)
    rows = Dataset.from_list([{"input_ids": ids, **row} for ids in samples.tolist()])
    args = HyperDFlashTrainingArguments(
        output_dir=str(TRAINED / "drafter-run"),
        num_anchors=32,
        max_steps=steps,
        learning_rate=2e-3,
        per_device_train_batch_size=BATCH,
        warmup_steps=steps // 10,
        save_strategy="no",
        logging_steps=25,
        bf16=True,
        use_cpu=True,
    )
    features = OnlineFeatures(target, drafter.config)
    HyperDFlashTrainer(drafter, args, features=features, train_dataset=SampleDataset(rows)).train()
    return drafter.eval()


def make() -> None:
    """Target, drafters, and the prompts that acceptance is measured on."""
    names = ("train_tiny.py", "make_tiny.py", "official.py", "../vllm_format.py")
    sources = b"".join((Path(__file__).parent / name).read_bytes() for name in names)
    recipe, note = hashlib.sha256(sources).hexdigest(), TRAINED / "recipe.txt"
    if not note.is_file() or note.read_text() != recipe:
        shutil.rmtree(TRAINED, ignore_errors=True)
        TRAINED.mkdir(parents=True)
        note.write_text(recipe)
    if (TRAINED / "prompts.json").is_file():
        print(f"{TRAINED} is made")
        return
    text = corpus()
    train, held_out = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    if not (TRAINED / "target-hf" / "model.safetensors").is_file():
        save_target(train_target(train))
    target, drafter = load_target(torch.float32), None
    for name, (options, steps) in DRAFTERS.items():
        drafter = train_drafter(target, train, options, steps, drafter)
        export(drafter, TRAINED / name)
    prompts = pieces(held_out, 32, PROMPT_LENGTH, seed=2 * 10**6)
    (TRAINED / "prompts.json").write_text(json.dumps(prompts.tolist()))


def save_target(target: DeepseekV4ForCausalLM) -> None:
    """For vLLM, and for transformers with the same rounding."""
    save_official(target, TRAINED / "target")
    rounded = target.to(torch.bfloat16)
    for name, parameter in rounded.named_parameters():
        if any(part in name for part in target._keep_in_fp32_modules_strict or ()):
            parameter.data = parameter.data.float()
    rounded.save_pretrained(TRAINED / "target-hf")


def load_target(dtype: torch.dtype) -> DeepseekV4ForCausalLM:
    """The target as rounded for vLLM, in transformers."""
    return DeepseekV4ForCausalLM.from_pretrained(TRAINED / "target-hf", dtype=dtype).eval()


@torch.no_grad()
def replay_rounds(target, drafter, ids: list[int], num_prompt: int) -> list[int]:
    """Accepted drafts of each round, had greedy decoding of the prompt given `ids`."""
    K = drafter.config.block_size
    tokens = torch.tensor([ids])
    with ResidualTap(target, drafter.config.tapped_layer_ids) as tap:
        target.model(tokens, use_cache=False)
        residual = tap.take()
    rounds, anchor = [], num_prompt  # the first new token is the prefill's own
    while anchor + 1 < len(ids):
        noise, drafts = drafter.new_noise_ids(tokens.device), []
        noise[0, 0] = ids[anchor]

        def choose(logits, drafts=drafts):
            drafts += logits.argmax(-1).tolist()
            return logits.argmax(-1)

        context, ids = residual[:, :anchor], tokens[:, : anchor + 1]
        drafter.propose(DraftRequest(context, ids, noise, anchor, K - 1, target, cache=None), choose)
        truth = ids[anchor + 1 : anchor + K]
        accepted = next((i for i, token in enumerate(truth) if token != drafts[i]), len(truth))
        rounds.append(accepted)
        anchor += accepted + 1
    return rounds


def replay(name: str, sequences: Path, out: Path, without_head: bool) -> None:
    """SEQUENCES is a list of `{"ids", "num_prompt"}`; OUT becomes the rounds of each, by the drafter of that name."""
    target = load_target(torch.bfloat16)
    drafter = HyperDFlashModel.from_pretrained(TRAINED / name / "hf", dtype=torch.bfloat16).eval()
    drafter.confidence_head = None  # all drafts are verified, as in vLLM
    if without_head:
        drafter.markov_head = None
    items = json.loads(sequences.read_text())
    rounds = [replay_rounds(target, drafter, **item) for item in tqdm(items, desc="replay", disable=None)]
    out.write_text(json.dumps(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make")
    replayed = commands.add_parser("replay")
    replayed.add_argument("name", choices=DRAFTERS)
    replayed.add_argument("sequences", type=Path)
    replayed.add_argument("out", type=Path)
    replayed.add_argument("--without-head", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    make() if args.command == "make" else replay(args.name, args.sequences, args.out, args.without_head)


if __name__ == "__main__":
    main()
