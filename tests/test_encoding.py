"""The DeepSeek-V4 encoding: text, ids and loss masks, written by hand token by token.

.venv/bin/python -m pytest tests/test_encoding.py
"""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from encoding_deepseek_v4 import (
    BOS_TOKEN,
    EFFORT_INSTRUCTIONS,
    EOS_TOKEN,
    encode_messages,
    encode_with_mask,
    to_message,
)

BOS, EOS, USER, ASSISTANT = BOS_TOKEN, EOS_TOKEN, "<｜User｜>", "<｜Assistant｜>"
OPEN, CLOSE = "<think>", "</think>"
CONTROL = (BOS, EOS, USER, ASSISTANT, OPEN, CLOSE)


def make_tokenizer(special: bool = True) -> PreTrainedTokenizerFast:
    """One token a byte, plus the control tokens; adds a BOS by itself, as V4's does."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([BOS, EOS])
    bpe.add_tokens([AddedToken(token, special=special, normalized=False) for token in CONTROL[2:]])
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=BOS, eos_token=EOS)


@pytest.fixture(params=[True, False], ids=["special", "not-special"])
def tokenizer(request):
    return make_tokenizer(request.param)


def say(*turns):
    roles = {"s": "system", "u": "user", "a": "assistant"}
    messages = []
    for role, content, *reasoning in turns:
        messages.append({"role": roles[role], "content": content})
        if reasoning:
            messages[-1]["reasoning"] = reasoning[0]
    return messages


def by_hand(tokenizer, *parts):
    """(text, bit) pairs to ids and mask: a tuple text is one control token, a string is one token a character."""
    ids, mask = [], []
    for text, bit in parts:
        found = tokenizer.convert_tokens_to_ids(list(text) if isinstance(text, tuple) else byte_tokens(text))
        assert None not in found
        ids += found
        mask += [bit] * len(found)
    return ids, mask


def byte_tokens(text):
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return list("".join(piece for piece, _ in pieces))


def test_one_turn_has_the_answer_and_its_eos_in_the_loss(tokenizer):
    ids, mask = encode_with_mask(say(("u", "hi"), ("a", "yo")), tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == [BOS, USER, "h", "i", ASSISTANT, CLOSE, "y", "o", EOS]
    assert mask == [0, 0, 0, 0, 0, 0, 1, 1, 1]


def test_system_text_follows_bos_without_a_token_of_its_own(tokenizer):
    ids, mask = encode_with_mask(say(("s", "ok"), ("u", "a"), ("a", "b")), tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == [BOS, "o", "k", USER, "a", ASSISTANT, CLOSE, "b", EOS]
    assert mask == [0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_thinking_has_reasoning_and_its_end_in_the_loss_but_not_its_start(tokenizer):
    ids, mask = encode_with_mask(say(("u", "q"), ("a", "A", "r")), tokenizer, mode="thinking")
    assert tokenizer.convert_ids_to_tokens(ids) == [BOS, USER, "q", ASSISTANT, OPEN, "r", CLOSE, "A", EOS]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_thinking_drops_the_reasoning_of_earlier_turns(tokenizer):
    messages = say(("u", "q"), ("a", "A", "r"), ("u", "w"), ("a", "B", "s"))
    ids, mask = encode_with_mask(messages, tokenizer, mode="thinking")
    first = [BOS, USER, "q", ASSISTANT, CLOSE, "A", EOS]
    assert tokenizer.convert_ids_to_tokens(ids) == [*first, USER, "w", ASSISTANT, OPEN, "s", CLOSE, "B", EOS]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]


def test_non_thinking_leaves_reasoning_out():
    assert encode_messages(say(("u", "q"), ("a", "A", "r"))) == f"{BOS}{USER}q{ASSISTANT}{CLOSE}A{EOS}"


def test_thinking_without_reasoning_closes_the_think_tag_at_once():
    text = encode_messages(say(("u", "q"), ("a", "A")), mode="thinking")
    assert text == f"{BOS}{USER}q{ASSISTANT}{OPEN}{CLOSE}A{EOS}"


@pytest.mark.parametrize(("mode", "tag"), [("non-thinking", CLOSE), ("thinking", OPEN)])
def test_generation_prompt_ends_with_the_header(mode, tag):
    messages = say(("u", "q"))
    assert encode_messages(messages, mode=mode) == f"{BOS}{USER}q{ASSISTANT}{tag}"
    assert encode_messages(messages, mode=mode, add_generation_prompt=False) == f"{BOS}{USER}q"
    assert encode_messages(say(("u", "q"), ("a", "A")), mode=mode).endswith(EOS)


def test_two_user_turns_in_a_row_become_one():
    assert encode_messages(say(("u", "a"), ("u", "b"))) == f"{BOS}{USER}a\n\nb{ASSISTANT}{CLOSE}"


def test_a_first_assistant_turn_has_no_header(tokenizer):
    ids, mask = encode_with_mask(say(("a", "hi"), ("u", "q"), ("a", "A")), tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == [BOS, "h", "i", EOS, USER, "q", ASSISTANT, CLOSE, "A", EOS]
    assert mask == [0, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def test_a_second_assistant_turn_in_a_row_has_no_header(tokenizer):
    ids, mask = encode_with_mask(say(("u", "q"), ("a", "A"), ("a", "B")), tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == [BOS, USER, "q", ASSISTANT, CLOSE, "A", EOS, "B", EOS]
    assert mask == [0, 0, 0, 0, 0, 1, 1, 1, 1]


def test_an_empty_answer_leaves_only_eos_in_the_loss(tokenizer):
    ids, mask = encode_with_mask(say(("u", "q"), ("a", "")), tokenizer)
    assert tokenizer.convert_ids_to_tokens(ids) == [BOS, USER, "q", ASSISTANT, CLOSE, EOS]
    assert mask == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize("answer", ["A \n\n", " A", "A\n", "  ", "é\t"])
def test_white_space_and_other_bytes_at_the_edges_belong_to_the_answer(tokenizer, answer):
    found = encode_with_mask(say(("u", "q \n"), ("a", answer)), tokenizer)
    head = [((BOS, USER), 0), ("q \n", 0), ((ASSISTANT, CLOSE), 0)]
    assert found == by_hand(tokenizer, *head, (answer, 1), ((EOS,), 1))


@pytest.mark.parametrize(
    "text",
    [
        f"{USER}x{ASSISTANT}{CLOSE}y{EOS}",
        f"use {OPEN} and {CLOSE}",
        OPEN + OPEN + BOS,
        "<<think>>",
        "<think",
    ],
)
def test_text_that_looks_like_a_control_token_stays_plain_text(tokenizer, text):
    found = encode_with_mask(say(("s", text), ("u", text), ("a", text, text)), tokenizer, mode="thinking")
    head = [((BOS,), 0), (text, 0), ((USER,), 0), (text, 0), ((ASSISTANT, OPEN), 0)]
    assert found == by_hand(tokenizer, *head, (text, 1), ((CLOSE,), 1), (text, 1), ((EOS,), 1))
    assert tokenizer.decode(found[0]).count(text) >= 4


def test_there_is_one_bos_though_the_tokenizer_adds_its_own(tokenizer):
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    ids, _ = encode_with_mask(say(("s", "a b"), ("u", "c d"), ("a", "e f"), ("u", "g")), tokenizer)
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("mode", ["non-thinking", "thinking"])
def test_ids_are_those_of_the_rendered_text(tokenizer, mode):
    messages = say(
        ("s", "be brief"), ("u", "hi "), ("a", "yo\n", "so"), ("u", "1"), ("u", "2"), ("a", "x", "y"), ("u", "3")
    )
    ids, mask = encode_with_mask(messages, tokenizer, mode=mode, add_generation_prompt=True)
    assert ids == tokenizer(encode_messages(messages, mode=mode), add_special_tokens=False)["input_ids"]
    assert len(mask) == len(ids)


@pytest.mark.parametrize("system", ["Be kind. ", "Be kind.", "use <th", "Be kind.\n\n"])
@pytest.mark.parametrize("answer", ["Hello", " Hello", "ink>", "\n"])
def test_a_system_text_and_a_first_answer_are_tokenised_as_one_text(system, answer):
    """They touch, without a control token between them. A token across the seam is the answer's."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[1] / "examples" / "tiny" / "target")
    ids, mask = encode_with_mask(say(("s", system), ("a", answer)), tokenizer)
    assert tokenizer.decode(ids) == f"{BOS}{system}{answer}{EOS}"
    assert ids.count(tokenizer.convert_tokens_to_ids(OPEN)) == 0
    if "<" not in system:  # where the two make a control token, the text is cut instead
        assert ids == tokenizer(f"{BOS}{system}{answer}{EOS}", add_special_tokens=False)["input_ids"]
    context = tokenizer.decode([i for i, bit in zip(ids, mask, strict=True) if not bit])
    assert mask == sorted(mask)
    assert f"{BOS}{system}".startswith(context)
    assert tokenizer.decode([i for i, bit in zip(ids, mask, strict=True) if bit]).endswith(f"{answer}{EOS}")


@pytest.mark.parametrize("mode", ["non-thinking", "thinking"])
def test_an_answer_of_weight_0_is_context(tokenizer, mode):
    messages = say(("u", "q"), ("a", "A", "r"))
    weighted = [*messages[:1], {**messages[1], "weight": 0}, *say(("a", "B"))]
    ids, mask = encode_with_mask(weighted, tokenizer, mode=mode)
    same, learned = encode_with_mask([*messages, *say(("a", "B"))], tokenizer, mode=mode)
    assert ids == same
    tail = encode_with_mask(say(("a", "B")), tokenizer, mode=mode)[1].count(1)
    assert mask == [0] * (len(ids) - tail) + [1] * tail != learned
    assert encode_with_mask([*messages[:1], {**messages[1], "weight": 1}], tokenizer, mode=mode)[1][-1] == 1


@pytest.mark.parametrize(("mode", "opened"), [("thinking", True), ("thinking", False), ("non-thinking", True)])
def test_an_answer_that_opens_the_think_tag_itself_keeps_no_tag_in_its_reasoning(mode, opened):
    tokenizer = make_tokenizer()
    parts = ((OPEN,), 1), ("r", 1), ((CLOSE,), 1), ("a", 1), ((EOS,), 1)
    ids, _ = by_hand(tokenizer, *parts[0 if opened else 1 :])
    message = to_message(ids, tokenizer, mode, {tokenizer.eos_token_id})
    assert message == {"role": "assistant", "reasoning": "r", "content": "a"}


@pytest.mark.parametrize(
    ("generation", "effort", "start"),
    [
        ("preview", None, ""),
        ("preview", "high", ""),
        ("preview", "max", "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"),
        ("0731", None, ""),
        ("0731", "low", ""),
        ("0731", "high", "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"),
        ("0731", "max", "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"),
    ],
)
def test_effort_writes_its_instruction_right_after_bos(generation, effort, start):
    messages = say(("s", "S"), ("u", "q"))
    text = encode_messages(messages, mode="thinking", effort=effort, generation=generation)
    instruction = text.removeprefix(BOS).removesuffix(f"S{USER}q{ASSISTANT}{OPEN}")
    assert instruction == EFFORT_INSTRUCTIONS[generation][effort]
    assert instruction.startswith(start)
    assert instruction.endswith("\n\n") == bool(start)


def test_effort_does_nothing_without_thinking():
    assert encode_messages(say(("u", "q")), effort="max") == encode_messages(say(("u", "q")))


def test_the_effort_instruction_is_not_in_the_loss(tokenizer):
    ids, mask = encode_with_mask(say(("u", "q"), ("a", "A", "r")), tokenizer, mode="thinking", effort="max")
    assert mask == [0] * (len(ids) - 4) + [1] * 4


@pytest.mark.parametrize(
    ("messages", "options", "named"),
    [
        ([], {}, "empty"),
        (say(("u", "q")), {"mode": "chat"}, "'chat'.*non-thinking, thinking"),
        (say(("u", "q")), {"generation": "0801"}, "'0801'.*preview, 0731"),
        (say(("u", "q")), {"effort": "low"}, "'low'.*preview has None, high, max"),
        (say(("u", "q")), {"effort": "most", "generation": "0731"}, "'most'.*None, low, high, max"),
        ([{"role": "developer", "content": "q"}], {}, "'developer'.*system, user, assistant"),
        ([{"role": "tool", "content": "q"}], {}, "'tool'.*tool calls"),
        ([{"role": "system", "content": "q", "tools": [{}]}], {}, "'tools'.*tool calls"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], {}, "'tool_calls'.*tool calls"),
        ([{"role": "user", "content": ["q"]}], {}, "'content' must be a string, not list"),
        (say(("u", "q")), {"effort": ["max"]}, r"unknown effort \['max'\]"),
        (say(("u", "q")), {"generation": ["preview"]}, r"unknown generation \['preview'\]"),
        ([{"role": "assistant", "content": "q", "weight": 0.5}], {}, "'weight' must be 0 or 1, not 0.5"),
    ],
)
def test_what_the_encoding_does_not_have_is_refused_by_name(messages, options, named):
    with pytest.raises(ValueError, match=named):
        encode_messages(messages, **options)
    with pytest.raises(ValueError, match=named):
        encode_with_mask(messages, make_tokenizer(), **options)


def test_a_tokenizer_without_the_control_tokens_is_refused_by_name():
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(ValueError, match="lacks control tokens.*think"):
        encode_with_mask(say(("u", "q")), plain)
