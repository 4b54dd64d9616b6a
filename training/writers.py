"""What answers the turns of `regenerate`: a target in this process, or an OpenAI-compatible server.

    .venv/bin/python -m pytest tests/test_regenerate.py

Both take turns from a `TurnQueue`, to which the next turn of a conversation is added once one is answered, and yield
`(turn, Answer)` or `(turn, AnswerError)` as answers are completed.

`TargetWriter` decodes batches without padding, as DeepSeek-V4 would pool padding into its compressed entries. All
prompts of a batch start at position 0 and differ in length by a few tokens. The length of the shortest is prefilled;
then the longer ones are fed the rest of their prompt, token by token, while the shorter ones are already answered.
Finished rows leave the batch.

Legend: B batch, T sequence, V vocabulary.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from queue import SimpleQueue
from random import uniform
from time import sleep
from typing import NamedTuple

import httpx2 as httpx
import torch
from transformers import DynamicCache, PreTrainedTokenizerBase
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from transformers.utils import logging

from ..common.checkpoint import TargetCheckpoint, load_target_model, read_identity, resolve_checkpoint
from ..common.console import UsageError
from ..common.precision import load_dtype
from ..encoding_deepseek_v4 import EOS_TOKEN, THINK_END_TOKEN, THINK_START_TOKEN, encode_with_mask, to_message
from ..pairing_hyperdflash import target_fingerprint
from ..target_hyperdflash import make_rewindable

logger = logging.get_logger(__name__)

MAX_SPREAD = 64  # tokens between the shortest and the longest prompt of a batch
WINDOW = 64  # batches' worth of turns that a batch is chosen from
LONGEST_WAIT = 60.0  # seconds between two tries of a request


class Sampling(NamedTuple):
    """How answers are drawn: greedily at temperature 0, else from the nucleus of `top_p`. `seed` is the run's."""

    max_new_tokens: int = 2048
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """One answer to be written.

    Attributes:
        source (`str`): where the conversation comes from, "file.jsonl:12".
        number (`int`): which of the conversation's regenerated turns this is, from 1.
        messages (`list[dict]`): the whole conversation, earlier answers being the new ones.
        position (`int`): index in `messages` of the answer; their length to append one.
        encoding (`dict`): `mode`, `effort` and `generation` of `encode_with_mask`.
        prompt_ids (`list[int]`): what the model is asked.
        known_mask (`list[int]`), num_known (`int`): where the prompt begins with the row of the turn before, the loss
            mask of that row and how many answers it has; else nothing.
        seed (`int`): of this turn alone, so that its answer does not depend on what else is being written.
    """

    source: str
    number: int
    messages: list[dict]
    position: int
    encoding: dict
    prompt_ids: list[int] = field(repr=False)
    seed: int = 0
    known_mask: list[int] = field(default_factory=list, repr=False)
    num_known: int = 0

    @property
    def prompt(self) -> list[dict]:
        return self.messages[: self.position]


class Answer(NamedTuple):
    """Attributes:
    input_ids (`list[int]`): what the model wrote, its EOS included.
    message (`dict`): the same as an assistant message; in thinking mode with `"reasoning"`.
    finish_reason (`str`): `"stop"`, or `"length"` for an answer cut by the limit.
    token_ids (`str`): `"exact"`, or `"re-encoded"` where a server gave text only.
    """

    input_ids: list[int]
    message: dict
    finish_reason: str
    token_ids: str = "exact"


class AnswerError(Exception):
    """Why a turn has no answer. `unreachable` means that there was no reply from a server at all."""

    def __init__(self, reason: str, unreachable: bool = False):
        super().__init__(reason)
        self.unreachable = unreachable


class TurnQueue:
    """The turns that can be answered now; more are read from an iterator when they are needed."""

    def __init__(self, turns: Iterator[Turn]):
        self.pending: list[Turn] = []
        self._unread = turns

    def fill(self, num_turns: int) -> None:
        """Read on until `num_turns` are pending or none is left."""
        # As needed: the conversations of a large data set are never all in memory
        self.pending += islice(self._unread, max(num_turns - len(self.pending), 0))

    def push(self, turn: Turn) -> None:
        self.pending.append(turn)


# ------------------------------------------------------------------------------------------------ a target, in process


class TargetWriter:
    """Answers by a DeepSeek-V4 in this process.

    Args:
        target (`str`): folder or Hub id; only its head is read until `load`.
        batch_size (`int`, *optional*, defaults to 32): rows decoded together.
        dtype, device_map: as in `from_pretrained`, but `"auto"` is float32 on a CPU without bf16.

    Raises `ValueError` for a model that is not a DeepSeek-V4, `OSError` for missing files.
    """

    def __init__(
        self,
        target: str,
        revision: str | None = None,
        *,
        batch_size: int = 32,
        dtype: str = "auto",
        device_map: str | None = None,
    ):
        self.source = resolve_checkpoint(target, revision)  # folder or Hub id, and the commit
        checkpoint = TargetCheckpoint(*self.source)
        self.revision, self.name = checkpoint.revision, checkpoint.name
        self.batch_size, self.device_map = batch_size, device_map
        on_cpu = device_map in (None, "cpu") or not torch.accelerator.is_available()
        self.dtype = load_dtype(dtype) if on_cpu else dtype
        tensors = read_identity(checkpoint)
        self.identity = {
            "backend": "transformers",
            "model": self.name,
            "revision": self.revision,
            "dtype": self.dtype,
            "fingerprint": hashlib.sha256(json.dumps(target_fingerprint(tensors)).encode()).hexdigest(),
        }

    def load(self) -> None:
        """Load the model."""
        self.target = load_target_model(*self.source, self.dtype, self.device_map)

    def answers(
        self, queue: TurnQueue, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
    ) -> Iterator[tuple[Turn, Answer | AnswerError]]:
        """Answer the queue's turns until it is empty."""
        limit = self.target.config.max_position_embeddings
        eos_ids = _eos_ids(self.target, tokenizer)
        queue.fill(WINDOW * self.batch_size)
        while queue.pending:
            batch = take_batch(queue.pending, self.batch_size)
            for turn in batch:
                if len(turn.prompt_ids) >= limit:
                    num_tokens = len(turn.prompt_ids)
                    yield turn, AnswerError(f"the prompt's {num_tokens} tokens fill the target's {limit} positions")
            batch = [turn for turn in batch if len(turn.prompt_ids) < limit]
            for index, ids, reason in write_batch(self.target, batch, sampling, eos_ids) if batch else ():
                message = to_message(ids, tokenizer, batch[index].encoding["mode"], eos_ids)
                yield batch[index], Answer(ids, message, reason)
            queue.fill(WINDOW * self.batch_size)


def _eos_ids(target: DeepseekV4ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Where `generate` stops, and the encoding's own EOS."""
    ids = target.generation_config.eos_token_id
    # transformers allows an integer, a list and None
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return {*ids, tokenizer.convert_tokens_to_ids(EOS_TOKEN)}


def take_batch(pending: list[Turn], batch_size: int) -> list[Turn]:
    """Take from `pending` the largest batch of prompts that differ by at most `MAX_SPREAD` tokens; of several as
    large, the one whose prompts differ least."""
    pending.sort(key=lambda turn: len(turn.prompt_ids))
    lengths = [len(turn.prompt_ids) for turn in pending]
    first, best = 0, (0, 0, 0)  # number of rows, minus their spread, index of the last
    for last in range(len(lengths)):
        # Sorted by length, the best batch is a stretch of neighbours
        while lengths[last] - lengths[first] > MAX_SPREAD or last - first >= batch_size:
            first += 1
        best = max(best, (last - first + 1, lengths[first] - lengths[last], last))
    chosen = slice(best[2] - best[0] + 1, best[2] + 1)
    batch = pending[chosen]
    del pending[chosen]
    return batch


@torch.no_grad()
def write_batch(
    target: DeepseekV4ForCausalLM, turns: list[Turn], sampling: Sampling, eos_ids: set[int]
) -> Iterator[tuple[int, list[int], str]]:
    """Decode prompts of unequal length together, all of them starting at position 0.

    Yields `(index in turns, the answer's ids, "stop" or "length")`, each as soon as it is complete.
    """
    state = _batch_state(target, turns, sampling)
    stops = torch.tensor(sorted(eos_ids), device=target.device)
    # V4's own layers select rows of the sliding window only, and would leave the compressors' behind
    cache = make_rewindable(DynamicCache(config=target.config), target.config)
    start, position = 0, min(len(turn.prompt_ids) for turn in turns)
    while True:
        rows, lengths, limits, tokens, draws = state
        logits = target(tokens[:, start:position], cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        chosen = choose(logits, _draw_at(draws, position - lengths), sampling)
        is_answer = position >= lengths  # (B,); the other rows keep their prompt's token
        tokens[:, position] = torch.where(is_answer, chosen, tokens[:, position])
        start, position = position, position + 1
        # A prompt may hold an end-of-text token: only one in the answer stops a row
        stopped = is_answer & torch.isin(tokens[:, start], stops)
        ended = stopped | (position >= limits)
        if not ended.any():
            continue
        for i in ended.nonzero()[:, 0].tolist():
            ids = tokens[i, lengths[i] : position].tolist()
            yield int(rows[i]), ids, "stop" if stopped[i] else "length"
        if ended.all():
            return
        # What is left of the batch: rows of the state and of the cache go together
        state = [t[~ended] for t in state]
        cache.batch_select_indices((~ended).nonzero()[:, 0])


def _batch_state(target: DeepseekV4ForCausalLM, turns: list[Turn], sampling: Sampling) -> list[torch.Tensor]:
    """Per row: its index in turns, its prompt's length and its limit in tokens, all (B,), the tokens (B, T) with the
    prompt at the front, and its random numbers."""
    lengths = torch.tensor([len(turn.prompt_ids) for turn in turns])
    limits = (lengths + sampling.max_new_tokens).clamp(max=target.config.max_position_embeddings)
    tokens = lengths.new_zeros(len(turns), int(limits.max()))
    for row, turn in zip(tokens, turns, strict=True):
        row[: len(turn.prompt_ids)] = torch.tensor(turn.prompt_ids)
    state = torch.arange(len(turns)), lengths, limits, tokens, _draws(turns, sampling)
    return [tensor.to(target.device) for tensor in state]


def _draws(turns: list[Turn], sampling: Sampling) -> torch.Tensor:
    """Uniform numbers (B, max_new_tokens), each row from its turn's own seed; (B, 0) for greedy decoding."""
    num_draws = sampling.max_new_tokens if sampling.temperature else 0
    # All of them beforehand and on the CPU: the same numbers on any device and in any batch
    generators = [torch.Generator().manual_seed(turn.seed) for turn in turns]
    return torch.stack([torch.rand(num_draws, generator=g, dtype=torch.float64) for g in generators])


def _draw_at(draws: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
    """The number for each row's `index`-th answer token; rows still inside their prompt get one that is not used."""
    return draws.gather(1, index.clamp(min=0)[:, None])[:, 0] if draws.shape[1] else None


def choose(logits: torch.Tensor, draws: torch.Tensor | None, sampling: Sampling) -> torch.Tensor:
    """The next token of each row (B,) from its logits (B, V) and a uniform number (B,): the inverse of the cumulative
    distribution, so that a row's token depends on its own number and nothing else."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    # In fp64: a cumulative sum over 129,280 tokens in fp32 is off by more than a rare token's probability
    probs = (logits.double() / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(descending=True, stable=True)
        # The sum before a token decides, so that the first one always stays
        outside = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = probs.scatter(-1, order, ordered.masked_fill(outside, 0))
    bounds = probs.cumsum(-1)
    # right=True never picks a token of probability 0, and draws < 1 stay below the last bound
    return torch.searchsorted(bounds, (draws * bounds[:, -1])[:, None], right=True)[:, 0]


# ------------------------------------------------------------------------------------------------------------ a server


class ServerWriter:
    """Answers by `/v1/completions` of an OpenAI-compatible server, which is sent token ids.

    vLLM and SGLang return the answer's ids (`return_token_ids`). From a server that does not, the text is re-encoded.

    Args:
        url (`str`): `http://host:port`, with or without `/v1`.
        model (`str`): the name it serves the target under.
        concurrency (`int`, *optional*, defaults to 32): requests under way at the same time.
        retries (`int`, *optional*, defaults to 5): further tries after a lost connection, 408, 429 or 5xx, with waits
            of 1, 2, 4, ... seconds or what `Retry-After` says, at most 60.
        timeout (`float`, *optional*, defaults to 600): seconds without a reply, so the time of the longest answer.
        api_key (`str`, *optional*): sent as a bearer token.
    """

    first_wait = 1.0  # seconds, doubled at every try

    def __init__(
        self,
        url: str,
        model: str,
        *,
        concurrency: int = 32,
        retries: int = 5,
        timeout: float = 600.0,
        api_key: str | None = None,
    ):
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"{url} is not a server's address: it must start with http:// or https://")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.name, self.concurrency, self.retries = model, concurrency, retries
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self.client = httpx.Client(headers=headers, timeout=timeout, limits=limits, follow_redirects=True)
        self.identity = {"backend": "server", "model": model}

    def load(self) -> None:
        """Check that the server is there and has the model. Raises `OSError` and `ValueError`."""
        try:
            listed = self._send("/models")
        except httpx.HTTPStatusError as error:
            if error.response.status_code != 404:  # a server may have completions and no list of models
                raise OSError(f"{self.url}/models answers {_describe(error)}") from error
            return
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise OSError(f"no server answers at {self.url}: {_describe(error)}") from error
        names = [model.get("id") for model in listed.get("data") or []]
        if names and self.name not in names:
            raise ValueError(f"{self.url} does not serve {self.name!r}; it serves {', '.join(map(str, names))}")

    def answers(
        self, queue: TurnQueue, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
    ) -> Iterator[tuple[Turn, Answer | AnswerError]]:
        """Answer the queue's turns until it is empty. Raises `OSError` when the server is gone."""
        asked, answered = SimpleQueue(), SimpleQueue()
        for _ in range(self.concurrency):  # daemons, so that Ctrl-C need not wait for the longest answer
            threading.Thread(target=self._work, args=(asked, answered, sampling), daemon=True).start()
        num_asked = num_unreachable = 0
        try:
            while True:
                queue.fill(2 * self.concurrency)
                while queue.pending and num_asked < self.concurrency:
                    # From the end: conversations under way are finished before new ones start
                    asked.put(queue.pending.pop())
                    num_asked += 1
                if not num_asked:
                    return
                turn, result = answered.get()
                num_asked -= 1
                if isinstance(result, dict):
                    result = _read_choice(result, turn, tokenizer)
                yield turn, result
                is_lost = isinstance(result, AnswerError) and result.unreachable
                # In a row: one lost connection fails its turn, only all of them mean that the server is gone
                num_unreachable = num_unreachable + 1 if is_lost else 0
                if num_unreachable >= 2 * self.concurrency:
                    raise OSError(f"{self.url} is gone ({result}): run the same command again to resume")
        finally:
            for _ in range(self.concurrency):
                asked.put(None)  # ends one thread

    def _work(self, asked: SimpleQueue, answered: SimpleQueue, sampling: Sampling) -> None:
        """One of the threads: a request at a time."""
        while (turn := asked.get()) is not None:
            try:
                answered.put((turn, self._ask(turn, sampling)))
            except Exception as error:  # a thread must not die silently: its turn would be waited for in vain
                answered.put((turn, error if isinstance(error, AnswerError) else AnswerError(_describe(error))))

    def _ask(self, turn: Turn, sampling: Sampling) -> dict:
        """The first choice of the server's answer. Raises `AnswerError` once no try is left, or for a refusal."""
        body = {
            "model": self.name,
            "prompt": turn.prompt_ids,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "return_token_ids": True,
            "skip_special_tokens": False,  # where the text has to be re-encoded, it needs its </think>
        }
        if sampling.temperature:
            body |= {"top_p": sampling.top_p, "seed": turn.seed}
        for attempt in range(self.retries + 1):
            # At random, so that the threads do not all come back to a busy server at once
            wait = min(self.first_wait * 2**attempt, LONGEST_WAIT) * uniform(0.5, 1)
            try:
                return _first_choice(self._send("/completions", body))
            except (httpx.RequestError, httpx.HTTPStatusError, json.JSONDecodeError) as error:
                # A reply that is not JSON is a reply all the same
                reason, has_answered = _describe(error), not isinstance(error, httpx.RequestError)
                if isinstance(error, httpx.HTTPStatusError):
                    status, after = error.response.status_code, error.response.headers.get("Retry-After", "")
                    # The same request would be refused again; a time-out (408) or a rate limit (429) passes
                    if status < 500 and status not in (408, 429):
                        raise AnswerError(reason) from error
                    # The header may also hold a date, in place of which the doubled wait serves
                    wait = min(float(after), LONGEST_WAIT) if after.isdigit() else wait
            if attempt < self.retries:
                sleep(wait)
        raise AnswerError(f"{reason}, after {self.retries + 1} tries", unreachable=not has_answered)

    def _send(self, path: str, body: dict | None = None) -> dict:
        response = self.client.request("GET" if body is None else "POST", self.url + path, json=body)
        response.raise_for_status()
        return response.json()


def _describe(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        response = error.response
        return f"HTTP {response.status_code}: {response.text[:300].strip() or response.reason_phrase}"
    return str(error) or type(error).__name__


def _first_choice(response) -> dict:
    try:
        choice = response["choices"][0]
    except (KeyError, IndexError, TypeError):
        choice = None
    if not isinstance(choice, dict):
        raise AnswerError(f"no choice in the server's answer: {json.dumps(response)[:300]}")
    return choice


def _read_choice(choice: dict, turn: Turn, tokenizer: PreTrainedTokenizerBase) -> Answer | AnswerError:
    """The answer in a choice of `/v1/completions`, or why there is none."""
    reason, ids = choice.get("finish_reason"), choice.get("token_ids")
    if reason not in ("stop", "length"):
        return AnswerError(f"finish_reason {reason!r}")
    # A server that adds a BOS token or cuts long prompts answers another prompt
    if choice.get("prompt_token_ids") not in (None, turn.prompt_ids):
        return AnswerError("the server's prompt ids are not those it was sent")
    end_id = _end_id(choice, tokenizer)
    if isinstance(end_id, AnswerError):
        return end_id
    if ids is None:
        return _read_text(choice.get("text"), reason, turn, tokenizer, end_id)
    if not ids or not all(type(i) is int and 0 <= i < len(tokenizer) for i in ids):
        return AnswerError(f"token ids outside the tokenizer's {len(tokenizer)}, or none: {str(ids)[:100]}")
    if reason == "stop" and ids[-1] != end_id:  # some servers keep the end-of-text token to themselves
        ids = [*ids, end_id]
    return Answer(list(ids), to_message(ids, tokenizer, turn.encoding["mode"], {end_id}), reason)


def _end_id(choice: dict, tokenizer: PreTrainedTokenizerBase) -> int | AnswerError:
    """The token that ends an answer: EOS unless the server names another (vLLM's `stop_reason`, SGLang's
    `matched_stop`) or the ids show one. A stop string ends nothing: the model would have gone on."""
    eos_id = tokenizer.convert_tokens_to_ids(EOS_TOKEN)
    if choice["finish_reason"] != "stop":
        return eos_id
    stop = choice.get("stop_reason") if choice.get("stop_reason") is not None else choice.get("matched_stop")
    if type(stop) is int and 0 <= stop < len(tokenizer):
        return stop
    if stop is not None:
        return AnswerError(f"the server stopped at {stop!r}, where the model had not ended: remove its stop strings")
    # </think> can be a special token too, but does not end an answer
    last = (choice.get("token_ids") or [eos_id])[-1]
    return (
        last
        if last in tokenizer.all_special_ids and last != tokenizer.convert_tokens_to_ids(THINK_END_TOKEN)
        else eos_id
    )


def _read_text(
    text: str | None, reason: str, turn: Turn, tokenizer: PreTrainedTokenizerBase, end_id: int
) -> Answer | AnswerError:
    """An answer without ids: its message, encoded. Only the token that ended it is known to have been written."""
    if not isinstance(text, str) or not text:
        return AnswerError("the server's answer has neither token ids nor text")
    content, is_open = text.removesuffix(tokenizer.convert_ids_to_tokens(end_id)), False
    opened = content.startswith(THINK_START_TOKEN)
    message = {"role": "assistant", "content": content}
    if turn.encoding["mode"] == "thinking":
        # The prompt ends with the opening tag, which some servers repeat in front of the text
        reasoning, end, content = content.removeprefix(THINK_START_TOKEN).partition(THINK_END_TOKEN)
        is_open = not end
        message |= {"reasoning": reasoning, "content": content}
        if is_open and reason == "stop":
            return AnswerError(f"neither token ids nor a {THINK_END_TOKEN} in the server's answer")
    elif opened:
        return AnswerError(f"the answer starts with {THINK_START_TOKEN} in non-thinking mode: use --mode thinking")
    ids, _ = encode_with_mask([*turn.prompt, message], tokenizer, **turn.encoding)
    logger.warning_once("the server returns no token ids (vLLM's return_token_ids): its texts are encoded again")
    num_unwritten = int(reason == "length") + int(is_open)  # the encoding adds EOS, and closes the reasoning
    ids = ids[len(turn.prompt_ids) : len(ids) - num_unwritten]
    if reason == "stop":
        ids[-1] = end_id
    return Answer(ids, message, reason, "re-encoded")
