"""Training data: rows to token ids and loss masks, in the DeepSeek-V4 encoding.

`common/data_files.py` says what a row may look like. If a row has tokens (`input_ids` and `loss_mask`), they are used
instead of its text; its `mode` and `effort` override the caller's; null is the same as absent. The result is a
memory-mapped `datasets.Dataset`, cached by the content of the files, the settings, the tokenizer and this code.
`hyperdflash data preview` shows it.

    .venv/bin/python -m pytest tests/test_data.py
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from transformers import AutoConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from .. import encoding_deepseek_v4 as encoding
from ..common import data_files
from ..common.data_files import to_messages
from ..common.files import written_whole

if TYPE_CHECKING:  # `datasets` costs a second to import, which commands that read no data need not pay
    import datasets

logger = logging.get_logger(__name__)

BAD_ROW = "bad row"
UNSUPERVISED = "no supervised token"
CUT_OFF = "cut off by max_length before any answer"
NO_ANCHOR = "fewer than two supervised tokens in a row"


@dataclass(frozen=True)
class EncodingSettings:
    """How rows become tokens: `mode`, `effort` and `generation` as in [`encode_with_mask`], `max_length` in tokens.

    Raises `ValueError` for values that the encoding does not have.
    """

    mode: str = "non-thinking"
    effort: str | None = None
    generation: str = "preview"
    max_length: int = 3072

    def __post_init__(self):
        if self.max_length < 3:  # one token of context, an anchor, and a token to predict
            raise ValueError(f"max_length must be at least 3, got {self.max_length}")
        encoding.check_options(**self.chat_options())

    def chat_options(self) -> dict:
        return {"mode": self.mode, "effort": self.effort, "generation": self.generation}


class Sample(NamedTuple):
    """One encoded row: `input_ids` `(T,)` int32 and `loss_mask` `(T,)` int8, 1 on tokens to be learned, cut at
    `max_length`; the `mode` it is in; `reason`, why it cannot be trained on, or `""`; whether it was cut."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    mode: str
    reason: str
    is_cut: bool = False


def encode_row(row: dict, tokenizer: PreTrainedTokenizerBase, settings: EncodingSettings) -> Sample:
    """Tokens and loss mask of one row. Raises `ValueError` for a row that cannot be encoded."""
    mode = settings.mode if row.get("mode") is None else row["mode"]
    written_for = row.get("generation")  # public data sets call text so, which says nothing here
    # A tuple compares, where the dict would have to hash what may be a list
    if written_for in tuple(encoding.EFFORT_INSTRUCTIONS) and written_for != settings.generation:
        raise ValueError(
            f"the row was written for generation {written_for!r} of the encoding, not {settings.generation!r}: "
            f"set generation: {written_for}"
        )
    if row.get("input_ids") is not None:
        if mode not in encoding.MODES:
            raise ValueError(f"unknown mode {mode!r}; the DeepSeek-V4 encoding has {', '.join(encoding.MODES)}")
        ids, mask = _given_tokens(row, tokenizer)
    else:
        effort = settings.effort if row.get("effort") is None else row["effort"]
        options = settings.chat_options() | {"mode": mode, "effort": effort}
        ids, mask = encoding.encode_with_mask(to_messages(row), tokenizer, **options)
        # A half and an eighth of the int64 that Arrow would take on disk
        ids, mask = np.array(ids, dtype=np.int32), np.array(mask, dtype=np.int8)
    kept = slice(settings.max_length)
    # Both masks: a row without answers and one whose answer is cut off have different remedies
    return Sample(ids[kept], mask[kept], mode, _why_left_out(mask, mask[kept]), len(ids) > settings.max_length)


def _given_tokens(row: dict, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    if row.get("loss_mask") is None:
        raise ValueError("the row has input_ids but no loss_mask")
    ids, mask = _int_array("input_ids", row["input_ids"]), _int_array("loss_mask", row["loss_mask"])
    if len(ids) != len(mask):
        raise ValueError(f"input_ids has {len(ids)} entries but loss_mask has {len(mask)}")
    if len(outside := ids[(ids < 0) | (ids >= len(tokenizer))]):
        raise ValueError(f"input_ids holds {outside[0]}, outside the tokenizer's {len(tokenizer)} tokens")
    if len(wrong := mask[(mask != 0) & (mask != 1)]):
        raise ValueError(f"loss_mask holds {wrong[0]}; it must be 0 or 1")
    # Last, as the cast wraps around: values out of range would become valid ones
    return ids.astype(np.int32), mask.astype(np.int8)


def _int_array(name: str, values) -> np.ndarray:
    # `type`, as a truth value is an int too
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        raise ValueError(f"{name} must be a list of integers, and not empty")
    return np.array(values)


def _why_left_out(whole_mask: np.ndarray, mask: np.ndarray) -> str:
    if not whole_mask.any():
        return UNSUPERVISED
    if not mask.any():
        return CUT_OFF
    # An anchor is a supervised token with a position before it and a supervised token behind it.
    return "" if (mask[1:-1] & mask[2:]).any() else NO_ANCHOR


# --------------------------------------------------------------------------------------------------------- loading


@dataclass
class DataReport:
    """How many rows were kept, and why the others were not.

    Attributes:
        num_rows (`int`), num_kept (`int`): all rows, and those that can be trained on.
        num_cut (`int`): rows kept whose end is cut off by `max_length`.
        counts (`dict[str, int]`): rows left out, by reason.
        examples (`dict[str, list[str]]`): up to three sources for each reason; for a bad row also what is wrong.
        files (`list[dict]`): `file` and `sha256` of each.
        parts (`dict[str, int]`): where a part of the rows was drawn, how many from each entry.
    """

    num_rows: int = 0
    num_kept: int = 0
    num_cut: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    files: list[dict] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)

    def add(self, source: str, sample: Sample, error: str = "") -> None:
        """Count one row."""
        self.num_rows += 1
        reason = sample.reason
        if not reason:
            self.num_kept += 1
            self.num_cut += sample.is_cut
            return
        self.counts[reason] = self.counts.get(reason, 0) + 1
        if len(examples := self.examples.setdefault(reason, [])) < 3:
            examples.append(f"{source}: {error}" if error else source)

    def lines(self) -> list[str]:
        """The report as text: a line of totals, then one for each reason."""
        out = [f"{self.num_kept:,} of {self.num_rows:,} rows kept, {self.num_rows - self.num_kept:,} left out"]
        for reason, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            more = "; ..." if count > len(self.examples[reason]) else ""
            out.append(f"  {count:,} left out: {reason} ({'; '.join(self.examples[reason])}{more})")
        if self.num_cut:
            out.append(f"  {self.num_cut:,} of the rows kept are longer than max_length: their ends are not learned")
        if self.parts:
            parts = ", ".join(f"{count:,} of {name}" for name, count in self.parts.items())
            out.append(f"  {sum(self.parts.values()):,} of the rows kept are used: {parts}")
        return out

    def why_nothing_is_left(self) -> str:
        """The report in one line, for an error; with the way to answers where there are only prompts."""
        lines = [line.strip() for line in self.lines()]
        if UNSUPERVISED in self.counts:
            lines.append("`hyperdflash data regenerate` lets the target write the answers")
        return "; ".join(lines)


def load_data(files: list[str | Path], tokenizer: PreTrainedTokenizerBase, **kwargs) -> "datasets.Dataset":
    """[`load_data_with_report`] without the report."""
    return load_data_with_report(files, tokenizer, **kwargs)[0]


def load_data_with_report(
    files: list[str | Path],
    tokenizer: PreTrainedTokenizerBase,
    *,
    mode: str = "non-thinking",
    effort: str | None = None,
    generation: str = "preview",
    max_length: int = 3072,
    skip_bad_rows: bool = False,
    num_proc: int | None = None,
) -> "tuple[datasets.Dataset, DataReport]":
    """The rows of the files that can be trained on, encoded, and a report of those that cannot.

    Args:
        files: as in [`read_rows`].
        tokenizer: the target's, with the control tokens of the DeepSeek-V4 encoding.
        mode, effort, generation: of the encoding, as in [`encode_with_mask`].
        max_length: tokens that are kept of a row. What is left of a cut answer is learned, without an EOS.
        skip_bad_rows: leave out rows that cannot be read, instead of stopping at the first one.
        num_proc: processes that encode.

    Returns:
        A memory-mapped data set with columns `input_ids` (int32), `loss_mask` (int8, 1 = learned), `length` (int32, in
        tokens), `source` (`"file.jsonl:12"`) and `mode`, in the order of the files; and the [`DataReport`].

    Raises:
        OSError: as in [`read_rows`], and when the cache cannot be written.
        ValueError: for wrong settings, a tokenizer without the control tokens, a bad row (named by file and line), and
            when no row is left.
    """
    settings = EncodingSettings(mode, effort, generation, max_length)
    check_tokenizer(tokenizer, settings)
    origins = data_files.resolve(files)
    # One pass hashes each file and finds where rows start, so that processes can each read their own
    scans = [origin.scan() for origin in origins]
    encoded = _encode_all(origins, scans, tokenizer, settings, skip_bad_rows, num_proc)
    report = _make_report(encoded)
    report.files = [{"file": o.name, "sha256": scan[2]} for o, scan in zip(origins, scans, strict=True)]
    if report.counts.get(BAD_ROW) and not skip_bad_rows:  # encoded earlier, when they were to be skipped
        raise ValueError(_stop_message(report.examples[BAD_ROW][0]))
    if not report.num_kept:
        raise ValueError(f"no row is left to train on: {report.why_nothing_is_left()}")
    if report.counts:  # rows left out are in the cache too
        encoded = encoded.select(_where(encoded, ""))
    for line in report.lines():
        logger.info(line)
    return encoded.remove_columns(["reason", "error", "is_cut"]), report


def load_recipe_data(
    args, files: list[str], tokenizer: PreTrainedTokenizerBase
) -> "tuple[datasets.Dataset, DataReport]":
    """[`load_data_with_report`] with the settings of a run's arguments: the rows of training are those of features.

    Args:
        files: `args.train_data`, of which `max_samples` and `train_weights` draw a part, or `args.eval_data`.

    Raises `ValueError` too for a token that the run's target does not have.
    """
    names = ("mode", "effort", "generation", "max_length", "skip_bad_rows")
    settings = {name: getattr(args, name) for name in names} | {"num_proc": args.dataset_num_proc}
    vocab_size = AutoConfig.from_pretrained(args.target, revision=args.target_revision).vocab_size
    is_drawn = files is args.train_data and (args.max_samples or args.train_weights)  # not `==`: both may name a file
    # With weights, each entry by itself: a pattern is one, however many files it matches
    entries = [[name] for name in files] if is_drawn and args.train_weights else [files]
    loaded = []
    for entry in entries:
        loaded.append(load_data_with_report(entry, tokenizer, **settings))
        check_vocabulary(loaded[-1][0], vocab_size)
    if not is_drawn:
        return loaded[0]
    seed = args.seed if args.data_seed is None else args.data_seed
    counts = share([len(rows) for rows, _ in loaded], args.train_weights or [1.0], args.max_samples)
    if not all(counts):
        name = entries[counts.index(0)][0]
        raise ValueError(f"max_samples {args.max_samples} leaves no row of {name}: raise it, or the entry's weight")
    report = _join([report for _, report in loaded])
    twice = {file["file"] for i, file in enumerate(report.files) if file in report.files[:i]}
    if twice:
        raise ValueError(f"train_data names {', '.join(sorted(twice))} twice, so that rows would be drawn again")
    report.parts = {", ".join(map(str, entry)): count for entry, count in zip(entries, counts, strict=True)}
    parts = [draw(rows, count, seed) for (rows, _), count in zip(loaded, counts, strict=True)]
    return _concatenate(parts), report


def share(sizes: list[int], weights: list[float], max_samples: int | None) -> list[int]:
    """How many rows to draw of each data set: in proportion to the weights, together as many as the sizes allow and at
    most `max_samples`."""
    shares = [weight / sum(weights) for weight in weights]
    total = min(int(size / part + 1e-9) for size, part in zip(sizes, shares, strict=True))
    total = min(total, max_samples or total)
    # The bounds are rounded, not the counts, so that these add up
    bounds = [round(total * sum(shares[:i])) for i in range(len(shares) + 1)]
    return [min(stop - start, size) for start, stop, size in zip(bounds, bounds[1:], sizes, strict=False)]


def draw(rows: "datasets.Dataset", count: int, seed: int) -> "datasets.Dataset":
    """`count` of the rows, in their order."""
    if count == len(rows):
        return rows
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
    return rows.select(chosen.sort().values.numpy())


def _join(reports: list[DataReport]) -> DataReport:
    joined = DataReport()
    for report in reports:
        for name in ("num_rows", "num_kept", "num_cut"):
            setattr(joined, name, getattr(joined, name) + getattr(report, name))
        joined.files += report.files
        for reason, count in report.counts.items():
            joined.counts[reason] = joined.counts.get(reason, 0) + count
            joined.examples[reason] = (joined.examples.get(reason, []) + report.examples[reason])[:3]
    return joined


def _concatenate(parts: "list[datasets.Dataset]") -> "datasets.Dataset":
    import datasets

    return datasets.concatenate_datasets(parts) if len(parts) > 1 else parts[0]


def read_lengths(rows: "datasets.Dataset") -> np.ndarray:
    """Tokens of every row, `(N,)`: one column of Arrow, where a loop would take 200 us a row."""
    return rows.select_columns("length").with_format("numpy")[:]["length"]


def check_vocabulary(dataset: "datasets.Dataset", vocab_size: int) -> None:
    """Raises `ValueError` for a token id that a target with `vocab_size` tokens cannot look up."""
    import pyarrow.compute as pc

    # In Arrow: no Python object for each token. Rows that `select` left out are still in the column, but empty
    largest = pc.max(pc.list_flatten(dataset.data.column("input_ids"))).as_py()
    if largest >= vocab_size:
        source = next(row["source"] for row in dataset if max(row["input_ids"]) >= vocab_size)
        raise ValueError(
            f"{source} has the token id {largest}, but the target has {vocab_size} tokens: "
            "its tokenizer has tokens that the model does not have"
        )


def hash_data(dataset: "datasets.Dataset") -> str:
    """sha256 over `input_ids` and `loss_mask` of all rows, in their order; where they came from does not enter."""
    digest = hashlib.sha256()
    columns = ["input_ids", "loss_mask"]
    for table in dataset.select_columns(columns).with_format("arrow").iter(batch_size=1000):
        # A fixed byte order, so that machines agree on the hash
        for name, dtype in zip(columns, ("<i4", "i1"), strict=True):
            lists = table[name].combine_chunks()
            # The same tokens, cut into rows elsewhere, are other data
            digest.update(lists.value_lengths().to_numpy(zero_copy_only=False).astype("<i8").tobytes())
            digest.update(lists.flatten().to_numpy(zero_copy_only=False).astype(dtype).tobytes())
    return digest.hexdigest()


def hash_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over everything that decides which ids a text gets; where the tokenizer came from does not enter."""
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no tokenizer.json; the data needs a fast tokenizer")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None  # left over from the last call
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, settings: EncodingSettings) -> None:
    """Raise the `ValueError` for a tokenizer without the control tokens once, rather than for every row."""
    encoding.encode_with_mask([{"role": "user", "content": ""}], tokenizer, **settings.chat_options())


def _encode_all(
    origins: list,
    scans: list[tuple],
    tokenizer: PreTrainedTokenizerBase,
    settings: EncodingSettings,
    skip_bad_rows: bool,
    num_proc: int | None,
) -> "datasets.Dataset":
    """All rows, also those left out, with the `reason` for it and the `error` of bad ones; from the cache if there."""
    import datasets

    # Maps over the places of rows: rows themselves need not fit into one Arrow schema
    index = datasets.Dataset.from_dict(_make_index(scans))
    contents = [(origin.name, scan[2]) for origin, scan in zip(origins, scans, strict=True)]
    fingerprint = _fingerprint(contents, settings, tokenizer)
    cache = Path(datasets.config.HF_DATASETS_CACHE) / "hyperdflash"
    encoded = cache / f"data-{fingerprint}"
    options = {"origins": origins, "tokenizer": tokenizer, "settings": settings, "skip_bad_rows": skip_bad_rows}

    def encode(folder: Path) -> None:
        index.map(
            _encode_batch,
            batched=True,
            batch_size=256,
            remove_columns=index.column_names,
            features=_features(datasets),  # inferred, a column of empty lists would be null
            fn_kwargs=options,
            num_proc=num_proc,
            cache_file_name=str(folder / "data.arrow"),
            # The library's own hashes a pickle of `fn_kwargs`, and a tokenizer's changes once it is used
            new_fingerprint=fingerprint,
            desc="Encoding data",
        )

    with data_files.quiet_datasets(), _cache_named(cache):
        if not encoded.is_dir():
            cache.mkdir(parents=True, exist_ok=True)
            # One process encodes, and the others of a run wait as long as that takes: a barrier would time out
            with FileLock(cache / f".{encoded.name}.lock"):
                if not encoded.is_dir():
                    with written_whole(encoded) as folder:
                        encode(folder)
        # Several with `num_proc`, numbered; only mapped into memory. `datasets` may put files of its own beside them
        files = sorted(encoded.glob("data*.arrow"))
        return _concatenate([datasets.Dataset.from_file(str(file)) for file in files])


@contextmanager
def _cache_named(cache: Path) -> Iterator[None]:
    """A full disk has no name: Arrow says what it could not write, but not where."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and not Path(error.filename).is_relative_to(cache):
            raise
        reason = " ".join((error.strerror or str(error)).split())
        raise OSError(
            error.errno, f"the data cache {cache} cannot be written ({reason}): free it, or set HF_DATASETS_CACHE"
        ) from error


def _make_index(scans: list[tuple]) -> dict[str, np.ndarray]:
    """Where each row is: which origin, the position in it, and the number that a person knows it by."""
    return {
        "origin": np.repeat(np.arange(len(scans), dtype=np.int32), [len(positions) for positions, _, _ in scans]),
        "position": np.concatenate([np.frombuffer(positions, dtype=np.int64) for positions, _, _ in scans]),
        "number": np.concatenate([np.frombuffer(numbers, dtype=np.int64) for _, numbers, _ in scans]),
    }


def _features(datasets) -> "datasets.Features":
    Value, List = datasets.Value, datasets.List
    return datasets.Features(
        {
            "input_ids": List(Value("int32")),
            "loss_mask": List(Value("int8")),
            "length": Value("int32"),
            "source": Value("string"),
            "mode": Value("string"),
            "reason": Value("string"),
            "error": Value("string"),
            "is_cut": Value("bool"),
        }
    )


def _encode_batch(
    batch: dict, origins: list, tokenizer: PreTrainedTokenizerBase, settings: EncodingSettings, skip_bad_rows: bool
) -> dict[str, list]:
    names = ("input_ids", "loss_mask", "length", "source", "mode", "reason", "error", "is_cut")
    columns = {name: [] for name in names}
    places = zip(batch["origin"], batch["position"], batch["number"], strict=True)
    for i, group in groupby(places, key=lambda place: place[0]):  # a batch may go over the end of a file
        _, positions, numbers = zip(*group, strict=True)
        for number, row in zip(numbers, origins[i].read(positions), strict=True):
            source = f"{origins[i].name}:{number}"
            sample, error = encode_or_error(row, tokenizer, settings)
            if error and not skip_bad_rows:
                raise ValueError(_stop_message(f"{source}: {error}"))
            if sample.reason:  # stored all the same, so that the report can be made from the cache
                sample = sample._replace(input_ids=sample.input_ids[:0], loss_mask=sample.loss_mask[:0])
            ids, mask, mode, reason, is_cut = sample
            values = (ids, mask, len(ids), source, mode, reason, error, is_cut)
            for column, value in zip(columns.values(), values, strict=True):
                column.append(value)
    return columns


def encode_or_error(
    row: dict | ValueError, tokenizer: PreTrainedTokenizerBase, settings: EncodingSettings
) -> tuple[Sample, str]:
    """[`encode_row`] for what [`read_rows`] yields: the sample and `""`, or one without tokens whose reason is
    [`BAD_ROW`], and what is wrong with the row."""
    try:
        if isinstance(row, ValueError):
            raise row
        return encode_row(row, tokenizer, settings), ""
    except ValueError as error:
        empty = np.empty(0, dtype=np.int32)
        return Sample(empty, empty.astype(np.int8), settings.mode, BAD_ROW), str(error)


def _stop_message(problem: str) -> str:
    return f"{problem} (fix or remove the row, or set skip_bad_rows to leave such rows out)"


def _make_report(encoded: "datasets.Dataset") -> DataReport:
    import pyarrow.compute as pc

    reasons = encoded.data.column("reason")
    counts = {item["values"]: item["counts"] for item in pc.value_counts(reasons).to_pylist()}
    # `or 0`: Arrow's sum over no row is null
    num_cut = pc.sum(pc.and_(encoded.data.column("is_cut"), pc.equal(reasons, ""))).as_py() or 0
    report = DataReport(num_rows=len(encoded), num_kept=counts.pop("", 0), num_cut=num_cut, counts=counts)
    for reason in counts:
        examples = [encoded[int(i)] for i in _where(encoded, reason)[:3]]
        # Bad rows alone have an error to print after the colon
        report.examples[reason] = [f"{row['source']}: {row['error']}".removesuffix(": ") for row in examples]
    return report


def _where(encoded: "datasets.Dataset", reason: str) -> np.ndarray:
    import pyarrow.compute as pc

    return np.flatnonzero(pc.equal(encoded.data.column("reason"), reason).to_numpy())


def _fingerprint(
    contents: list[tuple[str, str]], settings: EncodingSettings, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Of everything that decides what is cached: files, settings, tokenizer, and the code that encodes."""
    code = [
        hashlib.sha256(Path(f).read_bytes()).hexdigest() for f in (__file__, data_files.__file__, encoding.__file__)
    ]
    facts = [contents, asdict(settings), hash_tokenizer(tokenizer), code]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]
