"""What every round of a speculative `generate` call did: tokens, probabilities, times.

    with RoundRecorder(target, drafter, tokenizer) as recorder:
        target.generate(**inputs, assistant_model=drafter)
    trace = recorder.trace("my prompt")          # for `trace.write_trace`

For the length of the `with`, the drafter's `propose` and decoding loop are wrapped and the target has two hooks. The
ids are those of a call without it. Works for every `HyperDFlashAssistant`.

    .venv/bin/python -m pytest tests/test_trace.py
"""

import functools
import threading
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..generation_hyperdflash import ROWWISE_PROCESSORS, DraftRequest, SpeculativeStats, block_verification
from .comparison import accelerators, time_at_rest

NUM_ALTERNATIVES = 3
# What became of a draft, and the target's own token
ACCEPTED, CUT, REJECTED, BEHIND, OWN = "accepted", "cut", "rejected", "behind", "own"


@dataclass
class Distribution:
    """What one model thought of a position: the `probability` of the token there, and its likeliest tokens `top`."""

    probability: float
    top: list[tuple[int, float]]


@dataclass
class Slot:
    """A draft, or the target's own token (`state` `OWN`).

    Attributes:
        position (`int`): in the sequence, prompt included, from 0.
        state (`str`): `ACCEPTED`; `CUT`, accepted but behind the end of the text; `REJECTED`; `BEHIND` a rejected
            draft, or behind the end, and so not judged; `OWN`.
        drafter, target (`Distribution`, *optional*): None where there is none: nothing was drafted in the place of an
            own token, or processors that look at the prefix never saw what is behind a rejection or the end.
        chance (`float`, *optional*): when sampling, the probability with which this draft was to be accepted: `min(1,
            p / q)` when judged alone, or that of its prefix when the block is judged together, where a later draft can
            save it. Of the own token, with which it was drawn. None for what was not judged, and in greedy decoding.
    """

    token_id: int
    position: int
    state: str
    drafter: Distribution | None
    target: Distribution | None
    chance: float | None


@dataclass
class Round:
    """One round: its slots in order, and seconds inside `propose`, inside the target's forward, and of the rest."""

    slots: list[Slot]
    draft_s: float
    verify_s: float
    other_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.verify_s + self.other_s


@dataclass
class Trace:
    """A recorded call. The first of `rounds` is the prompt's forward, which drafts nothing.

    `seconds` is the whole call without `recording_s`, which recording itself took.
    """

    title: str
    facts: dict[str, str]
    sampling: bool
    by_block: bool
    prompt_ids: list[int]
    new_ids: list[int]
    rounds: list[Round]
    stats: SpeculativeStats
    seconds: float
    recording_s: float
    tokenizer: object


class _ScoreKeeper(LogitsProcessor):
    """Last among processors that look at the prefix: keeps the scores that the loop is about to judge by."""

    def __init__(self):
        self.rows: list[torch.Tensor] = []

    def __call__(self, input_ids, scores):
        self.rows.append(scores[0])
        return scores


class RoundRecorder:
    """Records the rounds of one `generate` call made inside its `with`; a streamer of the call's own still streams.

    It keeps only the probabilities of a round's tokens and of the likeliest alternatives, not the logits. Times are
    taken with the accelerator at rest, so recording costs time; its own share is left out of every figure.

    Args:
        target, drafter: the pair of the call.
        tokenizer: the target's.
    """

    def __init__(self, target, drafter, tokenizer):
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.rounds: list[Round] = []
        self.stats = SpeculativeStats()
        self.prompt_ids: list[int] = []
        self.new_ids: list[int] = []
        self.seconds = self.recording_s = 0.0
        self.facts: dict[str, str] = {}
        self.sampling = self.by_block = False
        self._is_recording = False

    def __enter__(self):
        self._thread = threading.get_ident()  # other threads may use the same models meanwhile
        self._devices = accelerators(self.target, self.drafter)
        self._undo = ExitStack()
        self._wrap("propose", self._propose)
        self._wrap("assisted_decoding_loop", self._decode)
        for handle in (
            self.target.register_forward_pre_hook(self._before_forward),
            self.target.register_forward_hook(self._after_forward),
        ):
            self._undo.callback(handle.remove)
        return self

    def __exit__(self, *exc):
        self._undo.close()

    def _wrap(self, name: str, method) -> None:
        drafter, own = self.drafter, vars(self.drafter).get(name)
        setattr(drafter, name, functools.partial(method, getattr(drafter, name)))
        self._undo.callback(*((delattr, drafter, name) if own is None else (setattr, drafter, name, own)))

    @property
    def _is_ours(self) -> bool:
        return self._is_recording and threading.get_ident() == self._thread

    def _now(self) -> float:
        return time_at_rest(self._devices)

    def _decode(self, loop, target, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        """The drafter's `assisted_decoding_loop`, with this recorder as its streamer."""
        call = {"stopping_criteria": stopping_criteria, "generation_config": generation_config, **kwargs}
        if threading.get_ident() != self._thread:
            return loop(target, input_ids, logits_processor=logits_processor, **call)
        if target is not self.target or self.rounds:
            raise ValueError("a RoundRecorder records one call of its own target: make another for the next")
        self._input_ids, self._streamer = input_ids, kwargs.get("streamer")
        self.prompt_ids, self.sampling = input_ids[0].tolist(), generation_config.do_sample
        self._rowwise = LogitsProcessorList(p for p in logits_processor if type(p) in ROWWISE_PROCESSORS)
        self._keeper = _ScoreKeeper() if len(self._rowwise) < len(logits_processor) else None
        # With processors that look at the prefix the loop judges token by token
        self.by_block = self.sampling and self._keeper is None and self.drafter.verification == "block"
        self.facts = self._describe(logits_processor, generation_config)
        if self._keeper is not None:
            logits_processor = LogitsProcessorList([*logits_processor, self._keeper])
        self._forget_round()
        start = self._mark = self._now()
        self._is_recording = True
        try:
            return loop(target, input_ids, logits_processor=logits_processor, **{**call, "streamer": self})
        finally:
            self._is_recording = False
            self.seconds = self._now() - start - self.recording_s
            self._forget_round()
            del self._input_ids, self._streamer, self._rowwise

    def _forget_round(self) -> None:
        self._draft_s = self._verify_s = 0.0
        self._draft_logits: list[torch.Tensor] = []
        self._target_logits = None
        if self._keeper is not None:
            self._keeper.rows = []

    def _propose(self, propose, request: DraftRequest, choose) -> None:
        """The drafter's `propose`; `choose` also hands the logits to this recorder."""
        if not self._is_ours:
            return propose(request, choose)

        def choose_and_keep(logits):
            self._draft_logits.append(logits)
            return choose(logits)

        start = self._now()
        propose(request, choose_and_keep)
        self._draft_s += self._now() - start

    def _before_forward(self, module, args) -> None:
        if self._is_ours:
            self._forward_start = self._now()

    def _after_forward(self, module, args, output) -> None:
        if self._is_ours:
            self._verify_s += self._now() - self._forward_start
            self._target_logits = output.logits

    # As the loop's streamer.

    def put_round(self, new_ids: list[int], draft_ids: list[int], num_accepted: int) -> None:
        """One round: tokens kept, drafts proposed, and how many of those were accepted."""
        if (put_round := getattr(self._streamer, "put_round", None)) is not None:
            put_round(new_ids, draft_ids, num_accepted)
        elif self._streamer is not None:
            self._streamer.put(torch.tensor([new_ids]))
        now = self._now()
        other_s = now - self._mark - self._draft_s - self._verify_s
        slots = self._slots(new_ids, draft_ids, num_accepted)
        self.rounds.append(Round(slots, self._draft_s, self._verify_s, other_s))
        self.new_ids += new_ids
        if draft_ids:
            self.stats.num_drafts.append(len(draft_ids))
            self.stats.num_accepted.append(num_accepted)
        self._forget_round()
        self._mark = self._now()
        self.recording_s += self._mark - now

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()

    @torch.no_grad()
    def _slots(self, new_ids: list[int], draft_ids: list[int], num_accepted: int) -> list[Slot]:
        target, drafter = self._target_probs(len(draft_ids) + 1), self._drafter_probs()
        start, slots = len(self.prompt_ids) + len(self.new_ids), []
        # Where an accepted draft ended the text, a wrong one behind it is not what ended the round
        num_judged = min(num_accepted + (len(new_ids) > num_accepted), len(target))
        chances, weight = self._chances(target, drafter, draft_ids, num_accepted, num_judged)
        for i, token in enumerate(draft_ids):
            kept = ACCEPTED if i < len(new_ids) else CUT
            state = kept if i < num_accepted else REJECTED if i < num_judged else BEHIND
            seen = _distribution(target[i], token) if i < len(target) else None
            slots.append(Slot(token, start + i, state, _distribution(drafter[i], token), seen, chances[i]))
        if len(new_ids) > num_accepted:  # otherwise an accepted draft ended the text
            token, probs = new_ids[num_accepted], target[num_accepted]
            rejected = drafter[num_accepted] if num_accepted < len(draft_ids) else None
            chance = float(_own_probs(weight * probs, rejected)[token]) if self.sampling else None
            seen = None if rejected is None else _distribution(rejected, token)
            slots.append(Slot(token, start + num_accepted, OWN, seen, _distribution(probs, token), chance))
        return slots

    def _chances(self, target, drafter, draft_ids: list[int], num_accepted: int, num_judged: int):
        """What each draft was to be accepted with, None where not judged, and the weight of the own token's p."""
        if not (self.sampling and draft_ids):
            return [None] * len(draft_ids), 1.0
        if self.by_block:
            chances, weights = block_verification(target, drafter, torch.tensor(draft_ids, device=target.device))
            chances = chances.tolist()
            if num_judged == num_accepted:  # the text ended there: what is behind made no difference
                chances[num_judged:] = [None] * (len(draft_ids) - num_judged)
            return chances, float(weights[num_accepted])
        ratios = [float(target[i, token] / drafter[i, token]) for i, token in enumerate(draft_ids[:num_judged])]
        return [min(1.0, ratio) for ratio in ratios] + [None] * (len(draft_ids) - num_judged), 1.0

    def _target_probs(self, num_rows: int) -> torch.Tensor:
        """Probabilities `(rows, V)` that drafts were judged by; fewer than `num_rows` where not all were looked at."""
        if self._keeper is not None:
            return torch.stack(self._keeper.rows).softmax(-1)
        raw = self._target_logits[0, -num_rows:].to(self._input_ids.device, torch.float32)
        return self._rowwise(self._input_ids, raw.clone()).softmax(-1)

    def _drafter_probs(self) -> torch.Tensor | None:
        """Probabilities `(n, V)` that drafts were chosen from."""
        if not self._draft_logits:
            return None
        logits = torch.cat(self._draft_logits).to(self._input_ids.device)
        return (self._rowwise(self._input_ids, logits.clone()) if self.sampling else logits).softmax(-1)

    def _describe(self, processors, generation_config) -> dict[str, str]:
        parts = [_describe_processor(p) for p in processors]
        if self.sampling and not any(type(p) is TemperatureLogitsWarper for p in processors):
            parts.insert(0, "temperature 1")
        after = f"after {', '.join(parts)}" if parts else "of the logits as they are"
        if self.sampling:
            compared = f"Those that drafts were drawn from and judged by: {after}."
            if self._keeper is not None:
                compared += " The drafter's are before processors that look at the prefix, as in the call."
        else:
            compared = f"Softmax {after}. Greedy decoding compares only which token is the likeliest."
        names = {"Target": self.target, "Drafter": self.drafter}
        return {
            **{name: f"{model.name_or_path or 'unnamed'} ({type(model).__name__})" for name, model in names.items()},
            "Decoding": ", ".join(["sampling" if self.sampling else "greedy", *parts]),
            "Drafts per round": f"at most {min(self.drafter.max_drafts, generation_config.num_assistant_tokens)}",
            "Computed in": f"{self.target.dtype}, on {self.target.device}".replace("torch.", ""),
            "Probabilities": compared,
        }

    def trace(self, title: str, facts: dict[str, str] | None = None) -> Trace:
        """The recorded call under a title; `facts` are added to those in the page's head, or replace them.

        Raises `ValueError` when no call was recorded.
        """
        if not self.rounds:
            raise ValueError("no round was recorded: call target.generate(assistant_model=drafter) inside the `with`")
        return Trace(
            title=title,
            facts={**self.facts, **(facts or {})},
            sampling=self.sampling,
            by_block=self.by_block,
            prompt_ids=self.prompt_ids,
            new_ids=self.new_ids,
            rounds=self.rounds,
            stats=self.stats,
            seconds=self.seconds,
            recording_s=self.recording_s,
            tokenizer=self.tokenizer,
        )


def _describe_processor(processor) -> str:
    names = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
    name = names.get(type(processor))
    return f"{name.replace('_', '-')} {getattr(processor, name)}" if name else type(processor).__name__


def _distribution(probs: torch.Tensor, token: int) -> Distribution:
    top = probs.topk(min(NUM_ALTERNATIVES, probs.shape[-1]))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Distribution(float(probs[token]), [(i, p) for i, p in pairs if p > 0])


def _own_probs(probs: torch.Tensor, rejected: torch.Tensor | None) -> torch.Tensor:
    """What the target's own token is drawn from: `probs`, or `max(probs - rejected, 0)`, both normalised."""
    if rejected is None:
        return probs / probs.sum()
    rest = (probs - rejected).clamp(min=0)
    return rest / rest.sum() if rest.sum() > 0 else probs
