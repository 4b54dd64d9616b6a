"""`hyperdflash data preview FILE...`: the first rows as training sees them, token by token.

    hyperdflash data preview data.jsonl --tokenizer examples/tiny/target
    hyperdflash data preview data.jsonl --tokenizer deepseek-ai/DeepSeek-V4-Flash --mode thinking

Learned tokens (loss mask 1) are green in a terminal and in ⟦brackets⟧ without colour.
"""

import argparse
import io
import sys
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ..common.checkpoint import load_tokenizer
from ..common.console import visible
from ..common.data_files import read_rows
from .data import DataReport, EncodingSettings, Sample, check_tokenizer, encode_or_error

# Neighbouring tokens alternate between two styles, so that you can see where they end.
LEARNED, CONTEXT = ("bold green", "bold green underline"), ("", "dim")
CONTROL, LEARNED_CONTROL = "bold magenta", "bold green reverse"


class Piece(NamedTuple):
    """A token, or the few that make up one character: its `text`, its `token_ids`, whether it is learned, and whether
    it is a control token."""

    text: str
    token_ids: list[int]
    is_learned: bool
    is_control: bool


def make_pieces(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """A sample cut into tokens. Tokens that hold parts of one character's bytes are one piece."""
    control = set(tokenizer.get_added_vocab().values())
    pieces, held = [], []

    def flush():
        if held:
            pieces.append(Piece(tokenizer.decode(held), list(held), bool(learned), False))
            held.clear()

    learned = 0  # what `flush` reads
    for token_id, bit in zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True):
        if token_id in control or bit != learned:  # a piece is either learned or not
            flush()
        learned = bit
        if token_id in control:
            pieces.append(Piece(tokenizer.decode([token_id]), [token_id], bool(bit), True))
            continue
        held.append(token_id)
        # U+FFFD stands for an incomplete character, which has at most four bytes; a fourth token ends it anyway
        if "\ufffd" not in tokenizer.decode(held) or len(held) == 4:
            flush()
    flush()
    return pieces


# -------------------------------------------------------------------------------------------------------- the terminal


def as_text(pieces: list[Piece], colour: bool) -> Text:
    """The pieces for a terminal; without colour, learned ones in `⟦⟧` and `│` between tokens."""
    text, previous = Text(), None
    for i, piece in enumerate(pieces):
        if colour:
            text.append(visible(piece.text), _style(piece, i))
            continue
        if previous is not None and previous.is_learned != piece.is_learned:
            text.append("⟧" if previous.is_learned else "⟦")
        elif previous is not None and not (previous.is_control or piece.is_control):
            text.append("│")
        elif previous is None and piece.is_learned:
            text.append("⟦")
        text.append(visible(piece.text))
        previous = piece
    if not colour and previous is not None and previous.is_learned:
        text.append("⟧")
    return text


def _style(piece: Piece, i: int) -> str:
    if piece.is_control:
        return LEARNED_CONTROL if piece.is_learned else CONTROL
    return (LEARNED if piece.is_learned else CONTEXT)[i % 2]


def describe(source: str, sample: Sample) -> str:
    """The line above a sample."""
    return (
        f"{source}  {sample.mode}, {len(sample.input_ids):,} tokens, {int(sample.loss_mask.sum()):,} of them learned"
    )


def print_samples(samples: list[tuple[str, Sample]], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print each sample with a line above it, after a legend."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without Unicode still shows everything
    # No colours for numbers and paths, no line breaks of its own: what is shown is the data
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    # Under NO_COLOR rich still writes bold, which does not tell learned tokens from the others
    colour = console.color_system is not None and not console.no_color
    legend = [Piece("learned", [], True, False), Piece(" tokens", [], True, False)]
    console.print(as_text(legend, colour), "are what the drafter learns; the rest is context", end="\n\n")
    for source, sample in samples:
        console.print(Text(describe(source, sample), "bold"))
        console.print(as_text(make_pieces(sample, tokenizer), colour), end="\n\n")


# ---------------------------------------------------------------------------------------------------- the command line


def run(args: argparse.Namespace) -> int:
    """Run the command; returns the exit status. Raises `ValueError` or `OSError` when there is nothing to show."""
    settings = EncodingSettings(args.mode, args.effort, args.generation, args.max_length)
    rows = read_rows(args.files)
    tokenizer = load_tokenizer(args.tokenizer)
    check_tokenizer(tokenizer, settings)
    report = DataReport()
    samples = collect_samples(rows, tokenizer, settings, args.num_samples, report)
    if not samples:
        raise ValueError(f"no row can be trained on: {report.why_nothing_is_left()}")
    print_samples(samples, tokenizer)
    print("of the rows read: " + "\n".join(report.lines()))
    return 0


def collect_samples(
    rows: Iterator[tuple[str, dict | ValueError]], tokenizer, settings: EncodingSettings, num: int, report: DataReport
) -> list[tuple[str, Sample]]:
    """The first `num` rows that can be trained on; every row that was read is counted in `report`."""
    samples = []
    for source, row in rows:
        sample, error = encode_or_error(row, tokenizer, settings)
        report.add(source, sample, error)
        if not sample.reason:
            samples.append((source, sample))
        # The rest of the files, which may be large, is not read
        if len(samples) == num:
            break
    return samples
