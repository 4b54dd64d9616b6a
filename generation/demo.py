"""`hyperdflash demo`: the tiny target with and without its drafter, on one prompt of each domain."""

import argparse
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ..common.checkpoint import check_drafter, check_target, load_drafter, load_target
from ..encoding_deepseek_v4 import encode_with_mask
from ..generation_hyperdflash import SpeculativeStats
from .comparison import first_difference, timed_greedy
from .streaming import LEGEND, DraftStreamer

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
PROMPTS = {
    "code": "Write a Python function `is_empty(self)`: Return True if the queue is empty, False otherwise.",
    "math": "Find the value of x in the equation: 24*x + 130 = 1066",
    "chat": "I'm looking for a moderately priced hotel in the north with free parking.",
}


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 0, or 1 when a sequence differs."""
    source = args.target or str(TINY / "target")
    drafter_source = args.drafter or str(TINY / "drafter")
    check_drafter(drafter_source, None, check_target(source))
    torch.set_num_threads(1)  # OpenMP spin waits make a tiny model many times slower on two threads
    console = Console(highlight=False, soft_wrap=True)
    target, tokenizer = load_target(source, None, "float32")
    drafter = load_drafter(drafter_source, None, "float32", target)
    console.print(
        f"target: DeepSeek-V4 with {target.num_parameters() / 1e6:.1f}M parameters; drafter: "
        f"{drafter.num_parameters() / 1e6:.1f}M, {drafter.config.block_size - 1} drafts per round\n"
    )
    console.print(LEGEND)
    generate(target, tokenizer, "warm-up", 16, drafter)
    generate(target, tokenizer, "warm-up", 16, None)
    rows, pooled = [], SpeculativeStats()
    for domain, prompt in PROMPTS.items():
        console.print(f"\n[cyan]{domain}[/] {prompt}")
        rows.append((domain, *compare(target, tokenizer, prompt, args, drafter, console)))
        pooled.extend(rows[-1][1])
    console.print(table(rows, pooled))
    rates = "  ".join(f"{k}: {rate:.2f}" for k, rate in enumerate(pooled.per_position_acceptance_rates, start=1))
    console.print(f"acceptance by position  {rates}\n")
    differences = [(domain, difference) for domain, _, _, _, difference in rows if difference is not None]
    for domain, (position, gap) in differences:
        console.print(
            f"{domain}: first difference at position {position}, where the gap of the two tokens is {gap:.2e}"
        )
    return 1 if differences else 0


def compare(target, tokenizer, prompt: str, args: argparse.Namespace, drafter, console: Console) -> tuple:
    """Rounds, tokens/s without and with the drafter (best of interleaved runs), and the first difference."""
    streamer = DraftStreamer(tokenizer, console)
    assisted, _ = generate(target, tokenizer, prompt, args.max_new_tokens, drafter, streamer)
    plain, _ = generate(target, tokenizer, prompt, args.max_new_tokens, None)
    seconds = {None: [], drafter: []}
    for _ in range(args.repeats):
        for assistant, times in seconds.items():
            times.append(generate(target, tokenizer, prompt, args.max_new_tokens, assistant)[1])
    num_new = plain.num_new
    slow, fast = (num_new / min(times) for times in seconds.values())
    return assisted.speculation, slow, fast, first_difference(target, plain.sequences, assisted.sequences)


def generate(target, tokenizer, prompt: str, max_new_tokens: int, drafter, streamer=None) -> tuple:
    """One greedy run; returns the output, with `num_new` tokens, and its seconds."""
    ids, _ = encode_with_mask([{"role": "user", "content": prompt}], tokenizer, add_generation_prompt=True)
    output, seconds = timed_greedy(target, torch.tensor([ids]), max_new_tokens, drafter, streamer)
    output.num_new = output.sequences.shape[1] - len(ids)
    return output, seconds


def table(rows: list[tuple], pooled: SpeculativeStats) -> Table:
    """The closing table: one line per domain, and all rounds pooled."""
    out = Table(title="greedy decoding, with and without the drafter")
    for column in ("", "same ids", "tokens/s plain", "tokens/s drafted", "speed-up", "tau", "accepted drafts"):
        out.add_column(column, justify="left" if column in ("", "same ids") else "right")
    for domain, stats, slow, fast, difference in rows:
        same = "yes" if difference is None else "no"
        figures = (f"{slow:.1f}", f"{fast:.1f}", f"{fast / slow:.2f}x")
        out.add_row(domain, same, *figures, f"{stats.acceptance_length:.2f}", f"{stats.accepted_drafts:.2f}")
    speedup = sum(fast / slow for _, _, slow, fast, _ in rows) / len(rows)
    out.add_section()
    out.add_row(
        "all", "", "", "", f"{speedup:.2f}x", f"{pooled.acceptance_length:.2f}", f"{pooled.accepted_drafts:.2f}"
    )
    return out
