"""The DeepSeek-V4 encoding: chat messages to the text and the token ids that a V4 model was trained on.

DeepSeek-V4 has no chat template: its encoding is code. This file is the part without tools. It needs the standard
library only, so that it can be published with a drafter.

    BOS [effort instruction] system text <｜User｜>question<｜Assistant｜></think>answer EOS               non-thinking
    BOS [effort instruction] system text <｜User｜>question<｜Assistant｜><think>reasoning</think>answer EOS   thinking

What may surprise you, all as in the official code:
- The header `<｜Assistant｜>` + think tag belongs to the user turn before it. An assistant turn that follows no user
  turn (the first message, or the second of two assistant turns in a row) has no header.
- Only what comes after the last user turn keeps its reasoning; earlier answers are written `</think>answer`.
- User turns in a row become one, joined by an empty line.
- Effort acts in thinking mode only, and what it writes depends on the generation of the checkpoint.

`encode_messages` leaves text that looks like a control token ("</think>" in a question about prompts) as it is, like
the official code, and a tokenizer then makes control tokens of it. `encode_with_mask` encodes it as plain text: use
that one for text that others wrote.

    .venv/bin/python -m pytest tests/test_encoding.py
"""

import re
from functools import lru_cache
from itertools import groupby
from os.path import commonprefix

BOS_TOKEN = "<｜begin▁of▁sentence｜>"
EOS_TOKEN = "<｜end▁of▁sentence｜>"
USER_TOKEN = "<｜User｜>"
ASSISTANT_TOKEN = "<｜Assistant｜>"
THINK_START_TOKEN = "<think>"
THINK_END_TOKEN = "</think>"

MODES = ("non-thinking", "thinking")

# The same text is "max" for the preview checkpoints and "high" for the 0731 ones.
_ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose "
    "the problem into its most fundamental components, trace every causal chain to its root, and resolve the "
    "underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
EFFORT_INSTRUCTIONS = {
    "preview": {None: "", "high": "", "max": _ABSOLUTE_MAXIMUM},
    "0731": {None: "", "low": "", "high": _ABSOLUTE_MAXIMUM, "max": _BEYOND_MAXIMUM},
}

_ROLES = ("system", "user", "assistant")
_TOOL_KEYS = ("tools", "tool_calls", "tool_call_id", "function_call")


def encode_messages(
    messages: list[dict],
    *,
    mode: str = "non-thinking",
    effort: str | None = None,
    generation: str = "preview",
    add_generation_prompt: bool = True,
) -> str:
    """The conversation as text in the DeepSeek-V4 encoding.

    Args:
        messages (`list[dict]`): `{"role": "system" | "user" | "assistant", "content": str}`; an assistant message may
            have `"reasoning"`, which only thinking mode renders, and `"weight"`, which only the loss mask reads.
        mode (`str`, *optional*, defaults to `"non-thinking"`): `"non-thinking"` or `"thinking"`.
        effort (`str`, *optional*): `None`, `"high"` or `"max"`, for generation 0731 also `"low"`.
        generation (`str`, *optional*, defaults to `"preview"`): of the checkpoint, `"preview"` or `"0731"`.
        add_generation_prompt (`bool`, *optional*, defaults to `True`): end a conversation whose last turn is the
            user's with the header that starts the answer.

    Raises:
        ValueError: for an empty list, a role, mode, effort or generation that the encoding does not have, and for
            tools, which it leaves out.
    """
    spans = _spans(messages, mode, effort, generation, add_generation_prompt)
    return "".join(text for text, _, _ in spans)


def encode_with_mask(
    messages: list[dict],
    tokenizer,
    *,
    mode: str = "non-thinking",
    effort: str | None = None,
    generation: str = "preview",
    add_generation_prompt: bool = False,
) -> tuple[list[int], list[int]]:
    """Token ids of the conversation in the DeepSeek-V4 encoding, with the loss mask.

    The mask is 1 on every answer (in thinking mode also on its reasoning and the `</think>` that ends it) and on the
    EOS after it, and 0 elsewhere, the header included. An answer with `"weight": 0` (OpenAI's fine-tuning format) is
    context. Both lists have one entry per token. There is exactly one BOS, whatever the tokenizer adds by itself, and
    text that looks like a control token is encoded as plain text.

    Args: as in [`encode_messages`]; `tokenizer` is a `transformers` tokenizer with the six control tokens. With
    `add_generation_prompt=True` the ids are a prompt for `generate`.

    Raises:
        ValueError: as in [`encode_messages`], and for a tokenizer that lacks one of the control tokens.
    """
    spans = _spans(messages, mode, effort, generation, add_generation_prompt)
    added = tokenizer.get_added_vocab()
    missing = [token for token in _CONTROL_TOKENS if token not in added]
    if missing:
        raise ValueError(f"the tokenizer lacks control tokens of the DeepSeek-V4 encoding: {', '.join(missing)}")
    cuts = _cut_pattern(frozenset(added))
    input_ids, loss_mask = [], []
    for is_control, run in groupby(spans, key=lambda span: span[1]):
        if is_control:
            for text, _, is_trained in run:
                input_ids.append(added[text])
                loss_mask.append(int(is_trained))
            continue
        # Text between two control tokens is tokenised as a whole: "Be brief. " + "Hi" has the token " Hi". A token
        # across the seam counts as the answer's, which starts in it.
        text, ids, mask = "", [], []
        for part, _, is_trained in run:
            text += part
            longer = _plain_ids(text, tokenizer, cuts)
            num_same = len(commonprefix([ids, longer]))
            ids, mask = longer, mask[:num_same] + [int(is_trained)] * (len(longer) - num_same)
        input_ids += ids
        loss_mask += mask
    return input_ids, loss_mask


_CONTROL_TOKENS = (BOS_TOKEN, EOS_TOKEN, USER_TOKEN, ASSISTANT_TOKEN, THINK_START_TOKEN, THINK_END_TOKEN)


def _spans(messages, mode, effort, generation, add_generation_prompt) -> list[tuple[str, bool, bool]]:
    """The conversation as (text, is a control token, is in the loss)."""
    _check(messages, mode, effort, generation)
    thinking = mode == "thinking"
    roles = [message["role"] for message in messages]
    last_user = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
    spans = [(BOS_TOKEN, True, False)]
    # Text is held back until a control token follows, as the system text joins the instruction before it
    text = EFFORT_INSTRUCTIONS[generation][effort] if thinking else ""
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            spans.append((text, False, False))
            text = ""
            is_trained = message.get("weight") != 0
            if thinking and i > last_user:
                spans += [(message.get("reasoning") or "", False, is_trained), (THINK_END_TOKEN, True, is_trained)]
            spans += [(message["content"], False, is_trained), (EOS_TOKEN, True, is_trained)]
            continue
        if message["role"] == "user":
            if i and roles[i - 1] == "user":
                text += "\n\n"
            else:
                spans += [(text, False, False), (USER_TOKEN, True, False)]
                text = ""
        text += message["content"]
        following = roles[i + 1] if i + 1 < len(roles) else "assistant" if add_generation_prompt else None
        if message["role"] == "user" and following == "assistant":
            # Earlier answers are rendered without their reasoning, so their header closes it at once
            think = THINK_START_TOKEN if thinking and i >= last_user else THINK_END_TOKEN
            spans += [(text, False, False), (ASSISTANT_TOKEN, True, False), (think, True, False)]
            text = ""
    spans.append((text, False, False))  # a last user turn without a header after it
    return [span for span in spans if span[0]]


def _check(messages, mode, effort, generation) -> None:
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; the DeepSeek-V4 encoding has {', '.join(MODES)}")
    if generation not in tuple(EFFORT_INSTRUCTIONS):  # a tuple compares, where a dict would have to hash a list
        accepted = ", ".join(EFFORT_INSTRUCTIONS)
        raise ValueError(f"unknown generation {generation!r}; the DeepSeek-V4 encoding has {accepted}")
    if effort not in tuple(EFFORT_INSTRUCTIONS[generation]):
        accepted = ", ".join(map(str, EFFORT_INSTRUCTIONS[generation]))
        raise ValueError(f"unknown effort {effort!r}; generation {generation} has {accepted}")
    if not messages:
        raise ValueError("the list of messages is empty")
    for i, message in enumerate(messages):
        role = message.get("role")
        used = [key for key in _TOOL_KEYS if message.get(key)]
        if role in ("tool", "function") or used:
            found = f"key {used[0]!r}" if used else f"role {role!r}"
            raise ValueError(f"message {i} has {found}: tool calls are outside this DeepSeek-V4 encoding")
        if role not in _ROLES:
            raise ValueError(f"message {i} has unknown role {role!r}; accepted are {', '.join(_ROLES)}")
        for key in ("content", "reasoning"):
            value = message.get(key)
            if not isinstance(value, str) and (key == "content" or value is not None):
                raise ValueError(f"message {i} ({role}): {key!r} must be a string, not {type(value).__name__}")
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f"message {i} ({role}): 'weight' must be 0 or 1, not {message['weight']!r}")


@lru_cache(maxsize=8)
def _cut_pattern(added_tokens: frozenset[str]) -> re.Pattern:
    """Finds where an added token starts; the lookahead also finds one that starts inside another."""
    return re.compile("(?=" + "|".join(re.escape(token) for token in sorted(added_tokens)) + ")")


def _plain_ids(text: str, tokenizer, cuts: re.Pattern) -> list[int]:
    """Ids of `text` without control tokens: an added token is cut after its first character, so that the tokenizer
    cannot see it. `split_special_tokens` is not enough: DeepSeek tokenizers may declare `<think>` as not special."""
    bounds = [0, *(match.start() + 1 for match in cuts.finditer(text)), len(text)]
    pieces = [text[start:end] for start, end in zip(bounds, bounds[1:], strict=False) if start < end]
    return [i for ids in tokenizer(pieces, add_special_tokens=False)["input_ids"] for i in ids] if pieces else []


def to_message(ids: list[int], tokenizer, mode: str, eos_ids: set[int]) -> dict:
    """The assistant message that the answer's ids stand for. Reasoning ends at the first `</think>`; without one, all
    of it is reasoning. A model that opens `<think>` by itself, in either mode, is reasoning too."""
    ids = ids[:-1] if ids and ids[-1] in eos_ids else ids
    start, end = tokenizer.convert_tokens_to_ids([THINK_START_TOKEN, THINK_END_TOKEN])
    opens = ids[:1] == [start]
    if mode != "thinking" and not opens:
        return {"role": "assistant", "content": _decode(ids, tokenizer)}
    ids = ids[1:] if opens else ids  # the tag is the encoding's, which would write it once more
    split = ids.index(end) if end in ids else len(ids)
    reasoning, content = _decode(ids[:split], tokenizer), _decode(ids[split + 1 :], tokenizer)
    return {"role": "assistant", "reasoning": reasoning, "content": content}


def _decode(ids: list[int], tokenizer) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
