"""Where the time of a round goes, on the tiny pair: `make bench`, or `python -m hyperdflash.benchmark.profile_rounds`.

Everything is measured in one run that interleaves plain and drafted decoding; read the ratios, not the times.
Prints (a) the time outside the forwards, of a round and of a plain step; (b) how the drafter's time grows with rounds
and context; (c) the share of rewinding; (d) bytes held by the cache; (e) the cost of one more draft, which should be
the drafter's `verify_cost`; (f) the share of its sequential head, if it has one.
"""

import argparse
import copy
import statistics

import torch
from transformers import DynamicCache
from transformers.utils import logging

from ..common.checkpoint import load_drafter, load_target
from ..common.options import DTYPES
from ..encoding_deepseek_v4 import encode_with_mask
from ..generation.demo import PROMPTS, TINY
from ..generation.demo import generate as generate_demo
from ..generation_hyperdflash import SpeculativeStats
from ..modeling_hyperdflash import HyperDFlashModel
from ..target_hyperdflash import make_rewindable
from .timing import Clock, timed_call

NEW_TOKENS = 96


def outside_forwards(target, tokenizer, drafter, repeats: int) -> None:
    """(a) and (c): what a round and a plain step spend outside the forwards; set-up and prefill are left out."""
    clock = Clock(target, drafter)
    outside, crops, shares, speedups, stats = {None: [], drafter: []}, [], [], [], SpeculativeStats()
    with clock.running():
        for _ in range(repeats):
            for prompt in PROMPTS.values():
                seconds = {}
                for assistant in outside:
                    clock.reset()
                    output, seconds[assistant] = generate_demo(target, tokenizer, prompt, NEW_TOKENS, assistant)
                    outside[assistant].append(statistics.median(clock.outside_s[1:]))
                stats.extend(output.speculation)
                clock.reset()
                with clock.timing_crop():
                    generate_demo(target, tokenizer, prompt, NEW_TOKENS, drafter)
                crops.append(clock.crop_s / len(clock.step_s) / len(target.model.layers))
                shares.append(clock.crop_s / sum(clock.step_s))
                speedups.append(seconds[None] / seconds[drafter])
    steps, rounds = outside.values()
    ratio = [r / s for r, s in zip(rounds, steps, strict=True)]
    print(f"(a) outside the forwards: round {ms(rounds)}, plain step {ms(steps)}, ratio {median_and_range(ratio)}")
    print(
        f"(c) rewinding: {1e6 * statistics.median(crops):.0f} us/layer, {median_and_range(shares, '.1%')} of a round"
    )
    print(f"    speed-up on these prompts {median_and_range(speedups)}, tau {stats.acceptance_length:.2f}")


def drafter_time(target, narrow) -> None:
    """(b): seconds of a draft in the first and last quarter of a long run, and at contexts of 256 and 1,500 tokens."""
    clock = Clock(target, narrow)
    by_context = {256: [], 1500: []}
    growth = []
    generator = torch.Generator().manual_seed(0)
    with clock.running():
        for _ in range(3):
            for length, times in by_context.items():
                clock.reset()
                prompt = random_ids(target, length, generator)
                target.generate(prompt, assistant_model=narrow, do_sample=False, max_new_tokens=200, eos_token_id=None)
                drafts = clock.draft_by_round[1:]
                times.append(statistics.median(drafts))
                quarter = max(len(drafts) // 4, 1)
                growth.append(statistics.median(drafts[-quarter:]) / statistics.median(drafts[:quarter]))
    ratio = [long / short for short, long in zip(*by_context.values(), strict=True)]
    print(f"(b) drafter, window 128: last quarter of the rounds / first {median_and_range(growth)}; ", end="")
    print(f"context 1,500 / 256 {median_and_range(ratio)}")


@torch.no_grad()
def cache_bytes(target) -> None:
    """(d): bytes of the cache after 1 and 40 rounds of one token; only the entries should grow."""
    cache = make_rewindable(DynamicCache(config=target.config), target.config)
    generator = torch.Generator().manual_seed(0)
    target(random_ids(target, 300, generator), cache=cache, use_cache=True)
    cache.activate_past_recording()
    sizes = []
    for _ in range(40):
        target(random_ids(target, 7, generator), cache=cache, use_cache=True)
        cache.crop(-6)
        entries = sum(nbytes(getattr(layer, "compressed_kv", None)) for layer in cache.layers)
        records = sum(nbytes([getattr(layer, n, None) for n in ("_rows", "_slices")]) for layer in cache.layers)
        sizes.append((sum(nbytes(vars(layer)) for layer in cache.layers) - entries, entries, records))
    (rest, entries, _), (rest_40, entries_40, records) = ([x / 1e3 for x in sizes[i]] for i in (0, -1))
    print(f"(d) cache after 1 and 40 rounds of one token, in kB: entries {entries:.0f} and {entries_40:.0f}, ", end="")
    print(f"all else {rest:.0f} and {rest_40:.0f}, of it undo records {records:.0f}")


def verify_cost(target, tokenizer, drafter, repeats: int) -> None:
    """(e): by how much a draft lengthens a round, relative to a round without drafts (a linear fit)."""
    costs = []
    for _ in range(repeats):
        rounds = [
            (number, seconds_of_a_round(target, tokenizer, prompt, drafter, number)[0])
            for prompt in PROMPTS.values()
            for number in range(1, drafter.config.block_size)
        ]
        slope, none = statistics.linear_regression(*zip(*rounds, strict=True))
        costs.append(slope / none)
    print(
        f"(e) one more draft: {median_and_range(costs, '.3f')} of a round; verify_cost is {drafter.config.verify_cost}"
    )


def head_share(target, tokenizer, drafter, repeats: int) -> None:
    """(f): the extra time of a round with the sequential head, the target's forward excluded."""
    without = copy.copy(drafter)
    without._modules = {**drafter._modules, "markov_head": None}  # the weights are shared
    shares = []
    for _ in range(repeats):
        for prompt in PROMPTS.values():
            most = drafter.config.block_size - 1
            (step_s, verify_s), (step_without_s, verify_without_s) = (
                seconds_of_a_round(target, tokenizer, prompt, model, most) for model in (drafter, without)
            )
            shares.append((step_s - verify_s - (step_without_s - verify_without_s)) / step_s)
    print(f"(f) the sequential head: {median_and_range(shares, '.1%')} of a round")


def seconds_of_a_round(target, tokenizer, prompt: str, drafter, num_drafts: int) -> tuple[float, float]:
    """Mean seconds of the rounds of one call, and of the target's forward in them."""
    ids, _ = encode_with_mask([{"role": "user", "content": prompt}], tokenizer, add_generation_prompt=True)
    options = {"assistant_model": drafter, "num_assistant_tokens": num_drafts}
    figures = timed_call(target, options, ids, max_new_tokens=NEW_TOKENS, temperature=0, seed=0)
    return figures["step_seconds"] / figures["num_steps"], figures["verify_seconds"] / figures["num_steps"]


def random_ids(target, length: int, generator: torch.Generator) -> torch.LongTensor:
    return torch.randint(8, target.config.vocab_size, (1, length), generator=generator).to(target.device)


def nbytes(value) -> int:
    """Bytes of the storages that a value reaches, each once."""
    storages = {}

    def walk(value):
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                walk(item)

    walk(value)
    return sum(storages.values())


def ms(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.2f} ms"


def median_and_range(values: list[float], form: str = ".2f") -> str:
    """Median and range."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(TINY / "target"))
    parser.add_argument("--drafter", default=str(TINY / "drafter"))
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device-map", help="as in transformers, e.g. auto")
    parser.add_argument("--threads", type=int, default=1, help="torch threads on the CPU")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.disable_progress_bar()
    target, tokenizer = load_target(args.target, None, args.dtype, device_map=args.device_map)
    drafter = load_drafter(args.drafter, None, args.dtype, target)
    narrow = HyperDFlashModel.from_pretrained(args.drafter, dtype=drafter.dtype, sliding_window=128).eval()
    generate_demo(target, tokenizer, "warm-up", 16, drafter)
    generate_demo(target, tokenizer, "warm-up", 16, None)
    outside_forwards(target, tokenizer, drafter, args.repeats)
    drafter_time(target, narrow.to(target.device))
    cache_bytes(target)
    drafter.confidence_head = None  # all drafts of every round
    if drafter.max_drafts > 1:
        verify_cost(target, tokenizer, drafter, args.repeats)
    if drafter.markov_head is not None:
        head_share(target, tokenizer, drafter, args.repeats)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
