"""`hyperdflash benchmark`: acceptance length and speed-up of several methods on the same prompts.

    hyperdflash benchmark examples/tiny/target --methods mtp:3 hyperdflash:6=examples/tiny/drafter-paper \\
        --prompts prompts.jsonl --num-prompts 10 --max-new-tokens 128 --dtype float32 --threads 1 --output runs/bench

All methods answer a prompt before the next prompt is asked, in an order shuffled for each prompt, so that a machine
that slows down does so for all of them. Each method has one warm-up call per temperature. Plain decoding
(`target-only`) is always measured: later turns of a chat follow its answers for all methods, and at temperature 0 all
other answers are compared with its own.

Each call is written to `records.jsonl` when it ends, and the same command on the same machine resumes after the last
one. If code that affects the figures has changed in between, the command and the results say so. It writes
`results.json`, `results.csv`, `table.md`, `acceptance.png`, `speedup.png` and `command.txt`.
"""

import argparse
import hashlib
import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from ..common.checkpoint import TargetCheckpoint, encoding_mismatch, load_target
from ..common.console import UsageError, progress_is_hidden
from ..common.files import write_atomically
from ..encoding_deepseek_v4 import encode_with_mask, to_message
from ..generation.comparison import TIE_GAPS, first_difference
from ..generation.trace import write_trace
from ..generation.trace_recorder import RoundRecorder, Trace
from .environment import command_text, environment, run_settings
from .methods import (
    PROMPT_LOOKUP,
    TARGET_ONLY,
    Method,
    Variant,
    find_checkpoints,
    load_variants,
    parse_methods,
)
from .plot import NOTHING_TO_DRAW, check_pictures, draw_pictures
from .prompt_sets import Prompt, PromptSet, check_names, fetch, read_file
from .records import KEY, Records
from .report import COMMAND_FILE, definitions, make_rows, make_tables, run_notes, token_notes, write_report
from .timing import timed_call

WARM_UP_TOKENS = 16
TRACE_FILE = "trace.html"
MOST_SHOWN = 20  # differences, in the terminal


@dataclass(frozen=True)
class Plan:
    """What is decoded with every method.

    Attributes:
        sets (`list[PromptSet]`): the prompts, already selected.
        modes, temperatures, seeds (`list`): all combinations are decoded; greedy decoding uses the first seed only.
        encoding (`dict`): `effort` and `generation` of `encode_with_mask`.
        max_new_tokens (`int`): limit of each answer.
    """

    sets: list[PromptSet]
    modes: list[str]
    temperatures: list[float]
    seeds: list[int]
    encoding: dict
    max_new_tokens: int

    def cells(self) -> Iterator[tuple[PromptSet, str, float, int]]:
        """(set, mode, temperature, seed), in the order of measuring."""
        for prompts in self.sets:
            for mode in self.modes:
                for temperature in self.temperatures:
                    for seed in self.seeds if temperature > 0 else self.seeds[:1]:
                        yield prompts, mode, temperature, seed

    @property
    def num_turns(self) -> int:
        """How many turns each variant answers if no prompt is too long."""
        return sum(len(prompt.turns) for prompts, *_ in self.cells() for prompt in prompts.prompts)


@dataclass
class Benchmark:
    """Measures a plan with all variants.

    Attributes:
        left_out (`list[dict]`): turns whose prompt leaves no room for `max_new_tokens`; later turns are not asked.
        differences (`list[dict]`): greedy answers that are not target-only's.
        num_compared (`int`): greedy answers that were compared.
        now (`dict`): what is being decoded or compared, by names of `records.KEY`.
    """

    target: torch.nn.Module
    tokenizer: object
    variants: list[Variant]
    plan: Plan
    records: Records
    left_out: list[dict] = field(default_factory=list)
    differences: list[dict] = field(default_factory=list)
    num_compared: int = 0
    now: dict = field(default_factory=dict)
    warm: set[float] = field(default_factory=set)
    bar: tqdm | None = None

    def run(self) -> None:
        """Make every call that is not in the records yet."""
        total, hidden = self.plan.num_turns * len(self.variants), progress_is_hidden()
        start = self.records.num_resumed
        with tqdm(
            total=total, initial=start, desc="Decoding", unit="call", disable=hidden, smoothing=0.05
        ) as self.bar:
            for prompts, mode, temperature, seed in self.plan.cells():
                self.bar.set_postfix_str(f"{prompts.name}, {mode}, temperature {temperature:g}", refresh=False)
                for prompt in prompts.prompts:
                    cell = {"dataset": prompts.name, "mode": mode, "temperature": temperature, "seed": seed}
                    self.converse(cell, prompt)

    def converse(self, cell: dict, prompt: Prompt) -> None:
        """Have all variants answer every turn of a prompt, in an order shuffled for this prompt."""
        messages, order = list(prompt.history), list(self.variants)
        # The seed is the prompt, so that a resumed run keeps the order of the calls that are left
        random.Random(json.dumps([*cell.values(), prompt.index])).shuffle(order)
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            mode = cell["mode"]
            ids = self.encode(messages, mode)
            self.now = question = {**cell, "prompt": prompt.index, "turn": turn}
            if len(ids) > self.max_prompt_tokens:
                self.left_out.append({**question, "num_prompt_tokens": len(ids)})
                self.bar.total -= (len(prompt.turns) - turn) * len(self.variants)
                return
            answers = {variant.key: self.answer(variant, ids, question) for variant in order}
            self.now = question
            if cell["temperature"] == 0:
                self.compare(ids, answers, question)
            # Of one answer for all: with their own, sampled ones, methods would answer different questions
            messages.append(to_message(answers[TARGET_ONLY, None], self.tokenizer, mode, self.eos_ids))

    def encode(self, messages: list[dict], mode: str) -> list[int]:
        """The ids of a prompt, up to where the answer begins."""
        options = {"mode": mode, **self.plan.encoding, "add_generation_prompt": True}
        return encode_with_mask(messages, self.tokenizer, **options)[0]

    def answer(self, variant: Variant, ids: list[int], question: dict) -> list[int]:
        """The ids of an answer: recorded before, or decoded and recorded now."""
        self.now = names = {"method": variant.method, "checkpoint": variant.checkpoint, **question}
        key = tuple(names[name] for name in KEY)
        if key not in self.records.done:
            self.warm_up(ids, question["temperature"])
            seed = call_seed(question["seed"], question["dataset"], question["prompt"], question["turn"])
            figures = self.decode(variant, ids, self.plan.max_new_tokens, question["temperature"], seed)
            self.records.append({**names, **figures})
            self.bar.update()
        # Frees the memory; the file keeps them
        return self.records.done[key].pop("new_ids")

    def warm_up(self, ids: list[int], temperature: float) -> None:
        """One short call per variant and temperature, not recorded: the first call of a kind is slower."""
        if temperature not in self.warm:
            self.warm.add(temperature)
            for variant in self.variants:
                self.decode(variant, ids, min(WARM_UP_TOKENS, self.plan.max_new_tokens), temperature, 0)

    def decode(self, variant: Variant, ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> dict:
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        return timed_call(self.target, variant.options, ids, **options)

    def traces(self) -> list[Trace]:
        """The rounds of every drafter on the first prompt of each cell, decoded again as recording takes time."""
        traces, drafters = [], [variant for variant in self.variants if variant.assistant is not None]
        for prompts, mode, temperature, seed in tqdm(
            list(self.plan.cells()), desc="Tracing", unit="cell", disable=progress_is_hidden()
        ):
            prompt = prompts.prompts[0]
            messages = [*prompt.history, {"role": "user", "content": prompt.turns[0]}]
            ids = self.encode(messages, mode)
            if len(ids) > self.max_prompt_tokens:
                continue
            for variant in drafters:
                with RoundRecorder(self.target, variant.assistant, self.tokenizer) as recorder:
                    of_call = call_seed(seed, prompts.name, prompt.index, 0)
                    self.decode(variant, ids, self.plan.max_new_tokens, temperature, of_call)
                name = f"{variant.method}, {variant.checkpoint}" if variant.checkpoint else variant.method
                traces.append(recorder.trace(f"{name}: {prompts.name}, {mode}, temperature {temperature:g}"))
        return traces

    def compare(self, ids: list[int], answers: dict[tuple, list[int]], question: dict) -> None:
        """Note where greedy answers first differ from target-only's, and whether rounding explains it."""
        plain, *others = [
            torch.tensor([ids + answers[variant.key]], device=self.target.device) for variant in self.variants
        ]
        self.num_compared += len(others)
        for variant, other in zip(self.variants[1:], others, strict=True):
            if (difference := first_difference(self.target, plain, other)) is not None:
                position, gap = difference
                self.differences.append(
                    {
                        "method": variant.method,
                        "checkpoint": variant.checkpoint,
                        **question,
                        "position": position - len(ids),
                        "gap": gap if math.isfinite(gap) else None,  # JSON has no infinity
                        "explained": gap <= self.tie_gap,
                    }
                )

    @property
    def max_prompt_tokens(self) -> int:
        return self.target.config.max_position_embeddings - self.plan.max_new_tokens

    @property
    def tie_gap(self) -> float:
        return TIE_GAPS[self.target.dtype]

    @property
    def eos_ids(self) -> set[int]:
        eos = self.target.generation_config.eos_token_id
        return set(eos if isinstance(eos, list) else [eos])

    def results(self, *, complete: bool) -> dict:
        """The content of `results.json` without the environment."""
        num_ties = sum(difference["explained"] for difference in self.differences)
        variants = [variant.key for variant in self.variants]  # in their order, not the shuffled one of the calls
        records = sorted(self.records.done.values(), key=lambda r: variants.index((r["method"], r["checkpoint"])))
        rows = make_rows(records, self.differences, len(variants))
        return {
            "definitions": definitions(rows),
            "complete": complete,
            "resumed": self.records.num_resumed,
            "sources": self.records.settings.get("sources", {}),
            "code_changes": self.records.code_changes,
            "lossless": {
                "num_compared": self.num_compared,
                "num_ties": num_ties,
                "num_unexplained": len(self.differences) - num_ties,
                "tie_gap": self.tie_gap,
            },
            "left_out": self.left_out,
            "max_prompt_tokens": self.max_prompt_tokens,
            "rows": rows,
        }

    def empty_sets(self) -> list[str]:
        """Sets and modes without a prompt that is short enough."""
        empty = {}
        for prompts, mode, *_ in self.plan.cells():
            out = {
                x["prompt"] for x in self.left_out if (x["dataset"], x["mode"], x["turn"]) == (prompts.name, mode, 0)
            }
            if len(out) == len(prompts.prompts):
                empty[f"{prompts.name} ({mode})"] = None
        return list(empty)


def _named(question: dict) -> str:
    return ", ".join(f"{name} {question[name]}" for name in KEY if question.get(name) is not None)


def call_seed(seed: int, dataset: str, prompt: int, turn: int) -> int:
    """The seed of one call: the same for all methods, and whatever was decoded before."""
    # Not `hash`, which differs between processes
    digest = hashlib.sha256(json.dumps([seed, dataset, prompt, turn]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# ---------------------------------------------------------------------------------------------------- the command line


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 1 when an answer differs by more than rounding explains, a set could not be downloaded,
    or all its prompts were too long; else 0."""
    methods = _check(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    sets, missing = _prompt_sets(args)
    checkpoint = TargetCheckpoint(args.target, args.target_revision)
    methods = find_checkpoints(methods, checkpoint)
    records = Records(args.output, run_settings(args, methods, sets, checkpoint))
    records.check()
    if not sets:
        raise OSError("there is no prompt set to measure")
    target, tokenizer = load_target(*_loadable(checkpoint), args.dtype, args.device_map)
    variants = load_variants(methods, target, args.dtype)
    _warn_of_encoding(variants, args.modes, args.generation)
    encoding = {"effort": args.effort, "generation": args.generation}
    plan = Plan(sets, args.modes, args.temperatures, args.seeds, encoding, args.max_new_tokens)
    with records:
        if records.changed_files:
            _warn_of_code(records)
        write_atomically(args.output / COMMAND_FILE, (command_text(args) + "\n").encode())
        benchmark = Benchmark(target, tokenizer, variants, plan, records)
        facts = {"environment": environment(args, target, records.settings), "missing_sets": missing}
        try:
            benchmark.run()
        except BaseException:  # also Ctrl-C: report what there is, then raise it again
            where = _named(benchmark.now) or "the start"
            print(f"hyperdflash benchmark: stopped at {where}; run the same command again to resume", file=sys.stderr)
            write_report(args.output, {**facts, **benchmark.results(complete=False)})
            raise
        results = {**facts, **benchmark.results(complete=True)}
        write_report(args.output, results)
        if not draw_pictures(args.output, results["rows"]):
            print(f"no pictures: {NOTHING_TO_DRAW}")
        if args.trace:
            write_trace(args.output / TRACE_FILE, benchmark.traces())
    return _conclude(args, benchmark, results)


def _loadable(target: TargetCheckpoint) -> tuple[str, str | None]:
    """Folder, or Hub id and commit."""
    return (target.name, target.revision) if target.folder is None else (str(target.folder), None)


def _check(args: argparse.Namespace) -> list[Method]:
    """The methods of --methods. Raises `UsageError` for options that cannot be used as they are."""
    methods = parse_methods(args.methods)
    check_names(args.datasets, args.prompts)
    for name in ("modes", "temperatures", "seeds"):
        values = getattr(args, name)
        if len(set(values)) < len(values):
            raise UsageError(f"--{name} has a value twice: {' '.join(map(str, values))}")
    if args.trace and all(method.name in (TARGET_ONLY, PROMPT_LOOKUP) for method in methods):
        raise UsageError("--trace shows the rounds of drafters: add one to --methods")
    check_pictures()
    return methods


def _prompt_sets(args: argparse.Namespace) -> tuple[list[PromptSet], list[str]]:
    """The sets with their prompts selected, and the names of those that could not be downloaded, with a warning."""
    sets, missing = [read_file(path) for path in args.prompts], []
    for dataset in args.datasets:
        try:
            sets.append(fetch(dataset))
        except OSError as error:
            print(f"hyperdflash benchmark: {error}", file=sys.stderr)
            missing.append(dataset.partition("@")[0])
    return [prompts.select(args.num_prompts) for prompts in sets], missing


def _warn_of_encoding(variants: list[Variant], modes: list[str], generation: str) -> None:
    """Warn of drafters trained on another mode or generation of the chat encoding."""
    found = [
        (
            variant.checkpoint or variant.method,
            encoding_mismatch(getattr(variant.assistant, "config", None), mode, generation),
        )
        for variant, mode in product(variants, modes)
    ]
    for name, text in dict.fromkeys(found):  # once for a checkpoint of several methods
        if text is not None:
            print(f"hyperdflash benchmark: warning: {name} {text}; it will accept less", file=sys.stderr)


def _warn_of_code(records: Records) -> None:
    """Warn that the remaining calls are measured by other code than the recorded ones."""
    text = f"{', '.join(records.changed_files)} changed after the {records.num_resumed} calls in {records.folder}"
    advice = "the results name the change; choose another --output to measure everything with the same code"
    print(f"hyperdflash benchmark: {text} were measured: {advice}", file=sys.stderr)


def _conclude(args: argparse.Namespace, benchmark: Benchmark, results: dict) -> int:
    """Print the tables and what went wrong; returns the exit status."""
    _print_tables(results)
    for note in (*token_notes(results["rows"]), *run_notes(results)):
        print(note)
    for difference in benchmark.differences[:MOST_SHOWN]:
        cause = f"{results['environment']['dtype']} rounding" if difference["explained"] else "NOT rounding"
        where, gap = _named(difference), difference["gap"]
        print(f"  {where}: token {difference['position']}, logits of the two tokens {gap} apart: {cause}")
    empty = benchmark.empty_sets()
    for name in empty:
        print(f"hyperdflash benchmark: all prompts of {name} are too long", file=sys.stderr)
    print(f"results: {args.output}")
    return int(bool(results["lossless"]["num_unexplained"] or empty or results["missing_sets"]))


def _print_tables(results: dict) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    for title, header, lines in make_tables(results["rows"]):
        table = Table(title=title)
        for i, column in enumerate(header):
            table.add_column("\n".join(column.rsplit(" ", 1)), justify="right" if i else "left")
        for line in lines:
            table.add_row(*line)
        console.print(table)
