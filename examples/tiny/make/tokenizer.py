"""The tiny world's tokenizer, and its corpus as token ids.

    python examples/tiny/make/tokenizer.py                        # trains the tokenizer, then packs the corpus
    python examples/tiny/make/tokenizer.py --pack-only            # packs with the tokenizer that is there

Run `examples/tiny/make/corpus.py` first. The tokenizer is a byte-level BPE of 2,048 entries with DeepSeek-V4's control
tokens under the same names and, where V4's ids fit, the same ids; there is no chat template, since V4's encoding is
code (`encoding_deepseek_v4.py`). It goes to `examples/tiny/target`, for `AutoTokenizer.from_pretrained`.

The token ids go to `examples/tiny/build/{train,heldout}-{code,math,chat}.npz`:
`input_ids` (uint16, all documents one after the other), `loss_mask` (uint8, same length) and `offsets` (int64, where
each document starts, with the total length at the end).
"""

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hyperdflash.encoding_deepseek_v4 import (
    ASSISTANT_TOKEN,
    BOS_TOKEN,
    EOS_TOKEN,
    THINK_END_TOKEN,
    THINK_START_TOKEN,
    USER_TOKEN,
    encode_with_mask,
)

TINY = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 4096
PAD_TOKEN = "<｜▁pad▁｜>"
# The last of V4's 800 place holders, id 128799 there: the drafter's mask token.
MASK_TOKEN = "<｜place▁holder▁no▁799｜>"
# BOS, EOS and pad are 0, 1 and 2 in V4 too.
SPECIAL_TOKENS = [
    BOS_TOKEN,
    EOS_TOKEN,
    PAD_TOKEN,
    MASK_TOKEN,
    USER_TOKEN,
    ASSISTANT_TOKEN,
    THINK_START_TOKEN,
    THINK_END_TOKEN,
]
# Words with their leading space, marks, indentation as one piece; digits are split off before.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DOMAINS = ("code", "math", "chat")
SPLITS = ("train", "heldout")


def read_documents(path: Path) -> list[list[dict]]:
    """The messages of every document of a JSONL file that `corpus.py` wrote."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def train_tokenizer(build: Path, *, bytes_per_domain: int, seed: int = 0) -> PreTrainedTokenizerFast:
    """Trains on a sample of the training text with as many bytes from each domain."""
    rng, texts = random.Random(seed), []
    for domain in DOMAINS:
        documents, taken = read_documents(build / f"train-{domain}.jsonl"), 0
        rng.shuffle(documents)
        for messages in documents:
            texts += [message["content"] for message in messages]
            taken += sum(len(message["content"].encode()) for message in messages)
            if taken >= bytes_per_domain:
                break
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[MASK_TOKEN, USER_TOKEN, ASSISTANT_TOKEN, THINK_START_TOKEN, THINK_END_TOKEN],
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def pack(documents: list[list[dict]], tokenizer, *, desc: str | None = None) -> dict[str, np.ndarray]:
    """The documents in the non-thinking DeepSeek-V4 encoding, as `input_ids`, `loss_mask` and `offsets`."""
    input_ids, loss_mask, offsets = [], [], [0]
    for messages in tqdm(documents, desc=desc, disable=None):
        ids, mask = encode_with_mask(messages, tokenizer)
        input_ids.append(np.array(ids, dtype=np.uint16))
        loss_mask.append(np.array(mask, dtype=np.uint8))
        offsets.append(offsets[-1] + len(ids))
    return {
        "input_ids": np.concatenate(input_ids),
        "loss_mask": np.concatenate(loss_mask),
        "offsets": np.array(offsets, dtype=np.int64),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=TINY / "build", help="folder with the JSONL files")
    parser.add_argument("--out", type=Path, default=TINY / "target", help="folder for the tokenizer")
    parser.add_argument("--bytes-per-domain", type=int, default=4_000_000)
    parser.add_argument("--pack-only", action="store_true")
    args = parser.parse_args(argv)
    if not args.pack_only:
        train_tokenizer(args.build, bytes_per_domain=args.bytes_per_domain).save_pretrained(args.out)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    print(f"{'domain':8}{'split':10}{'documents':>10}{'tokens':>12}{'in the loss':>12}{'bytes/token':>12}")
    for domain in DOMAINS:
        for split in SPLITS:
            documents = read_documents(args.build / f"{split}-{domain}.jsonl")
            packed = pack(documents, tokenizer, desc=f"{split}-{domain}")
            np.savez(args.build / f"{split}-{domain}.npz", **packed)
            tokens, trained = len(packed["input_ids"]), int(packed["loss_mask"].sum())
            num_bytes = sum(len(message["content"].encode()) for messages in documents for message in messages)
            row = f"{domain:8}{split:10}{len(documents):>10,}{tokens:>12,}{trained:>12,}{num_bytes / tokens:>12.2f}"
            print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
