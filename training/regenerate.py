"""Regenerate the answers of a data set with the target: `hyperdflash data regenerate FILE... --output OUT`.

A drafter predicts what its target says, so it is best trained on the target's own answers.

    hyperdflash data regenerate chats.jsonl --server http://localhost:8000 --model deepseek-ai/DeepSeek-V4-Flash \\
        --tokenizer deepseek-ai/DeepSeek-V4-Flash --output answers.jsonl
    hyperdflash data regenerate chats.jsonl --target examples/tiny/target --threads 1 --output answers.jsonl   # a CPU

Every assistant turn that follows a user turn is replaced, and later turns see the new answers; a conversation that
ends with a user turn gets an answer. Other assistant turns have no header in the encoding and stay as they are. An
answer that reaches the length limit ends its conversation: half an answer is not a context for the next turn.

A line of the output is a conversation up to an answer, with the ids that the model read and wrote, which training uses
unchanged:

    {"messages": [...], "input_ids": [...], "loss_mask": [...], "answers": 1, "mode", "effort", "generation",
     "source": "chats.jsonl:12#1", "model", "temperature", "finish_reason": "stop" | "length",
     "token_ids": "exact" | "re-encoded"}

The prompt of a turn usually begins with the ids of the turn before. Its loss mask then covers the answers before it
too, `answers` in all, and a finished run leaves out the lines that a later one contains: one line a conversation. (Not
where the encoding drops an earlier turn's reasoning, or writes an answer with other tokens than the model did.)

Run the same command again to resume after a stop or a kill. `OUT.failed.jsonl` has the turns that got no answer in the
last run, with the reason; the next run tries them again. `OUT.jsonl.settings.json` has the settings that answers
depend on: a run with other settings is refused.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from ..common.checkpoint import load_tokenizer
from ..common.console import UsageError
from ..common.data_files import read_rows, to_messages
from ..common.files import write_atomically
from ..common.growing_file import GrowingFile, drop_lines, write_line
from ..encoding_deepseek_v4 import encode_messages, encode_with_mask
from .data import hash_tokenizer
from .writers import Answer, AnswerError, Sampling, ServerWriter, TargetWriter, Turn, TurnQueue

# ---------------------------------------------------------------------------------------------------------- the input

_TEXT_COLUMNS = ("messages", "conversations", "instruction", "prompt")


def answer_positions(messages: list[dict]) -> list[int]:
    """Where answers are written: the assistant turns right after a user turn, and the end if a user turn is last."""
    # The one added is the answer at the end, which counts only after a user turn
    roles = [message["role"] for message in messages] + ["assistant"]
    return [i for i in range(1, len(roles)) if roles[i - 1 : i + 1] == ["user", "assistant"]]


def read_conversation(row: dict | ValueError, encoding: dict) -> tuple[list[dict], dict]:
    """A row's messages and its encoding: `encoding`, or the row's own mode and effort. Raises `ValueError` for a row
    without a conversation, with one that the encoding cannot write, or without a turn to answer."""
    if isinstance(row, ValueError):
        raise row
    if row.get("input_ids") is not None and row.keys().isdisjoint(_TEXT_COLUMNS):
        raise ValueError("the row has tokens only (input_ids): only messages can be answered again")
    messages = to_messages(row)
    own = {name: row[name] for name in ("mode", "effort") if row.get(name) is not None}
    # Raises for what the encoding cannot write, before the first turn is asked
    encode_messages(messages, **encoding | own)
    if not answer_positions(messages):
        raise ValueError("the row has no user turn that an answer could follow")
    return messages, encoding | own


@dataclass
class Input:
    """What a first reading of all rows found.

    Attributes:
        num_turns (`int`): answers to be written.
        sha256 (`str`): of the rows and their sources.
    """

    num_turns: int = 0
    sha256: str = ""


def inspect_input(
    files: list[str], encoding: dict, skip_bad_rows: bool, max_samples: int | None = None, seed: int = 0
) -> Input:
    """Read every row to be answered once, before any work. Raises `ValueError` that names file and line of a bad row,
    unless they are to be skipped, and for a file given twice; `OSError` for a missing one."""
    # A file given twice has its line numbers start again, or its name come back after another's
    found, digest, seen, last = Input(), hashlib.sha256(), set(), ("", 0)
    rows = read_rows(files, max_samples, seed)
    for source, row in tqdm(rows, desc="Reading rows", unit=" rows", disable=None, leave=False):
        # Bad rows too: with one of them repaired, the input is another one
        digest.update(json.dumps([source, repr(row) if isinstance(row, ValueError) else row], default=str).encode())
        name, _, number = source.rpartition(":")
        if (name in seen) if name != last[0] else int(number) <= last[1]:
            raise ValueError(f"{name} is given twice: each row is answered once")
        seen.add(name)
        last = name, int(number)
        try:
            found.num_turns += len(answer_positions(read_conversation(row, encoding)[0]))
        except ValueError as error:
            if not skip_bad_rows:
                raise ValueError(f"{source}: {error} (fix or remove the row, or use --skip-bad-rows)") from error
    if not found.num_turns:
        raise ValueError("no row can be answered: every one is bad")
    found.sha256 = digest.hexdigest()
    return found


def make_turn(
    source: str,
    number: int,
    messages: list[dict],
    encoding: dict,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    before: dict | None = None,
) -> Turn:
    """The `number`-th re-written turn (from 1) of a conversation whose earlier answers are new already.

    Args:
        before: the output's row of the turn before.
    """
    position = answer_positions(messages)[number - 1]
    ids, _ = encode_with_mask(messages[:position], tokenizer, add_generation_prompt=True, **encoding)
    name = source.rpartition("/")[2]  # the same seed wherever the file lies
    # 31 bits, so that it fits a signed 32-bit integer wherever it is sent
    own_seed = int.from_bytes(hashlib.sha256(f"{seed}:{name}#{number}".encode()).digest()[:4]) >> 1
    turn = Turn(source, number, messages, position, encoding, ids, own_seed)
    if before is None or ids[: len(before["input_ids"])] != before["input_ids"]:
        return turn
    # Files of earlier versions have no `answers`: a row was of one
    return replace(turn, known_mask=before["loss_mask"], num_known=before.get("answers", 1))


# ---------------------------------------------------------------------------------------------------------- the output


class Output(GrowingFile):
    """The file of answers, the file of failed turns, and the settings they depend on.

    Args:
        path: a `.jsonl` file; an earlier run of the same command may have started it.
        settings: everything that its rows depend on.

    Attributes:
        done (`dict[str, tuple[int, str, int]]`): by source, the number and finish reason of the last turn in the file,
            and the byte where its row starts.
    """

    def __init__(self, path: str | Path, settings: dict):
        super().__init__(Path(path))
        self.failed_path = self.path.with_suffix(".failed.jsonl")
        self.settings_path = self.path.with_name(self.path.name + ".settings.json")
        self.settings = json.loads(json.dumps(settings))  # as the file gives them back
        self.done: dict[str, tuple[int, str, int]] = {}
        self._failed = None

    def check(self) -> None:
        """Raises `ValueError` for another run's file, naming the settings that differ. Writes nothing."""
        if not self._has_rows():
            return
        if not self.settings_path.is_file():
            raise ValueError(f"{self.path} exists, but {self.settings_path.name} does not: choose another --output")
        before = json.loads(self.settings_path.read_text(encoding="utf-8"))
        names = [name for name in {**before, **self.settings} if before.get(name) != self.settings.get(name)]
        if names:
            short = [f"{n}={str(before.get(n))[:60]} (now {str(self.settings.get(n))[:60]})" for n in names]
            raise ValueError(
                f"{self.path} was started with {', '.join(short)}: use the same settings or another --output"
            )

    def _has_rows(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def __enter__(self) -> "Output":
        is_new = not self._has_rows()
        super().__enter__()
        # With the lock held: of two runs started at once, only one writes its settings
        if is_new:
            write_atomically(self.settings_path, (json.dumps(self.settings, indent=2) + "\n").encode())
        # Its turns are asked again
        self.failed_path.unlink(missing_ok=True)
        return self

    def __exit__(self, *exc) -> None:
        super().__exit__(*exc)
        if self._failed is not None:
            self._failed.close()

    def take(self, row: dict, start: int) -> None:
        source, _, turn = row["source"].rpartition("#")
        # A conversation's turns are in order in the file: the last one read stays
        self.done[source] = int(turn), row["finish_reason"], start

    def last_row(self, source: str) -> dict:
        """The row of a conversation's last turn in the file."""
        # From the file: the conversations of a whole data set may not fit into memory
        with self.path.open("rb") as file:
            file.seek(self.done[source][2])
            return json.loads(file.readline())

    def drop_covered(self) -> None:
        """Leave out the rows whose answers are all in a later row of their conversation. Raises `OSError` naming the
        file, which then stays as it is."""
        last, covered, start = {}, set(), 0
        with self.path.open("rb") as file:
            for line in file:
                row = json.loads(line)
                source = row["source"].rpartition("#")[0]
                if row.get("answers", 1) > 1 and source in last:  # it has all that the row before has
                    covered.add(last[source])
                last[source] = start
                start += len(line)
        if covered:
            drop_lines(self.path, covered)

    def fail(self, row: dict) -> None:
        """Append to the failed rows, whose file exists only if there are any."""
        if self._failed is None:
            self._failed = self.failed_path.open("ab")
        write_line(self._failed, row)


# --------------------------------------------------------------------------------------------------------------- a run


@dataclass
class Report:
    """Counts of a run: turns answered and failed (bad rows included), answers cut by the limit, later turns that were
    not asked because of either, texts encoded again, tokens written, seconds."""

    num_answered: int = 0
    num_failed: int = 0
    num_cut: int = 0
    num_unasked: int = 0
    num_re_encoded: int = 0
    num_tokens: int = 0
    num_done_before: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    def __str__(self) -> str:
        parts = [f"{self.num_answered:,} answers of {self.num_tokens:,} tokens"]
        parts += [f"{self.num_cut:,} cut by --max-new-tokens"] if self.num_cut else []
        parts += [f"{self.num_re_encoded:,} encoded again from text"] if self.num_re_encoded else []
        parts += [f"{self.num_failed:,} failed"] if self.num_failed else []
        parts += [f"{self.num_unasked:,} later turns not asked after these"] if self.num_unasked else []
        parts += [f"{self.num_done_before:,} were there before"] if self.num_done_before else []
        return ", ".join(parts) + f"; {self.seconds:.0f} s, {self.tokens_per_second:,.0f} tokens/s"


class _Run:
    """One run over the rows: what is left to be asked, and what becomes of every answer."""

    def __init__(
        self,
        files,
        encoding: dict,
        sampling: Sampling,
        tokenizer: PreTrainedTokenizerBase,
        output: Output,
        model: str,
        max_samples: int | None,
    ):
        self.files, self.encoding, self.sampling, self.tokenizer = files, encoding, sampling, tokenizer
        self.output, self.model, self.max_samples = output, model, max_samples
        self.report = Report(num_done_before=sum(done[0] for done in output.done.values()))

    def turns(self) -> Iterator[Turn]:
        """The first turn of every conversation that the output does not hold."""
        for source, row in read_rows(self.files, self.max_samples, self.sampling.seed):
            try:
                messages, encoding = read_conversation(row, self.encoding)
            except ValueError as error:
                self.report.num_failed += 1
                self.output.fail({"source": source, "reason": f"bad row: {error}"})
                continue
            number, before = 1, None
            if source in self.output.done:
                number, reason, _ = self.output.done[source]
                # Later turns follow the answers in the file, not those of the row
                before = self.output.last_row(source)
                messages = before["messages"] + messages[len(before["messages"]) :]
                if self._is_over(messages, number, reason == "length"):
                    continue
                number += 1
            yield make_turn(source, number, messages, encoding, self.tokenizer, self.sampling.seed, before)

    def _is_over(self, messages: list[dict], number: int, is_broken_off: bool) -> bool:
        """Whether turn `number` was the conversation's last; counts the turns that will not be asked."""
        num_left = len(answer_positions(messages)) - number
        if is_broken_off:
            self.report.num_unasked += num_left
        return is_broken_off or not num_left

    def keep(self, turn: Turn, answer: Answer) -> Turn | None:
        """Write an answer; returns the turn that follows it."""
        messages = [*turn.prompt, answer.message]
        is_cut = answer.finish_reason == "length"
        num_new = len(turn.prompt_ids) - len(turn.known_mask)
        row = {
            "messages": list(messages),
            "input_ids": turn.prompt_ids + answer.input_ids,
            "loss_mask": turn.known_mask + [0] * num_new + [1] * len(answer.input_ids),
            "answers": turn.num_known + 1,
            **turn.encoding,
            "source": f"{turn.source}#{turn.number}",
            "model": self.model,
            "temperature": self.sampling.temperature,
            "finish_reason": answer.finish_reason,
            "token_ids": answer.token_ids,
        }
        # Before the next turn is asked: a kill loses only the answers under way
        self.output.append(row)
        self.report.num_answered += 1
        self.report.num_tokens += len(answer.input_ids)
        self.report.num_cut += is_cut
        self.report.num_re_encoded += answer.token_ids == "re-encoded"
        messages += turn.messages[turn.position + 1 :]
        if self._is_over(messages, turn.number, is_cut):
            return None
        seed = self.sampling.seed
        return make_turn(turn.source, turn.number + 1, messages, turn.encoding, self.tokenizer, seed, row)

    def fail(self, turn: Turn, error: AnswerError) -> None:
        """Write a turn without an answer to the failed rows, as a row that can be asked again."""
        self.report.num_failed += 1
        self._is_over(turn.messages, turn.number, True)  # counts the turns after it
        source = f"{turn.source}#{turn.number}"
        self.output.fail({"source": source, "reason": str(error), "messages": turn.prompt, **turn.encoding})


def regenerate(
    files: list[str],
    output: str | Path,
    writer: TargetWriter | ServerWriter,
    tokenizer: PreTrainedTokenizerBase,
    *,
    mode: str = "non-thinking",
    effort: str | None = None,
    generation: str = "preview",
    sampling: Sampling = Sampling(),  # noqa: B008  a named tuple
    skip_bad_rows: bool = False,
    max_samples: int | None = None,
) -> Report:
    """Regenerate the answers to the conversations of `files`, into `output`; see this file's docstring.

    Args:
        files: as in `read_rows`. A row's own `mode` and `effort` win over the arguments.
        output: a `.jsonl` file in a folder that exists.
        writer: what answers: a target in this process, or a server.
        tokenizer: of the target.
        mode, effort, generation: of the encoding.
        sampling: limit, temperature, nucleus and seed of the answers.
        skip_bad_rows: count rows that cannot be used as failed, instead of stopping at the first before any work.
        max_samples: how many rows to answer, drawn by the sampling's seed; by default all.

    Raises:
        ValueError: for bad rows, settings, or an output that was started with other settings.
        OSError: for missing files, an output that cannot be written, a server that is not there or goes away.
    """
    check_paths(files, output)
    encoding = {"mode": mode, "effort": effort, "generation": generation}
    encode_with_mask([{"role": "user", "content": ""}], tokenizer, **encoding)  # a tokenizer without control tokens
    found = inspect_input(files, encoding, skip_bad_rows, max_samples, sampling.seed)
    # A part is data of its own: `data_sha256` tells which
    hashes = {"data_sha256": found.sha256, "tokenizer_sha256": hash_tokenizer(tokenizer)}
    out = Output(output, {**writer.identity, **encoding, **sampling._asdict(), **hashes})
    # Before the target is loaded, which may take minutes
    out.check()
    writer.load()
    with out:
        run = _Run(files, encoding, sampling, tokenizer, out, writer.name, max_samples)
        _answer_all(run, writer, found.num_turns)
        out.drop_covered()
    return run.report


def _answer_all(run: _Run, writer: TargetWriter | ServerWriter, num_turns: int) -> None:
    report, start = run.report, time.perf_counter()
    queue = TurnQueue(run.turns())
    with tqdm(total=num_turns, initial=report.num_done_before, desc="Answers", unit=" turns", disable=None) as bar:
        for turn, result in writer.answers(queue, run.tokenizer, run.sampling):
            if isinstance(result, AnswerError):
                run.fail(turn, result)
            elif (following := run.keep(turn, result)) is not None:
                queue.push(following)
            report.seconds = time.perf_counter() - start
            # Conversations that end early leave turns that are never asked
            bar.total = num_turns - report.num_unasked
            bar.set_postfix_str(f"{report.tokens_per_second:,.0f} tokens/s, {report.num_failed} failed", refresh=False)
            bar.update()


def check_paths(files: list[str], output: str | Path) -> None:
    """Raises `ValueError` or `OSError` for an output that cannot be one."""
    output = Path(output)
    if output.suffix != ".jsonl":
        raise UsageError(f"--output {output} must be a .jsonl file")
    if output.is_dir():
        raise IsADirectoryError(f"--output {output} is a folder: name a .jsonl file in it")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"no folder {output.parent} to write {output.name} in")
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(f"the folder {output.parent} cannot be written to")
    for file in files:
        # A pattern, or the name of a data set on the Hub, need not be possible as a path
        with suppress(OSError):
            if Path(file).exists() and output.resolve() == Path(file).resolve():
                raise ValueError(f"--output {output} is one of the input files")


# ---------------------------------------------------------------------------------------------------- the command line


def run(args: argparse.Namespace) -> int:
    """Run the command; returns 1 if every answer failed, else 0."""
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    check_paths(args.files, args.output)
    # The target's revision says nothing about another repository's tokenizer
    tokenizer_revision = args.target_revision if args.tokenizer is None else None
    writer = _make_writer(args)
    tokenizer = load_tokenizer(args.tokenizer or args.target, tokenizer_revision)
    report = regenerate(
        args.files,
        args.output,
        writer,
        tokenizer,
        mode=args.mode,
        effort=args.effort,
        generation=args.generation,
        sampling=sampling,
        skip_bad_rows=args.skip_bad_rows,
        max_samples=args.max_samples,
    )
    print(f"{args.output}: {report}")
    if report.num_failed:
        print(f"reasons of the failures: {args.output.with_suffix('.failed.jsonl')}")
    return int(report.num_failed > 0 and report.num_answered + report.num_done_before == 0)


def _make_writer(args: argparse.Namespace) -> TargetWriter | ServerWriter:
    names = ("concurrency", "retries", "timeout") if args.server else ("batch_size", "dtype", "device_map")
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.server:
        if args.api_key_env is not None:
            if args.api_key_env not in os.environ:
                raise UsageError(f"--api-key-env: there is no environment variable {args.api_key_env}")
            options["api_key"] = os.environ[args.api_key_env]
        return ServerWriter(args.server, args.model, **options)
    if args.threads:
        torch.set_num_threads(args.threads)
    return TargetWriter(args.target, args.target_revision, **options)
