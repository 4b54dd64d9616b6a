"""Experiments on a drafter: would more drafts be accepted if its input, positions or output differed from its config?

    hyperdflash check examples/tiny/target examples/tiny/drafter

The target's own texts are cut into blocks and scored as in training, first as the config says (`Pair.configured`),
then in each way of `all_trials`. A drafter is best the way it was trained, so a way that is clearly better tells what
went wrong. The drafter computes in fp32 here; neither model is changed.

Legend: T positions, A anchors, K block size, S slots (K - 1), D hidden size, m residual paths, N blocks of all texts.
"""

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ..common.console import progress_is_hidden
from ..generation.comparison import timed_greedy
from ..modeling_hyperdflash import HyperDFlashModel
from ..target_hyperdflash import ResidualTap
from ..training.blocks import Blocks, attention_masks, make_blocks, previous_ids
from ..training.init import spread_layers
from ..training.losses import drafter_loss
from ..training.target import TargetHead

MIN_BLOCKS = 16  # fewer are too noisy to judge by
CHUNK = 128  # blocks per forward
# Another way is clearly better if it accepts so many more drafts per block, absolutely and relatively, and if drafts
# and cross-entropy improve by so many standard errors. (Blocks overlap, so the standard errors are underestimated.)
MIN_GAIN, MIN_RELATIVE_GAIN, MIN_Z = 0.25, 0.15, 3.0

MASK, STATE, OUTPUT = "mask token", "tapped state", "norm and head"
POSITIONS, SETTINGS = "rotary positions", "block and window"
RETRAIN = "train it on what decoding feeds, or feed that in decoding"


# ------------------------------------------------------------------------------------------------------------ the pair


@dataclass
class Text:
    """`ids` and loss `mask` `(1, T)`; `states` are layer outputs `(1, T, m, D)` by layer, on the target's device;
    a block starts at each of the `anchors` `(1, A)`."""

    ids: torch.LongTensor
    mask: torch.LongTensor
    states: dict[int, torch.Tensor]

    @property
    def anchors(self) -> torch.LongTensor:
        supervised = self.mask[0].bool()
        legal = supervised[:-1] & supervised[1:]
        legal[0] = False
        return legal.nonzero()[:, 0][None]


class Score(NamedTuple):
    """For all blocks: `correct`, `valid` and cross-entropy `ce`, each `(N, S)`; `ce` is 0 for a slot without label."""

    correct: torch.Tensor
    valid: torch.Tensor
    ce: torch.Tensor

    def accepted(self, num_slots: int | None = None) -> torch.Tensor:
        """Number of leading correct drafts of each block, `(N,)`."""
        return self.correct[:, :num_slots].long().cumprod(-1).sum(-1).float()

    def cross_entropy(self, num_slots: int) -> torch.Tensor:
        """Mean cross-entropy over the slots of each block, `(N,)`."""
        return self.ce[:, :num_slots].sum(-1) / self.valid[:, :num_slots].sum(-1).clamp(min=1)


@dataclass
class Pair:
    """A target, its drafter, and the texts they are judged on.

    Attributes:
        prompts (`list[torch.LongTensor]`): `(1, T)` each, on the target's device.
        given (`list[tuple[list[int], list[int]]]`): ids and loss mask of the conversations that have an answer
            already.
        special_ids (`dict[str, int]`): the tokenizer's added tokens, which are not ordinary text.
        mode, generation (`str`): mode and generation of the chat encoding that the prompts are in.
    """

    target: nn.Module
    drafter: HyperDFlashModel
    prompts: list[torch.LongTensor]
    given: list[tuple[list[int], list[int]]] = field(default_factory=list)
    special_ids: dict[str, int] = field(default_factory=dict)
    mode: str = "non-thinking"
    generation: str = "preview"
    max_new_tokens: int = 64

    def __post_init__(self):
        self.config = self.drafter.config
        self.prompts = [prompt.to(self.target.device) for prompt in self.prompts]
        self.head = TargetHead.from_target(self.target).to(self.target.device)
        self.last = self.target.config.num_hidden_layers - 1

    @cached_property
    def model(self) -> HyperDFlashModel:
        """The drafter in fp32, so that rounding does not blur differences."""
        return copy.deepcopy(self.drafter).float()

    @cached_property
    def plain(self) -> list[torch.LongTensor]:
        """The target's own greedy answers, prompts included."""
        bar = tqdm(self.prompts, desc="The target writes", leave=False, disable=progress_is_hidden())
        return [timed_greedy(self.target, prompt, self.max_new_tokens)[0].sequences for prompt in bar]

    @cached_property
    def drafted(self) -> list:
        """The outputs of `generate` with the drafter on the same prompts."""
        bar = tqdm(self.prompts, desc="Drafting", leave=False, disable=progress_is_hidden())
        return [timed_greedy(self.target, prompt, self.max_new_tokens, self.drafter)[0] for prompt in bar]

    @cached_property
    def own(self) -> list[Text]:
        """The target's own texts. Raises `ValueError` if they are too short to judge by."""
        lengths = [prompt.shape[1] for prompt in self.prompts]
        masks = [(torch.arange(ids.shape[1]) >= n).long()[None] for ids, n in zip(self.plain, lengths, strict=True)]
        texts = [self.text(ids, mask) for ids, mask in zip(self.plain, masks, strict=True)]
        if (number := sum(text.anchors.shape[1] for text in texts)) < MIN_BLOCKS:
            raise ValueError(
                f"the target wrote only {number} tokens to judge by (at least {MIN_BLOCKS} are needed): give more "
                "--prompts, a larger --num-prompts or --max-new-tokens"
            )
        return texts

    @torch.no_grad()
    def text(self, ids: torch.LongTensor, mask: torch.LongTensor) -> Text:
        layers = self.layers_read()
        with ResidualTap(self.target, layers) as tap:
            self.target.model(ids.to(self.target.device), use_cache=False)
            residuals = tap.take().to(self.target.device)  # the last layer may be on another
        states = residuals.split(self.target.config.hidden_size, dim=-1)
        return Text(ids.cpu(), mask.cpu(), dict(zip(layers, states, strict=True)))

    def layers_read(self) -> list[int]:
        """Target layers that any trial reads."""
        near = {i + shift for i in self.config.target_layer_ids for shift in (-1, 0, 1)}
        if self.config.reducer == "fc":
            # A confused fc drafter may have read any of these
            near |= {self.last, *spread_layers(self.last + 1, self.config.hc_mult)}
        return sorted(i for i in near if 0 <= i <= self.last)

    def configured_state(self, states: dict[int, torch.Tensor]) -> torch.Tensor:
        return torch.cat([states[i] for i in self.config.target_layer_ids], dim=-1)

    @cached_property
    def configured(self) -> Score:
        """The score of the target's own texts, as the drafter's config says."""
        return self.measure(self.own)

    @torch.no_grad()
    def hidden(
        self,
        text: Text,
        anchors: torch.LongTensor,
        *,
        model: HyperDFlashModel | None = None,
        state: Callable[[dict[int, torch.Tensor]], torch.Tensor] | None = None,
        offset: int = 0,
        mask: int | None = None,
        output: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, Blocks]:
        """The drafter's output `(A, K, D)` at anchors `(1, A)`, and its blocks, computed as in training.

        Args:
            model: the drafter, or a copy with another config.
            state: maps the states by layer to the context.
            offset: added to the blocks' positions.
            mask: the mask token, if not the config's.
            output: maps the states before and after the drafter's last norm to its output.
        """
        model, T, device = model or self.model, text.ids.shape[1], self.target.device
        config = model.config
        mask_id = self.config.mask_token_id if mask is None else mask
        blocks = make_blocks(text.ids, text.mask, anchors, block_size=config.block_size, mask_token_id=mask_id)
        blocks.position_ids[:, T:] += offset  # the context keeps its own
        before = []  # the input of the drafter's last norm, which its output does not tell
        handle = model.norm.register_forward_pre_hook(lambda module, args: before.append(args[0]))
        try:
            after = model(
                self.head.embed(blocks.input_ids.to(device)).float(),
                (state or self.configured_state)(text.states).float(),
                attention_masks(anchors.to(device), T, config),
                blocks.position_ids.to(device),
            ).last_hidden_state
        finally:
            handle.remove()
        hidden = after if output is None else output(before[0], after)
        return hidden.view(-1, config.block_size, hidden.shape[-1]), blocks

    def measure(
        self, texts: list[Text], *, lm_head: torch.Tensor | None = None, first_slot: int = 1, **options
    ) -> Score:
        """The `Score` of all blocks; options as in `hidden`. `first_slot` predicts the token after the anchor."""
        rows = []
        lm_head = self.head.lm_head if lm_head is None else lm_head
        for text in texts:
            for anchors in text.anchors.split(CHUNK, dim=1):
                hidden, blocks = self.hidden(text, anchors, **options)
                slots = hidden[:, first_slot:][:, : blocks.labels.shape[-1]]
                labels = blocks.labels[0, :, : slots.shape[1]].to(hidden.device)
                heads = self.sequential(blocks, slots)
                loss = drafter_loss(slots, labels, lm_head, slots[:, :0], gamma=0, alpha=0, temperature=1, **heads)
                rows.append((loss.correct, labels != -100, loss.ce))
        return Score(*(torch.cat(parts).cpu() for parts in zip(*rows, strict=True)))

    @torch.no_grad()
    def sequential(self, blocks, slots: torch.Tensor) -> dict:
        """The Markov head's arguments of the loss, for slots `(A, S, D)` that follow the true tokens."""
        if (head := self.model.markov_head) is None:
            return {}
        previous = previous_ids(blocks).view(len(slots), -1)[:, 1 : 1 + slots.shape[1]]
        return {"markov_states": head.states(previous.to(slots.device), slots), "markov_w2": head.markov_w2}

    @torch.no_grad()
    def with_config(self, **changes) -> HyperDFlashModel:
        """A drafter with another config that shares the weights."""
        config = copy.deepcopy(self.config)
        for name, value in changes.items():
            setattr(config, name, value)
        # Made without weights, then given those of the drafter
        with torch.device("meta"):
            model = type(self.model)(config).eval()
        model.confidence_head = self.model.confidence_head  # may have been removed
        model.load_state_dict(self.model.state_dict(), assign=True)
        # Its frequencies are a buffer that no state dict holds, so they are still on meta
        model.rotary_emb = Qwen3RotaryEmbedding(config).to(self.target.device)
        return model

    @cached_property
    def trials(self) -> list["Trial"]:
        return list(all_trials(self))

    @cached_property
    def clearly_better(self) -> list["Trial"]:
        """Trials that beat the configured way, lowest cross-entropy first, as that is what training minimises."""
        assert len(self.configured.ce)  # computed first, as it has a progress bar of its own
        bar = tqdm(self.trials, desc="Experiments", leave=False, disable=progress_is_hidden())
        compared = [trial._replace(**self.compare(self.measure(self.own, **trial.options()))) for trial in bar]
        return sorted((trial for trial in compared if trial.is_better), key=lambda trial: -trial.ce_gain)

    def compare(self, score: Score) -> dict:
        """The fields of a `Trial` that follow from its score."""
        # With a later first slot there is one slot fewer
        S = min(score.correct.shape[1], self.configured.correct.shape[1])
        base = self.configured.accepted(S)
        gain, error = mean_and_error(score.accepted(S) - base)
        ce_gain, ce_error = mean_and_error(self.configured.cross_entropy(S) - score.cross_entropy(S))
        needed = max(MIN_GAIN, MIN_RELATIVE_GAIN * float(base.mean()), MIN_Z * error)
        return {"gain": gain, "ce_gain": ce_gain, "is_better": gain >= needed and ce_gain >= MIN_Z * ce_error}


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    """The mean of `values` `(N,)` and its standard error."""
    return float(values.mean()), float(values.std()) / len(values) ** 0.5


# --------------------------------------------------------------------------------------------------------- experiments


class Trial(NamedTuple):
    """Another way to run the drafter.

    Attributes:
        check (`str`): the check that reports it.
        what (`str`): completes "the drafter was trained ...".
        fix (`str`): what to do if it is the better way.
        options: returns the options of `Pair.measure`; called late, as it may make a model.
        gain, ce_gain (`float`): how many more drafts per block are accepted, and how much lower the cross-entropy is.
        is_better (`bool`): whether it is clearly better.
    """

    check: str
    what: str
    fix: str
    options: Callable[[], dict]
    gain: float = 0.0
    ce_gain: float = 0.0
    is_better: bool = False


def all_trials(pair: Pair) -> Iterator[Trial]:
    source = final_states if pair.config.context_source == "pre_hc_head" else layer_states
    for what, state, fix in (*source(pair), *shifted_states(pair)):
        yield Trial(STATE, f"on {what}", fix or RETRAIN, lambda state=state: {"state": state})
    for what, options in outputs(pair):
        yield Trial(OUTPUT, what, RETRAIN, lambda options=options: options)
    yield from position_trials(pair)
    yield from setting_trials(pair)


def final_states(pair: Pair):
    """What people feed instead of the final residual: (what, its state, the fix, empty if it is to train again)."""
    last, m, head = pair.last, pair.config.hc_mult, pair.head

    def on_all_paths(reduced):
        return lambda states: reduced(states[last].float()).unsqueeze(2).expand(-1, -1, m, -1)

    def interleaved(states):
        return states[last].transpose(2, 3).reshape(states[last].shape)

    yield "the normed last hidden state, the same on all paths", on_all_paths(lambda x: head.norm(head.hc_head(x))), ""
    yield "the collapsed state after hc_head, the same on all paths", on_all_paths(head.hc_head), ""
    yield "the average of the paths, the same on all paths", on_all_paths(lambda x: x.mean(2)), ""
    yield "the residual with its paths in reverse order", lambda states: states[last].flip(2), ""
    yield "the residual with paths and channels interleaved", interleaved, ""
    if last:
        yield f"the residual one layer early, of layer {last - 1}", lambda states: states[last - 1], ""
    # fc's matrix fits m residual paths as well as m tapped layers, so that one can be taken for the other
    if pair.config.reducer == "fc":
        ids = spread_layers(last + 1, m)
        fix = f"set context_source to 'hidden_layers' and target_layer_ids to {ids}"
        if len(ids) == m:
            state = lambda states: torch.cat([states[i].mean(2, keepdim=True) for i in ids], dim=-1)  # noqa: E731
            yield f"the tapped layers {ids}, paths averaged", state, fix


def layer_states(pair: Pair):
    """Like `final_states`, for tapped layers."""
    ids, last = pair.config.target_layer_ids, pair.last
    for other in ([i + 1 for i in ids], [i - 1 for i in ids], ids[::-1]):
        if other != ids and min(other) >= 0 and max(other) <= last:
            state = lambda states, other=other: torch.cat([states[i] for i in other], dim=-1)  # noqa: E731
            yield f"the tapped layers {other}", state, f"set target_layer_ids to {other}"
    if len(ids) == pair.config.hc_mult:
        fix = f"set context_source to 'pre_hc_head' and target_layer_ids to [{last}]"
        yield "the final residual before hc_head", lambda states: states[last].flatten(2).unsqueeze(2), fix


def shifted_states(pair: Pair):
    """The configured state, one position off."""

    def moved(index):
        return lambda states: pair.configured_state(
            {i: state[:, index(state.shape[1])] for i, state in states.items()}
        )

    yield "the state of the position before", moved(lambda T: [0, *range(T - 1)]), ""
    yield (
        "the state of the position after, so that a block saw its own anchor",
        moved(lambda T: [*range(1, T), T - 1]),
        "",
    )


def outputs(pair: Pair):
    """What may be between the last layer and the logits: (what, options)."""
    norm = pair.head.norm
    yield "with the target's final norm after its own", {"output": lambda before, after: norm(after)}
    yield "with the target's final norm instead of its own", {"output": lambda before, after: norm(before)}
    yield "without a final norm", {"output": lambda before, after: before}
    if pair.head.lm_head is not pair.head.embedding:
        yield "with the target's embedding as its head", {"lm_head": pair.head.embedding}


def position_trials(pair: Pair) -> Iterator[Trial]:
    rope = pair.config.rope_parameters
    for offset, where in ((1, "late"), (-1, "early")):
        what = f"with blocks one position too {where}"
        yield Trial(POSITIONS, what, RETRAIN, lambda offset=offset: {"offset": offset})
    bases = {float(p["rope_theta"]) for p in pair.target.config.rope_parameters.values() if "rope_theta" in p}
    for base in sorted(bases - {float(rope["rope_theta"])}):
        fix = f"set `rope_parameters.rope_theta` in its config to {base:g} (it says {rope['rope_theta']:g})"
        options = lambda base=base: {"model": pair.with_config(rope_parameters={**rope, "rope_theta": base})}  # noqa: E731
        yield Trial(POSITIONS, f"with the target's rope_theta {base:g}", fix, options)
    fix = "train it again with rotary frequencies in fp32"
    yield Trial(POSITIONS, "with rotary frequencies rounded to bf16", fix, lambda: {"model": rounded_rope(pair)})


def rounded_rope(pair: Pair) -> HyperDFlashModel:
    model = pair.with_config()
    model.rotary_emb.inv_freq = model.rotary_emb.inv_freq.bfloat16().float()
    return model


def setting_trials(pair: Pair) -> Iterator[Trial]:
    config, target = pair.config, pair.target.config
    changes = {
        f"with {name} {getattr(target, name):g}": {name: getattr(target, name)}
        for name in ("rms_norm_eps", "hc_eps")
        if getattr(config, name) != getattr(target, name)
    }
    if "sliding_attention" in config.layer_types:
        changes["without a window on its context"] = {"layer_types": ["full_attention"] * config.num_hidden_layers}
    for what, change in changes.items():
        name, value = next(iter(change.items()))
        fix = "enlarge sliding_window" if name == "layer_types" else f"set {name} to {value:g}"
        said = config.sliding_window if name == "layer_types" else getattr(config, name)
        options = lambda change=change: {"model": pair.with_config(**change)}  # noqa: E731
        yield Trial(SETTINGS, what, f"{fix} in its config (it says {said})", options)
    for slot, tokens in (
        (0, "slot k predicting the token after its own"),
        (2, "slot k predicting the token before its own"),
    ):
        fix = "slot k of a block, counted from the anchor's 0, predicts the token at anchor + k: train it so"
        yield Trial(SETTINGS, f"with {tokens}", fix, lambda slot=slot: {"first_slot": slot})
    for name, token in mask_candidates(pair).items():
        fix = f"set mask_token_id to {token} (it says {config.mask_token_id})"
        yield Trial(MASK, f"with the mask token {token} ({name})", fix, lambda token=token: {"mask": token})


def mask_candidates(pair: Pair, most: int = 24) -> dict[str, int]:
    """Other tokens that may have been the mask token: the tokenizer's special ones, placeholders first."""
    rows = len(pair.head.embedding)
    others = {n: i for n, i in pair.special_ids.items() if i != pair.config.mask_token_id and i < rows}
    ranked = sorted(others, key=lambda name: not re.search("mask|hold|pad|unused|reserved", name.lower()))
    return {name: others[name] for name in ranked[:most]}
