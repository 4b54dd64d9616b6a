"""The assistant that drafts, the statistics of its rounds, and the decoding loop that verifies its drafts.

`target.generate(assistant_model=drafter)` ends up in `HyperDFlashAssistant.assisted_decoding_loop`: the target class
hands an assisted call over to an assistant that brings its own loop (`target_hyperdflash.py`). Nothing of a call stays
behind on the target.

The loop is the library's with three differences: it taps the target's residual, it trims ids, scores, cache and stream
at the first token that stops, and it does less work per round. Logits processors that look at the prefix are called
once for every token, with the true prefix, as in plain decoding, so processors that keep state work too.

Legend: B batch (1), T positions, K block (anchor included), V vocabulary, m residual paths, D hidden.
"""

import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    LogitNormalization,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_utils import PreTrainedModel
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM
from transformers.utils import ModelOutput, logging

from .pairing_hyperdflash import check_call, check_inputs, check_pair, compare_fingerprint, tensor_of
from .target_hyperdflash import ResidualTap, recording_stopped

logger = logging.get_logger(__name__)

# Processors that treat every row of scores alike, whatever the prefix: they may see all rows of a block at once.
ROWWISE_PROCESSORS = (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitNormalization,
)

MIN_ROOM = 512  # tokens that a call's buffers have room for at least

_COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")


# ------------------------------------------------------------------------------------------------------- statistics


@dataclass
class SpeculativeStats:
    """What happened in each round of one or more `generate` calls.

    A round proposed at least one draft; drafts accepted are counted before an end-of-text token trims them. (Where a
    logits processor looks at the prefix, nothing behind the end is judged, and so nothing there counts.) When sampling
    with block verification, a draft that is accepted may owe it to the drafts behind it.

    Attributes:
        num_drafts (`list[int]`): drafts proposed, by round.
        num_accepted (`list[int]`): drafts accepted, by round.
    """

    num_drafts: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)

    @property
    def accepted_drafts(self) -> float:
        """Mean number of accepted drafts per round."""
        return sum(self.num_accepted) / len(self.num_accepted) if self.num_accepted else 0.0

    @property
    def acceptance_length(self) -> float:
        """tau: 1 + accepted drafts per round (the target's own token counts, as in vLLM's mean acceptance length)."""
        return 1 + self.accepted_drafts

    @property
    def per_position_acceptance_rates(self) -> list[float]:
        """Share of all rounds whose draft at position 1, 2, ... was accepted."""
        rounds = max(len(self.num_accepted), 1)
        return [sum(a >= k for a in self.num_accepted) / rounds for k in range(1, self._longest + 1)]

    @property
    def conditional_acceptance_rates(self) -> list[float]:
        """Share of the rounds that proposed position k and accepted all before it, in which k was accepted too."""
        rates = []
        for k in range(1, self._longest + 1):
            reached = [a for n, a in zip(self.num_drafts, self.num_accepted, strict=True) if n >= k and a >= k - 1]
            rates.append(sum(a >= k for a in reached) / len(reached) if reached else 0.0)
        return rates

    @property
    def _longest(self) -> int:
        return max(self.num_drafts, default=0)

    def extend(self, other: "SpeculativeStats") -> None:
        """Pool the rounds of another call."""
        self.num_drafts += other.num_drafts
        self.num_accepted += other.num_accepted

    def to_dict(self) -> dict[str, Any]:
        """All figures under this project's names, and the counters under vLLM's `spec_decode_*` names."""
        return {
            "acceptance_length": self.acceptance_length,
            "accepted_drafts": self.accepted_drafts,
            "per_position_acceptance_rates": self.per_position_acceptance_rates,
            "conditional_acceptance_rates": self.conditional_acceptance_rates,
            "spec_decode_num_drafts": len(self.num_drafts),
            "spec_decode_num_draft_tokens": sum(self.num_drafts),
            "spec_decode_num_accepted_tokens": sum(self.num_accepted),
            "spec_decode_num_accepted_tokens_per_pos": [
                sum(a >= k for a in self.num_accepted) for k in range(1, self._longest + 1)
            ],
        }


@dataclass
class HyperDFlashGenerateOutput(GenerateDecoderOnlyOutput):
    """`generate`'s output with `return_dict_in_generate=True`, and the rounds in `speculation`."""

    speculation: SpeculativeStats | None = None


# ------------------------------------------------------------------------------------------------------ the assistant


@dataclass
class DraftRequest:
    """What a drafter is given for one round.

    Attributes:
        context (`torch.Tensor` of shape `(1, C, m, D)`):
            What was tapped at the positions verified since the last round: those just before the anchor.
        ids (`torch.LongTensor` of shape `(1, T)`): all tokens so far; the last one is the anchor.
        noise_ids (`torch.LongTensor` of shape `(1, K)`): the anchor, then mask tokens (see `new_noise_ids`).
        position (`int`): the anchor's position.
        num_drafts (`int`): the most drafts that are of use.
        target (`DeepseekV4ForCausalLM`): its embedding and LM head are the drafter's too.
        cache (`Cache`): the drafter's own, which starts empty with each call of `generate`.
        do_sample (`bool`): whether drafts are sampled; otherwise the likeliest tokens are taken.
    """

    context: torch.Tensor
    ids: torch.LongTensor
    noise_ids: torch.LongTensor
    position: int
    num_drafts: int
    target: DeepseekV4ForCausalLM
    cache: Cache | None
    do_sample: bool = False


def _refuse_to_generate(*args, **kwargs):
    raise NotImplementedError(
        "a drafter does not generate by itself: pass it to generate(assistant_model=...) of its DeepSeek-V4 target"
    )


class HyperDFlashAssistant:
    """What makes the drafter an assistant: checks before a call, and the decoding loop.

    A model class with `config`, `device`, `dtype` and a `forward` in transformers' DFlash protocol mixes this in.
    A drafter of another kind overrides `max_drafts`, `tapped_layer_ids`, `validate_call` and `propose`.
    """

    _targets_compared = weakref.WeakKeyDictionary()  # drafter -> targets whose fingerprint was compared

    def refuse_to_generate(self) -> None:
        """One sentence for `generate` of this model, and of a target that is not a DeepSeek-V4."""
        # On the instance, where peft looks the first one up. With either on the class, AutoModel would put another
        # class in its place, which has GenerationMixin and cannot be pickled.
        self.prepare_inputs_for_generation = self.generate = _refuse_to_generate
        # A target that is not a DeepSeek-V4 runs the library's own assisted decoding, which first reads these
        self.generation_config = GenerationConfig()
        self._supports_logits_to_keep = _refuse_to_generate

    @property
    def max_drafts(self) -> int:
        """The most drafts per round."""
        return self.config.block_size - 1

    @property
    def tapped_layer_ids(self) -> list[int] | None:
        """Target layers whose outputs the drafter reads; None for the residual before hc_head."""
        return self.config.tapped_layer_ids

    @property
    def verification(self) -> str:
        """How sampled drafts are verified: `"block"` or `"token"`."""
        return self.config.verification

    def validate_call(
        self,
        target: DeepseekV4ForCausalLM,
        generation_mode: GenerationMode,
        generation_config: GenerationConfig,
    ) -> None:
        """Raise one `ValueError` that names the values, before any work, for what this drafter cannot do."""
        check_call(generation_mode, generation_config)
        check_devices(self, target)
        check_pair(self, target)
        warn_of_cap(self.max_drafts, generation_config.num_assistant_tokens)
        seen = HyperDFlashAssistant._targets_compared.setdefault(self, weakref.WeakSet())
        if target not in seen:
            lines = compare_fingerprint(self.config.target_fingerprint, target)
            seen.add(target)
            if lines:
                logger.warning(
                    f"the drafter {self.name_or_path or 'given'} was made for another target "
                    f"({self.config.target_name_or_path}) than {target.name_or_path or 'this one'}: "
                    f"{'; '.join(lines)}. Output stays the target's own, but fewer drafts may be accepted; "
                    "`hyperdflash init` makes a drafter for it"
                )

    def new_noise_ids(self, device: torch.device) -> torch.LongTensor:
        """What every round starts from, `(1, K)`: room for the anchor, then mask tokens."""
        return torch.full((1, self.config.block_size), self.config.mask_token_id, device=device)

    def propose(self, request: DraftRequest, choose: Callable[[torch.Tensor], torch.LongTensor]) -> None:
        """Hand the logits of the next drafts `(n, V)` to `choose`, in order, until at most `num_drafts` are chosen.

        `choose` writes the drafts down and returns their ids `(n,)`, which a sequential drafter needs. Whether a draft
        is proposed may depend on anything but itself and those behind it: that would change what sampling draws.
        """
        if self.markov_head is None and self.confidence_head is None:
            choose(self.draft(request))
            return
        # 1. All slots of the block in one pass
        hidden, confidence = self.draft_hidden(request)  # (n, D), (n, 2) or None
        # 2. Only as many as are worth verifying, which the slots' states tell before any token is chosen
        if confidence is not None:
            rates = confidence[:, int(request.do_sample)].float().sigmoid().tolist()
            hidden = hidden[: num_worth_verifying(rates, self.config.verify_cost)]
        logits = head_logits(request.target, hidden)  # (n, V)
        if self.markov_head is None:
            choose(logits)
            return
        # 3. A sequential head corrects each slot by the token chosen before it
        previous = request.noise_ids[0, :1].to(hidden.device)
        for slot in range(len(hidden)):
            bias = self.markov_head(previous, hidden[slot : slot + 1])
            previous = choose(logits[slot : slot + 1] + bias.to(logits)).to(hidden.device)

    def draft(self, request: DraftRequest) -> torch.Tensor:
        """fp32 logits of one block's slots `(num_drafts, V)`, on the LM head's device, without a sequential head."""
        return head_logits(request.target, self.draft_hidden(request)[0])

    def draft_hidden(self, request: DraftRequest) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The drafter's output for the slots of one block, before any token is chosen.

        Returns the states of the slots `(num_drafts, D)`, and the confidence head's logits `(num_drafts, 2)` or None.
        """
        # Plain attribute access: `model.device` and `get_input_embeddings` walk the module tree at every call
        weight = self.norm.weight
        noise_embeds = request.target.model.embed_tokens(request.noise_ids).to(weight)  # (1, K, D)
        # Positions of the context, which ends just before the anchor, and of the block, which starts with it
        start, stop = request.position - request.context.shape[1], request.position + request.noise_ids.shape[1]
        output = self(
            noise_embeds=noise_embeds,
            context_hidden_states=request.context.to(weight.device),
            position_ids=torch.arange(start, stop, device=weight.device)[None],
            cache=request.cache,
        )
        slots = slice(1, 1 + request.num_drafts)  # slot 0 is the anchor, which is known
        confidence = output.confidence_logits
        return output.last_hidden_state[0, slots], None if confidence is None else confidence[0, slots]

    def assisted_decoding_loop(
        self,
        target: DeepseekV4ForCausalLM,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        inputs_tensor: torch.Tensor | None = None,
        tokenizer=None,
        assistant_tokenizer=None,
        **model_kwargs,
    ):
        """Decode as `GenerationMixin._assisted_decoding` does (arguments and return value are its own).

        `output_logits` returns the target's logits as they were; plain decoding returns what a processor that writes
        in place made of them.

        Raises `ValueError` for a batch, embeddings instead of ids, no cache, or a cache longer than the prompt.
        """
        cache = check_inputs(input_ids, generation_config, model_kwargs, synced_gpus)
        loop = _Loop(self, target, input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        with ResidualTap(target, self.tapped_layer_ids, last=_reach(self.config)) as tap, recording_stopped(cache):
            return loop.run(tap, cache, model_kwargs)


def head_logits(target: DeepseekV4ForCausalLM, hidden: torch.Tensor) -> torch.Tensor:
    """fp32 logits of states from a drafter's device; an offloaded (meta) head moves its input itself."""
    embedding, weight = tensor_of(target.model.embed_tokens), tensor_of(target.lm_head)
    # The embedding's dtype, as a quantised head's own would not do
    hidden = hidden.to(target.dtype if embedding is None else embedding.dtype)
    return target.lm_head(hidden if weight is None or weight.is_meta else hidden.to(weight.device)).float()


def num_worth_verifying(rates: list[float], cost: float) -> int:
    """Leading drafts, at least one, each of which raises the expected tokens per second.

    Args:
        rates: of each draft, the probability that it is accepted if all before it are.
        cost: time of one more verified token, where a round without any takes 1.
    """
    tokens, seconds, reached = 1.0, 1.0, 1.0
    for number, rate in enumerate(rates):
        reached *= rate
        if reached * seconds < cost * tokens and number:
            return number
        tokens, seconds = tokens + reached, seconds + cost
    return len(rates)


def check_devices(drafter: PreTrainedModel, target: DeepseekV4ForCausalLM) -> None:
    """Raises `ValueError` where a drafter's weights or attention cannot run, and warns of what makes it slow."""
    devices = {parameter.device.type for parameter in drafter.parameters()}
    if "meta" in devices:
        raise ValueError(
            "weights of the drafter are on the meta device (it has no weights, or they are offloaded): load it with "
            "from_pretrained on one device; it runs in every round and is small"
        )
    if devices == {"cpu"} and drafter.config._attn_implementation == "flex_attention":
        raise ValueError(
            "attn_implementation 'flex_attention' does not draft on the CPU: use "
            "drafter.set_attn_implementation('sdpa')"
        )
    ours, theirs = drafter.norm.weight.device.type, target.model.norm.weight.device.type
    if ours != theirs != "meta":
        logger.warning_once(
            f"the drafter is on {ours} and the target on {theirs}: every round waits for transfers between them. Use "
            "drafter.to(target.device)"
        )


def warn_of_cap(max_drafts: int, asked: int) -> None:
    """Warn when more drafts per round are asked for than the drafter makes."""
    if max_drafts < asked != 20:  # 20 is the library's default for every assistant
        logger.warning(f"num_assistant_tokens={asked} is capped at {max_drafts}: the drafter makes no more per round")


class _Loop:
    """State of one assisted call."""

    def __init__(
        self,
        drafter: HyperDFlashAssistant,
        target: DeepseekV4ForCausalLM,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None,
    ):
        self.drafter, self.target, self.config = drafter, target, generation_config
        embedding = tensor_of(target.model.embed_tokens)
        offloaded = embedding is None or embedding.is_meta  # its hook moves the ids
        self.device = input_ids.device if offloaded else embedding.device
        self.noise_ids = drafter.new_noise_ids(self.device)
        self.streamer = streamer
        self.processors = logits_processor
        self.rowwise = type(logits_processor)(p for p in logits_processor if type(p) in ROWWISE_PROCESSORS)
        self.sees_prefix = len(self.rowwise) < len(logits_processor)
        self.do_sample = generation_config.do_sample
        self.stats = SpeculativeStats()

        # Length and end-of-text are decided here for a whole block; other criteria see every token, in order.
        limit = min(c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria)
        self.max_length = math.ceil(min(limit, sys.maxsize))  # "no limit" may be 1e30 or infinite
        eos = [c.eos_token_id.tolist() for c in stopping_criteria if type(c) is EosTokenCriteria]
        self.eos_ids = {token for tokens in eos for token in tokens}
        self.criteria = StoppingCriteriaList(
            c for c in stopping_criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        # The user's own processors see ids and scores on the prompt's device, as in plain decoding. Otherwise
        # everything stays with the target, so that a round is one transfer to the host; criteria get the ids alone.
        self.prompt_device = input_ids.device
        device = self.prompt_device if self.sees_prefix else self.device
        # Tokens, and behind them the drafts of a round: those that are accepted are in place already.
        self.num_tokens = input_ids.shape[1]
        self.buffer = input_ids.to(device, torch.long, copy=True)
        self.kept_ids: list[int] = []  # of the last round
        self.position_ids = torch.arange(0, device=self.device)[None]  # grows with the buffer

        wanted = generation_config if generation_config.return_dict_in_generate else None
        self.scores = () if wanted and wanted.output_scores else None
        self.logits = () if wanted and wanted.output_logits else None
        self.attentions = () if wanted and wanted.output_attentions else None
        self.hidden_states = () if wanted and wanted.output_hidden_states else None

    @property
    def ids(self) -> torch.LongTensor:
        """All tokens so far, `(1, T)`."""
        return self.buffer[:, : self.num_tokens]

    def run(self, tap: ResidualTap, cache: Cache, model_kwargs: dict):
        """Prefill, then rounds of draft, verify, accept and rewind until something stops."""
        # 1. Prefill: the target reads the prompt and chooses the first token; nothing is drafted yet
        prompt_mask = model_kwargs.get("attention_mask")
        position = int(model_kwargs["position_ids"][0, -1])  # of the last token that the target has seen
        if prompt_mask is not None:
            prompt_mask = prompt_mask.to(self.device)
        # On the prompt's device, as the library then moves every input to the target's
        outputs = self.target._prefill(self.ids.to(self.prompt_device), self.config, model_kwargs)
        cache.activate_past_recording()
        context = _prompt_context(tap.take(), prompt_mask, self.drafter.config)  # (1, C, m, D)
        tap.last = None  # from here on every row may be of use
        most = self.most_drafts(position, cache)
        self.make_room(0, position)
        finished, num_new = self.accept(outputs, None, None, first=True)
        ids = self.ids.to(self.prompt_device)
        step_inputs = self.target.prepare_inputs_for_generation(ids, next_sequence_length=1, **model_kwargs)
        draft_cache = DynamicCache(config=self.drafter.config)
        with self.target._optimize_model_for_decode():
            while not finished:
                # 2. Draft: the last token is the anchor, at the position behind everything verified. The last token
                # within the length limit is the target's own, so there is room for one draft less.
                position += num_new
                num_drafts = min(most, self.max_length - self.num_tokens - 1)
                self.make_room(num_drafts, position)
                drafts, draft_probs = self.propose(context, position, num_drafts, draft_cache)  # (n,), (n, V)
                # 3. Verify: anchor and drafts in one forward; its rows are what single steps would give
                verified = self.buffer.narrow(1, self.num_tokens - 1, 1 + len(drafts))  # (1, n + 1)
                inputs = self.verify_inputs(step_inputs, verified, position, prompt_mask, cache)
                tap.clear()  # a logits processor may have run the target too
                outputs = self.target(**inputs)
                context = tap.take()  # (1, n + 1, m, D)
                # 4. Accept: the drafts that the target agrees with, and one token of its own
                finished, num_new = self.accept(outputs, drafts, draft_probs)
                # 5. Rewind: the forward wrote n + 1 positions, of which the first `num_new` are verified. The newest
                # token was not in it: it is the next round's anchor.
                cache.crop(num_new - verified.shape[1])
                context = context[:, :num_new]
        if self.streamer is not None:
            self.streamer.end()
        return self.result(cache)

    def make_room(self, num_drafts: int, position: int) -> None:
        """Grow the buffer and the position ids to what a round needs, by doubling: the limit may be far away."""
        needed = self.num_tokens + num_drafts + 1
        if needed > self.buffer.shape[1]:
            self.buffer = torch.nn.functional.pad(self.buffer, (0, max(needed, MIN_ROOM)))
        needed = position + num_drafts + 1
        if needed > self.position_ids.shape[1]:
            self.position_ids = torch.arange(2 * max(needed, MIN_ROOM), device=self.device)[None]

    def most_drafts(self, position: int, cache: Cache) -> int:
        """The most drafts per round; none, with a warning, for a prompt that blocks would misread."""
        # A compressed layer shows a block the entries that its position ids allow, but a single step all entries.
        # Where positions do not count the cache, the two differ, and only single steps give plain decoding's ids.
        if position + 1 != cache.get_seq_length() and any(t in _COMPRESSED for t in self.target.config.layer_types):
            logger.warning_once(
                "the prompt is padded, or its position_ids do not count its tokens: DeepSeek-V4's compressed "
                "attention then depends on the tokens in a forward, so nothing is drafted. "
                "Pass the prompt without padding"
            )
            return 0
        return min(self.drafter.max_drafts, self.config.num_assistant_tokens)

    def propose(
        self, context: torch.Tensor, position: int, num_drafts: int, draft_cache: Cache
    ) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """The drafts of a round `(n,)`, a view of the buffer, and when sampling their distributions `(n, V)`."""
        self.num_drafts, self.draft_probs = 0, []
        if num_drafts > 0:
            self.noise_ids[0, 0] = self.kept_ids[-1]
            request = DraftRequest(
                context=context,
                ids=self.ids,
                noise_ids=self.noise_ids,
                position=position,
                num_drafts=num_drafts,
                target=self.target,
                cache=draft_cache,
                do_sample=self.do_sample,
            )
            self.drafter.propose(request, self.choose_drafts)
        drafts = self.buffer[0].narrow(0, self.num_tokens, self.num_drafts)
        return drafts, torch.cat(self.draft_probs) if self.draft_probs else None

    def choose_drafts(self, logits: torch.Tensor) -> torch.LongTensor:
        """The next drafts `(n,)` from their logits `(n, V)`, written behind the tokens and the drafts so far; when
        sampling, their distributions are kept."""
        drafts = self.buffer[0].narrow(0, self.num_tokens + self.num_drafts, logits.shape[0])
        self.num_drafts += logits.shape[0]
        if not self.do_sample:  # ids alone travel where the LM head is on another device
            return drafts.copy_(logits.argmax(-1))
        # Verification needs the distribution that a draft was really drawn from
        probs = self.rowwise(self.ids, logits.to(self.buffer.device)).softmax(-1)
        self.draft_probs.append(probs)
        return drafts.copy_(torch.multinomial(probs, 1)[:, 0])

    def verify_inputs(
        self, step_inputs: dict, verified: torch.LongTensor, position: int, mask: torch.Tensor | None, cache: Cache
    ) -> dict:
        """The target's inputs for the anchor and its drafts, `verified` `(1, n + 1)`."""
        length = verified.shape[1]
        inputs = {
            **step_inputs,
            "input_ids": verified.to(self.device),
            "position_ids": self.position_ids.narrow(1, position, length),
            "logits_to_keep": length,
            "return_dict": True,
        }
        if mask is not None:  # left padding of the prompt
            inputs["attention_mask"] = torch.nn.functional.pad(
                mask, (0, cache.get_seq_length() + length - mask.shape[1]), value=1
            )
        return inputs

    def accept(
        self,
        outputs: ModelOutput,
        drafts: torch.LongTensor | None,
        draft_probs: torch.Tensor | None,
        first: bool = False,
    ) -> tuple[bool, int]:
        """Judge the drafts, append what the target keeps, and stop at the first token that stops.

        Returns whether generation is over, and the number of tokens appended.
        """
        num_drafts = 0 if drafts is None else len(drafts)
        raw = outputs.logits[0, -num_drafts - 1 :].to(self.buffer.device, torch.float32)  # (n + 1, V)
        self.kept_ids = []
        judge = self.judge_one_by_one if self.sees_prefix else self.judge_together
        finished, draft_ids, num_accepted = judge(raw, drafts, draft_probs)
        if draft_ids:
            self.stats.num_drafts.append(len(draft_ids))
            self.stats.num_accepted.append(num_accepted)
        self.keep_states(outputs, len(self.kept_ids), first)
        self.stream(draft_ids, num_accepted)
        return finished, len(self.kept_ids)

    def judge_together(
        self, raw: torch.Tensor, drafts: torch.LongTensor | None, draft_probs: torch.Tensor | None
    ) -> tuple[bool, list[int], int]:
        """Judge all rows at once, from logits `(n + 1, V)`, and append what is kept.

        Returns whether generation is over, the drafts' ids, and the number of accepted drafts, those behind a stop
        included.
        """
        scores = self.rowwise(self.ids, raw.clone()) if self.rowwise else raw
        # Reading a value waits for the device, so the drafts, how many are accepted and the own token are read at once
        if self.do_sample:
            *draft_ids, num_accepted, own = self.judge_samples(scores, drafts, draft_probs).tolist()
        else:
            chosen = scores.argmax(-1)
            ids = chosen.tolist() if drafts is None else torch.cat([drafts, chosen]).tolist()
            draft_ids, chosen = ids[: -len(chosen)], ids[-len(chosen) :]
            num_accepted = num_leading([a == b for a, b in zip(chosen, draft_ids, strict=False)])
            own = chosen[num_accepted]
        for i, token in enumerate([*draft_ids[:num_accepted], own]):
            if self.append(token, i < num_accepted, scores[i], raw[i]):
                return True, draft_ids, num_accepted
        return False, draft_ids, num_accepted

    def judge_samples(
        self, scores: torch.Tensor, drafts: torch.LongTensor | None, draft_probs: torch.Tensor | None
    ) -> torch.LongTensor:
        """Speculative sampling from processed scores `(n + 1, V)`, on the device alone.

        Token by token (arXiv 2211.17192) a draft is kept with probability min(1, p / q); after the first rejection the
        own token comes from what q left over of p, so that the two together are distributed as p. By default the whole
        block is judged together instead, see `block_verification`.

        Returns the drafts, the number of accepted ones, and the target's own next token, `(n + 2,)`.
        """
        probs = scores.softmax(-1)  # p
        if drafts is None or not len(drafts):
            return torch.cat([probs.new_zeros(1, dtype=torch.long), torch.multinomial(probs[0], 1)])
        if self.drafter.verification == "token":
            ratio = _ratios(probs, draft_probs, drafts)
            num_accepted = (torch.rand_like(ratio) < ratio).cumprod(0).sum(0, keepdim=True)  # (1,)
            weight = 1.0
        else:
            chances, weights = block_verification(probs, draft_probs, drafts)
            ends = torch.arange(1, len(drafts) + 1, device=probs.device)
            num_accepted = (ends * (torch.rand_like(chances) < chances)).amax(0, keepdim=True)  # (1,)
            weight = weights.index_select(0, num_accepted)
        row = weight * probs.index_select(0, num_accepted)[0]
        rejected = draft_probs.index_select(0, num_accepted.clamp(max=len(drafts) - 1))[0]
        own = _sample_own(row, rejected * (num_accepted < len(drafts)))
        return torch.cat([drafts, num_accepted, own])

    def judge_one_by_one(
        self, raw: torch.Tensor, drafts: torch.LongTensor | None, draft_probs: torch.Tensor | None
    ) -> tuple[bool, list[int], int]:
        """As `judge_together`, for processors that look at the prefix: each is called once per token, when all tokens
        before it are in place, and never on a prefix that a rejection or a stop cuts off."""
        draft_ids = [] if drafts is None else drafts.tolist()
        for i, row in enumerate(raw):
            scores = self.processors(self.ids, row[None].clone())[0]  # (V,)
            draft = draft_ids[i] if i < len(draft_ids) else None
            if not self.do_sample:
                token = int(scores.argmax())
            else:
                probs = scores.softmax(-1)
                if draft is not None and torch.rand(()) < float(probs[draft] / draft_probs[i, draft]):
                    token = draft
                else:
                    token = int(_sample_own(probs, draft_probs[i] if draft is not None else None))
            finished = self.append(token, token == draft, scores, row)
            if finished or token != draft:
                break
        return finished, draft_ids, i + (token == draft)

    def append(self, token: int, is_draft: bool, scores: torch.Tensor, raw: torch.Tensor) -> bool:
        """Keep one token, with its scores and logits `(V,)` where they were asked for; returns whether it stops."""
        if not is_draft:  # an accepted draft is in the buffer already
            self.buffer[0, self.num_tokens] = token
        self.num_tokens += 1
        self.kept_ids.append(token)
        if self.scores is not None:
            self.scores += (scores[None].to(self.prompt_device, copy=True),)
        if self.logits is not None:
            self.logits += (raw[None].to(self.prompt_device, copy=True),)
        finished = token in self.eos_ids or self.num_tokens >= self.max_length
        if self.criteria:
            finished |= bool(self.criteria(self.ids.to(self.prompt_device), self.scores).all())
        return finished

    def keep_states(self, outputs: ModelOutput, num_new: int, first: bool) -> None:
        """Hidden states and attentions that the user asked for, one entry per token, as from plain `generate`."""
        rows = range(num_new)
        if self.hidden_states is not None:
            self.hidden_states += (
                (outputs.hidden_states,)
                if first
                else tuple(
                    # None where `output_hidden_states` lists other layers
                    tuple(layer if layer is None else layer[:, i : i + 1] for layer in outputs.hidden_states)
                    for i in rows
                )
            )
        if self.attentions is not None:
            self.attentions += (
                (outputs.attentions,)
                if first
                else tuple(_row_attentions(outputs, self.target.config, i) for i in rows)
            )

    def stream(self, draft_ids: list[int], num_accepted: int) -> None:
        """Hand the new tokens to the streamer, or the whole round to one with a `put_round` method."""
        if self.streamer is None:
            return
        if (put_round := getattr(self.streamer, "put_round", None)) is not None:
            put_round(self.kept_ids, draft_ids, num_accepted)
        else:
            self.streamer.put(torch.tensor([self.kept_ids]))

    def result(self, cache: Cache):
        ids = self.ids.to(self.prompt_device, copy=True)
        if not self.config.return_dict_in_generate:
            return ids
        return HyperDFlashGenerateOutput(
            sequences=ids,
            scores=self.scores,
            logits=self.logits,
            attentions=self.attentions,
            hidden_states=self.hidden_states,
            cache=cache,
            speculation=self.stats,
        )


def block_verification(
    probs: torch.Tensor, draft_probs: torch.Tensor, drafts: torch.LongTensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verification of a whole block (Sun et al., arXiv 2403.10444, algorithm 2): what a sampled prefix is kept with.

    The kept prefix ends at the last draft whose chance succeeds, so an early draft may be kept because of later ones.
    After draft i the own token then comes from `max(w_i p - q, 0)`, normalised, and after the last draft from `p`.
    Together they are distributed as the target's tokens, for any `q` that the drafts were really drawn from, however
    many drafts there are; their number must not depend on a draft's own token. No draft is kept less often than by
    verification token by token; with one draft, or one possible token per slot, the two are the same.

    Args:
        probs (`torch.Tensor` of shape `(n + 1, V)`): p, the target's distributions for the drafts and the token after.
        draft_probs (`torch.Tensor` of shape `(n, V)`): q, the distributions that the drafts were drawn from.
        drafts (`torch.LongTensor` of shape `(n,)`): the drafts' ids.

    Returns:
        The chance that the prefix up to draft 1, ..., n is kept by itself, `(n,)`; and the weights `w_0, ..., w_n`,
        `(n + 1,)`.
    """
    ratios = _ratios(probs, draft_probs, drafts)
    weights = [torch.ones_like(ratios[0])]
    for ratio in ratios.unbind():
        weights.append((weights[-1] * ratio).clamp(max=1))
    weights = torch.stack(weights)
    # What is left to draw the own token from after drafts 1, ..., n - 1, and what keeping them leaves to the others
    rest = (weights[1:-1, None] * probs[1:-1] - draft_probs[1:]).clamp(min=0).sum(-1)
    # 0 / 0 where p is q: all later drafts are kept then, so this prefix need not be
    chances = (rest / (rest + 1 - weights[1:-1])).nan_to_num(0.0).clamp(max=1)
    return torch.cat([chances, weights[-1:]]), weights


def _ratios(probs: torch.Tensor, draft_probs: torch.Tensor, drafts: torch.LongTensor) -> torch.Tensor:
    """p / q of each draft, `(n,)`; q is above 0, as the draft was drawn from it."""
    columns = drafts[:, None]
    return (probs[:-1].gather(1, columns) / draft_probs.gather(1, columns))[:, 0]


def num_leading(flags: list[bool]) -> int:
    """How many are true before the first that is not."""
    return flags.index(False) if False in flags else len(flags)


def _sample_own(probs: torch.Tensor, rejected: torch.Tensor | None) -> torch.LongTensor:
    """The target's own token `(1,)` from `probs` `(V,)`; after a rejection from what is left, `max(p - q, 0)`."""
    if rejected is not None:
        rest = (probs - rejected).clamp(min=0)
        probs = torch.where(rest.sum() > 0, rest, probs)  # no `if`: it would wait for the device
    return torch.multinomial(probs, 1)


def _row_attentions(outputs: ModelOutput, config: DeepseekV4Config, row: int) -> tuple[torch.Tensor, ...]:
    """Attentions `(1, heads, 1, keys)` of one row of a block, of its window and the entries closed by then: these are
    the keys that a step of its own would have."""
    end = outputs.cache.get_seq_length()
    attentions = ()
    for weights, layer_type in zip(outputs.attentions, config.layer_types, strict=True):
        rate = config.compress_rates.get(layer_type, end + 1)  # sliding layers have no entries
        num_later = weights.shape[2] - row - 1
        num_keys = weights.shape[-1] - end // rate
        window = slice(max(num_keys - num_later - config.sliding_window, 0), num_keys - num_later)
        entries = slice(num_keys, num_keys + (end - num_later) // rate)
        weights = weights[:, :, row : row + 1]
        attentions += (torch.cat([weights[..., window], weights[..., entries]], dim=-1),)
    return attentions


def _reach(config: PreTrainedConfig) -> int | None:
    """How many positions before the anchor a drafter's layers can see, or None where one of them sees all."""
    return None if "full_attention" in config.layer_types else config.sliding_window


def _prompt_context(residual: torch.Tensor, mask: torch.Tensor | None, config: PreTrainedConfig) -> torch.Tensor:
    """Residuals `(1, C, m, D)` of the prompt without its padding and without positions outside every window: an MTP
    module's first query is the last of them."""
    if mask is not None:
        residual = residual[:, mask[0, -residual.shape[1] :].bool().to(residual.device)]
    if (reach := _reach(config)) is not None:
        first = max(residual.shape[1] - reach, 0)
        residual = residual[:, first:].clone() if first else residual  # a slice would keep the whole prompt's alive
    return residual
