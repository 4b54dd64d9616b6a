"""Assisted generation gives plain generation's ids: stops, lengths, prompts, processors, masks, precision, caches."""

import pytest
import torch
from audit import ForwardAudit
from live_memory import LiveMemory
from tiny_v4 import (
    ALWAYS,
    CSA,
    HCA,
    PATTERNS,
    SLIDING,
    VOCAB_SIZE,
    assert_lossless,
    greedy,
    random_ids,
    scripted_drafter,
    tiny_drafter,
    tiny_target,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

import hyperdflash.generation_hyperdflash as generation

PROMPT_LENGTH, NUM_PLAIN = 10, 40


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def prompt():
    return random_ids(PROMPT_LENGTH)


@pytest.fixture(scope="module")
def plain(target, prompt):
    """What the target says, without a stop: prompt and 40 tokens."""
    return greedy(target, prompt, NUM_PLAIN)


def unused_ids(sequence, count):
    return [token for token in range(VOCAB_SIZE) if token not in sequence[0].tolist()][:count]


def first_raw_choices(target, sequence):
    """A sequence whose token at each position is the target's unprocessed choice after the true tokens before it."""
    with torch.no_grad():
        chosen = target(sequence).logits.argmax(-1)
    return torch.cat([sequence[:, :1], chosen[:, :-1]], dim=1)


# --------------------------------------------------------------------------------------------------------------- stops


@pytest.mark.slow
@pytest.mark.parametrize("index", range(9))
def test_ends_at_the_first_end_of_text_token_wherever_it_stands_in_a_block(target, prompt, plain, index):
    """As the very first new token, inside a block, as its last draft, as the bonus token; the second of two ids.

    https://github.com/huggingface/transformers/pull/31301
    """
    eos = int(plain[0, PROMPT_LENGTH + index])
    (other,) = unused_ids(plain, 1)
    want = greedy(target, prompt, 20, eos_token_id=eos)
    assert want[0, -1] == eos
    assert want.shape[1] <= PROMPT_LENGTH + index + 1
    for ids in (eos, [other, eos]):
        assert_lossless(target, prompt, want, plain, max_new_tokens=20, eos_token_id=ids)


def test_end_of_text_id_of_the_targets_generation_config_counts(target, prompt, plain, monkeypatch):
    """https://github.com/huggingface/transformers/pull/31301"""
    monkeypatch.setattr(target.generation_config, "eos_token_id", int(plain[0, PROMPT_LENGTH + 2]))
    want = greedy(target, prompt, 20)
    assert want.shape[1] < PROMPT_LENGTH + 20
    assert_lossless(target, prompt, want, plain, max_new_tokens=20)


def test_runs_to_the_length_limit_without_an_end_of_text_id(target, prompt, plain):
    """https://github.com/huggingface/transformers/pull/31301"""
    assert_lossless(target, prompt, plain[:, : PROMPT_LENGTH + 20], plain, max_new_tokens=20)
    unused = unused_ids(plain, 2)
    assert_lossless(target, prompt, plain[:, : PROMPT_LENGTH + 20], plain, max_new_tokens=20, eos_token_id=unused)


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [2, 3, 4, 7])
def test_length_limit_holds_for_every_block_size(target, prompt, plain, block_size):
    """Exactly the tokens asked for, through `max_new_tokens`, `max_length` and a criterion of the user's: at the edges
    of a block and of two.

    https://github.com/huggingface/transformers/pull/48981 https://github.com/huggingface/transformers/pull/46993
    """
    for num_new in (block_size - 1, block_size, block_size + 1, 2 * block_size):
        want = plain[:, : PROMPT_LENGTH + num_new]
        patterns = ("always", "first two", "never") if num_new % 3 else ("always", "mixed")
        assert_lossless(target, prompt, want, plain, patterns=patterns, block_size=block_size, max_new_tokens=num_new)
    for num_new in (1, 6):
        want = plain[:, : PROMPT_LENGTH + num_new]
        limit = PROMPT_LENGTH + num_new
        options = {"patterns": ("always", "mixed"), "block_size": block_size}
        criteria = StoppingCriteriaList([MaxLengthCriteria(limit)])
        assert_lossless(target, prompt, want, plain, max_length=limit, **options)
        assert_lossless(target, prompt, want, plain, max_new_tokens=20, stopping_criteria=criteria, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit",
    [{"max_new_tokens": 10**12}, {"max_length": int(1e30)}, {"max_length": 1e30}, {"max_length": float("inf")}],
    ids=str,
)
def test_a_limit_without_an_end_takes_no_memory(target, prompt, limit):
    """As tokenizers without a limit give: plain decoding stops at the end of text, and so do we."""
    long = greedy(target, prompt, 60)
    new = long[0, PROMPT_LENGTH:].tolist()
    eos = next(token for token in reversed(new) if new.index(token) > 10)
    want = target.generate(prompt, do_sample=False, eos_token_id=eos, **limit)
    drafter = scripted_drafter(target, long, 2)
    with LiveMemory() as memory:
        got = target.generate(prompt, do_sample=False, eos_token_id=eos, assistant_model=drafter, **limit)
    assert got.tolist() == want.tolist()
    assert memory.peak < 10**6


def test_buffers_grow_with_the_text(target, prompt, monkeypatch):
    monkeypatch.setattr(generation, "MIN_ROOM", 1)
    plain = greedy(target, prompt, 40)
    for pattern in PATTERNS.values():
        got = greedy(target, prompt, 40, assistant_model=scripted_drafter(target, plain, pattern))
        assert got.tolist() == plain.tolist()


def test_a_limit_between_two_lengths_ends_at_the_longer_as_in_plain_decoding(target, prompt, plain):
    for limit in (PROMPT_LENGTH + 5.5, PROMPT_LENGTH + 6.0):
        want = target.generate(prompt, do_sample=False, max_length=limit)
        assert want.shape[1] == PROMPT_LENGTH + 6
        assert_lossless(target, prompt, want, plain, max_length=limit)


def test_budgets_of_one_and_two_tokens_draft_nothing(target, prompt, plain):
    """The last token is always the target's own, so there is nothing to draft and nothing to count.

    https://github.com/huggingface/transformers/pull/46993
    """
    for num_new, rounds in ((1, 0), (2, 0), (3, 1)):
        drafter = scripted_drafter(target, plain)
        out = greedy(target, prompt, num_new, assistant_model=drafter, return_dict_in_generate=True)
        assert out.sequences.tolist() == plain[:, : PROMPT_LENGTH + num_new].tolist()
        assert drafter.rounds == rounds
        assert out.speculation.num_drafts == out.speculation.num_accepted == [1] * rounds


class EndsWith(StoppingCriteria):
    """Looks at nothing but the last tokens, and remembers the lengths it was asked about."""

    def __init__(self, *tail):
        self.tail, self.lengths = list(tail), []

    def __call__(self, input_ids, scores, **kwargs):
        self.lengths.append(input_ids.shape[1])
        hit = input_ids[0, -len(self.tail) :].tolist() == self.tail
        return torch.full((input_ids.shape[0],), hit, dtype=torch.bool)


@pytest.mark.parametrize("index", [0, 1, 2, 3, 4, 5])
def test_criterion_on_the_last_tokens_sees_every_token_in_order(target, prompt, plain, index):
    """Two tokens inside a block, at its edge, and across two blocks.

    https://github.com/huggingface/transformers/issues/26959
    """
    pair = plain[0, PROMPT_LENGTH + index : PROMPT_LENGTH + index + 2].tolist()
    criterion = EndsWith(*pair)
    want = greedy(target, prompt, 20, stopping_criteria=StoppingCriteriaList([criterion]))
    assert want.shape[1] < PROMPT_LENGTH + 20
    for name, pattern in PATTERNS.items():
        assisted = EndsWith(*pair)
        drafter = scripted_drafter(target, plain, pattern)
        got = greedy(target, prompt, 20, assistant_model=drafter, stopping_criteria=StoppingCriteriaList([assisted]))
        assert got.tolist() == want.tolist(), name
        assert assisted.lengths == criterion.lengths, name


def test_criterion_that_never_fires_does_not_shorten_the_rounds(target, prompt, plain):
    """https://github.com/alipay/PainlessInferenceAcceleration/issues/28"""
    rounds = []
    for criteria in (None, StoppingCriteriaList([EndsWith(-1)])):
        drafter = scripted_drafter(target, plain)
        out = greedy(
            target, prompt, 25, assistant_model=drafter, stopping_criteria=criteria, return_dict_in_generate=True
        )
        assert out.sequences.tolist() == plain[:, : PROMPT_LENGTH + 25].tolist()
        rounds.append(out.speculation.num_accepted)
    assert rounds == [[3] * 6, [3] * 6]


def test_time_limit_stops_as_in_plain_generation(target, prompt, plain):
    want = greedy(target, prompt, 20, max_time=0.0)
    assert want.shape[1] == PROMPT_LENGTH + 1
    assert_lossless(target, prompt, want, plain, max_new_tokens=20, max_time=0.0)


def letters_tokenizer():
    """One letter for each of the 64 ids."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+/"
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("index", [0, 1, 2, 3, 5])
def test_stop_string_inside_an_accepted_block_ends_the_text_there(target, prompt, plain, index):
    """Of one token and of three, which may lie in two blocks."""
    tokenizer = letters_tokenizer()
    for length in (1, 3):
        tokens = plain[0, PROMPT_LENGTH + index : PROMPT_LENGTH + index + length]
        options = {"stop_strings": [tokenizer.decode(tokens)], "tokenizer": tokenizer}
        want = greedy(target, prompt, 20, **options)
        assert want.shape[1] < PROMPT_LENGTH + 20
        assert tokenizer.decode(want[0]).endswith(options["stop_strings"][0])
        assert_lossless(target, prompt, want, plain, max_new_tokens=20, **options)


# ------------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 33])
def test_short_long_and_window_edge_prompts(target, length):
    """A single token, two, around the window of 8, and four windows.

    https://github.com/huggingface/transformers/issues/30042
    """
    prompt = random_ids(length, seed=length)
    want = greedy(target, prompt, 40)
    for block_size in (2, 4, 7):
        drafter = scripted_drafter(target, want, 1, block_size=block_size)
        assert greedy(target, prompt, 40, assistant_model=drafter).tolist() == want.tolist()


@pytest.mark.slow
def test_random_prompts_with_the_drafters_own_drafts(target):
    """fp32 on the CPU: identical ids. https://github.com/huggingface/transformers/issues/30413"""
    drafter = tiny_drafter(target, block_size=5)
    for seed in range(25):
        prompt = random_ids(1 + seed, seed=seed)
        assert greedy(target, prompt, 8, assistant_model=drafter).tolist() == greedy(target, prompt, 8).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stack", "window"), [((SLIDING, SLIDING), 8), ((CSA, CSA), 8), ((HCA, HCA), 8), ((HCA, SLIDING, CSA), 2)]
)
def test_every_layer_type_alone_and_a_window_of_two(stack, window):
    """https://github.com/huggingface/transformers/pull/45643"""
    target = tiny_target(stack, window=window)
    prompt = random_ids(13)
    want = greedy(target, prompt, 30)
    assert_lossless(target, prompt, want, max_new_tokens=30, block_size=6)


def test_prefill_in_chunks(target, plain):
    """The residuals of all chunks reach the drafter: its first drafts do not depend on the chunks."""
    prompt = plain[:, :33]
    want = greedy(target, prompt, 12)
    for chunk in (5, 33, 50):
        assert_lossless(target, prompt, want, max_new_tokens=12, prefill_chunk_size=chunk)
    first = []
    for options in ({}, {"prefill_chunk_size": 5}):
        drafter = tiny_drafter(target)
        seen = spy(drafter)
        greedy(target, prompt, 3, assistant_model=drafter, **options)
        first.append(seen[0]["context_hidden_states"])
    torch.testing.assert_close(*first, atol=1e-4, rtol=0)


# ---------------------------------------------------------------------------------------------------- masks, positions


def spy(drafter):
    """Keyword arguments of every forward of a drafter, as they come."""
    seen = []
    drafter.register_forward_pre_hook(lambda module, args, kwargs: seen.append(dict(kwargs)), with_kwargs=True)
    return seen


def left_padded(prompt, pads):
    mask = torch.nn.functional.pad(torch.ones_like(prompt), (pads, 0))
    return torch.nn.functional.pad(prompt, (pads, 0), value=5), mask


@pytest.mark.slow
@pytest.mark.parametrize("stack", [(SLIDING, SLIDING), (SLIDING, CSA, HCA)])
def test_mask_absent_all_ones_or_with_left_padding(stack):
    """Compressed layers treat a block and a step differently under padding: there, nothing is drafted.

    https://github.com/huggingface/transformers/pull/26892 https://github.com/huggingface/transformers/issues/45938
    """
    target = tiny_target(stack)
    prompt = random_ids(6)
    want = greedy(target, prompt, 20)
    assert_lossless(target, prompt, want, max_new_tokens=20)
    assert_lossless(target, prompt, want, max_new_tokens=20, attention_mask=torch.ones_like(prompt))
    for pads in (1, 3, 9):
        padded, mask = left_padded(prompt, pads)
        want = greedy(target, padded, 20, attention_mask=mask)
        assert_lossless(target, padded, want, max_new_tokens=20, attention_mask=mask, pads=pads)
        drafter = scripted_drafter(target).follow(want, ALWAYS, pads=pads)
        greedy(target, padded, 20, attention_mask=mask, assistant_model=drafter)
        assert drafter.rounds == (5 if len(stack) == 2 else 0)


def test_mask_inferred_from_pad_tokens_is_used():
    """As plain `generate` does with a pad id that is no end-of-text id and no mask.

    https://github.com/huggingface/transformers/pull/26892
    """
    target = tiny_target()
    prompt, _ = left_padded(random_ids(6) % 5, 4)
    options = {"pad_token_id": 5, "eos_token_id": 62}
    want = greedy(target, prompt, 20, **options)
    assert want.tolist() != greedy(target, prompt, 20).tolist()
    assert_lossless(target, prompt, want, max_new_tokens=20, pads=4, **options)


def test_drafter_sees_neither_pads_nor_shifted_positions():
    """Without a compressor, padded and unpadded runs give the drafter the same context, positions and drafts.

    https://github.com/unslothai/unsloth/pull/4078 https://github.com/huggingface/transformers/pull/26892
    """
    target = tiny_target((SLIDING, SLIDING))
    prompt = random_ids(6)
    runs = []
    for pads in (0, 3):
        padded, mask = left_padded(prompt, pads)
        drafter = tiny_drafter(target)
        seen, drafts = spy(drafter), []
        record_drafts(drafter, drafts)
        out = greedy(target, padded, 12, attention_mask=mask, assistant_model=drafter)
        runs.append((seen, drafts, out[0, pads:].tolist()))
    (seen, drafts, ids), (seen_padded, drafts_padded, ids_padded) = runs
    assert ids == ids_padded
    assert seen[0]["position_ids"].tolist() == [list(range(6 + 4))]  # the prompt from 0, and the block after it
    for ours, padded in zip(seen, seen_padded, strict=True):
        assert ours["position_ids"].tolist() == padded["position_ids"].tolist()
        torch.testing.assert_close(ours["context_hidden_states"], padded["context_hidden_states"], atol=1e-4, rtol=0)
    for ours, padded in zip(drafts, drafts_padded, strict=True):
        torch.testing.assert_close(ours, padded, atol=1e-4, rtol=0)


def record_drafts(drafter, drafts):
    """Append the logits of every block to `drafts`."""
    own = drafter.draft
    drafter.draft = lambda *args, **kwargs: drafts.append(own(*args, **kwargs)) or drafts[-1]


def test_position_ids_of_the_user_are_kept(target, prompt):
    """Also where they do not count the tokens; the drafter's continue them, if it is asked at all."""
    position_ids = torch.arange(5, 5 + PROMPT_LENGTH)[None]
    for model, rounds in ((tiny_target((SLIDING, SLIDING)), 14), (target, 0)):
        want = greedy(model, prompt, 15, position_ids=position_ids)
        drafter = tiny_drafter(model)
        seen = spy(drafter)
        got = greedy(model, prompt, 15, position_ids=position_ids, assistant_model=drafter)
        assert got.tolist() == want.tolist()
        assert bool(seen) == bool(rounds)
        if seen:
            assert seen[0]["position_ids"][0, [0, -1]].tolist() == [5, 5 + PROMPT_LENGTH + 3]
        assert_lossless(model, prompt, want, max_new_tokens=15, position_ids=position_ids, pads=-5)


# ------------------------------------------------------------------------------------------------------------ drafters


@pytest.mark.parametrize(
    "options",
    [
        {"reducer": "hc_gate"},
        {"reducer": "hc_gate", "reducer_path_norm": False},
        {"reducer": "mean"},
        {"reducer": "fc"},
        {"context_source": "hidden_layers", "target_layer_ids": [1]},
        {"context_source": "hidden_layers", "target_layer_ids": [0, 2]},
        {"context_source": "hidden_layers", "target_layer_ids": [0, 1, 2]},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
        {"sliding_window": 5},
    ],
    ids=str,
)
def test_every_kind_of_drafter_drafts_as_one_pass_over_its_whole_context(target, options):
    """What arrives round by round through the cache gives the drafts of one forward over all residuals so far.

    The residuals are those that the target's own forward reports.
    """
    prompt = random_ids(19)
    want = greedy(target, prompt, 14)
    residuals = target_residuals(target, want, options)
    drafter = tiny_drafter(target, **options)
    own, checked = drafter.draft, []

    @torch.no_grad()
    def checking(request):
        got, noise_ids = own(request), request.noise_ids
        position, num_drafts = request.position, request.num_drafts
        ids = torch.nn.functional.pad(noise_ids[:, :1], (0, 3), value=drafter.config.mask_token_id)
        assert torch.equal(noise_ids, ids)
        hidden = drafter(target.get_input_embeddings()(ids), residuals[:, :position]).last_hidden_state
        torch.testing.assert_close(got, target.lm_head(hidden)[0, 1 : 1 + num_drafts], atol=1e-4, rtol=0)
        checked.append(position)
        right = torch.full_like(got, float("-inf"))  # accept some drafts, so that context arrives in uneven parts
        chosen = want[0, position + 1 : position + 1 + num_drafts].clone()
        chosen[len(checked) % 3 :] = 0
        return right.index_put((torch.arange(num_drafts), chosen), torch.tensor(0.0))

    drafter.draft = checking
    assert greedy(target, prompt, 14, assistant_model=drafter).tolist() == want.tolist()
    assert len(checked) >= 4


@torch.no_grad()
def target_residuals(target, sequence, options):
    """`(1, T, m, L * D)` from hooks of this test's own on one forward over the whole sequence."""
    found = []
    if options.get("context_source") == "hidden_layers":
        modules = [target.model.layers[i] for i in options["target_layer_ids"]]
        handles = [m.register_forward_hook(lambda module, args, output: found.append(output)) for m in modules]
    else:
        hc_head = target.model.hc_head
        handles = [hc_head.register_forward_pre_hook(lambda module, args: found.append(args[0]))]
    target(sequence)
    for handle in handles:
        handle.remove()
    return torch.cat(found, dim=-1)


def test_one_drafter_for_many_prompts_and_targets_starts_fresh_each_time(target):
    """Nothing of an earlier prompt or target is left in the drafts.

    https://github.com/Anbeeld/beellama.cpp/issues/47
    """
    other = tiny_target(seed=5)
    one = tiny_drafter(target)
    drafts = []
    record_drafts(one, drafts)
    a, b = random_ids(20, seed=1), random_ids(3, seed=2)
    for model, prompt in ((target, a), (target, b), (target, a), (other, a), (target, b)):
        drafts.clear()
        got = greedy(model, prompt, 10, assistant_model=one)
        assert got.tolist() == greedy(model, prompt, 10).tolist()
        fresh, expected = tiny_drafter(target), []
        record_drafts(fresh, expected)
        greedy(model, prompt, 10, assistant_model=fresh)
        assert len(drafts) == len(expected)
        assert all(torch.equal(x, y) for x, y in zip(drafts, expected, strict=True))


def test_two_drafters_one_after_another_on_one_target(target, prompt, plain):
    """https://github.com/Anbeeld/beellama.cpp/issues/47"""
    first, second = scripted_drafter(target, plain, block_size=6), scripted_drafter(target, plain, 1, block_size=3)
    last = tiny_drafter(target, context_source="hidden_layers", target_layer_ids=[0, 1])
    for drafter in (first, second, last, first):
        assert greedy(target, prompt, 20, assistant_model=drafter).tolist() == plain[:, :30].tolist()


def test_fewer_drafts_than_the_block_has(target, prompt, plain, caplog):
    """`num_assistant_tokens` caps what a round verifies; more than the block drafts is capped, with a warning.

    https://github.com/huggingface/transformers/issues/40739
    """
    lengths = []
    handle = target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        for asked, most in ((0, 0), (1, 1), (2, 2), (6, 6), (7, 6), (20, 6), (None, 6)):
            lengths.clear()
            caplog.clear()
            options = {} if asked is None else {"num_assistant_tokens": asked}
            drafter = scripted_drafter(target, plain, block_size=7)
            got = greedy(target, prompt, 16, assistant_model=drafter, **options)
            assert got.tolist() == plain[:, :26].tolist()
            assert max(lengths[1:]) == most + 1
            assert ("num_assistant_tokens=7 is capped at 6" in caplog.text) == (asked == 7)
    finally:
        handle.remove()


# ---------------------------------------------------------------------------------------------------------- processors

OPTIONS = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "bans of repeated pairs": {"no_repeat_ngram_size": 2},
    "bans of repeated triples": {"no_repeat_ngram_size": 3},
    "encoder repetition penalty": {"encoder_repetition_penalty": 1.5},
    "both": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
    "renormalised": {"repetition_penalty": 1.2, "renormalize_logits": True},
    "sequence bias": {"sequence_bias": {(40,): 4.0, (17, 40): -8.0}},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(int(ids[-1]) % 7, VOCAB_SIZE, 3))},
    "no invalid values": {"remove_invalid_values": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_processors_change_assisted_as_plain_output(target, prompt, name):
    """Also when the drafts are the target's unprocessed choices.

    https://github.com/intel/ipex-llm/pull/9963
    """
    options = OPTIONS[name]
    want = greedy(target, prompt, 24, **options)
    assert_lossless(target, prompt, want, max_new_tokens=24, **options)
    raw = first_raw_choices(target, want)
    assert_lossless(target, prompt, want, raw, patterns=("always", "mixed"), max_new_tokens=24, **options)


@pytest.mark.slow
def test_banned_and_suppressed_tokens(target, prompt, plain):
    """One that the target would say, a pair, and one at the start. https://github.com/intel/ipex-llm/pull/9963"""
    said = plain[0, PROMPT_LENGTH:].tolist()
    for options in (
        {"bad_words_ids": [[said[2]], said[4:6]]},
        {"suppress_tokens": [said[1], said[3]]},
        {"begin_suppress_tokens": [said[0]]},
    ):
        want = greedy(target, prompt, 20, **options)
        assert want.tolist() != plain[:, :30].tolist()
        for sequence in (plain, first_raw_choices(target, want)):
            assert_lossless(target, prompt, want, sequence, patterns=("always", "mixed"), max_new_tokens=20, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 10},
        {"min_length": PROMPT_LENGTH + 10},
        {"min_new_tokens": 5, "forced_eos_token_id": 7},
        {"exponential_decay_length_penalty": (4, 1.7)},
        {"processor": True},
    ],
    ids=str,
)
def test_minimum_length_where_end_of_text_would_win_earlier(target, prompt, plain, options):
    """Through options and through a processor object, and the user's list holds the same objects afterwards.

    https://github.com/huggingface/transformers/pull/30263
    """
    eos = int(plain[0, PROMPT_LENGTH + 3])
    options = {**options, "eos_token_id": eos}
    user_list = LogitsProcessorList()
    if options.pop("processor", False):
        user_list.append(MinLengthLogitsProcessor(PROMPT_LENGTH + 10, eos))
    objects = list(user_list)
    want = greedy(target, prompt, 20, logits_processor=user_list, **options)
    early = greedy(target, prompt, 20, eos_token_id=eos)
    assert want.shape[1] > early.shape[1] or "exponential_decay_length_penalty" in options
    for sequence in (want, plain):
        assert_lossless(target, prompt, want, sequence, max_new_tokens=20, logits_processor=user_list, **options)
    assert list(user_list) == objects


class Recorder(LogitsProcessor):
    """Remembers the prefixes it was called with."""

    def __init__(self):
        self.prefixes = []

    def __call__(self, input_ids, scores):
        assert scores.shape == (1, VOCAB_SIZE)
        self.prefixes.append(input_ids[0].tolist())
        return scores


def test_processors_are_called_once_a_token_with_the_true_prefix(target, prompt, plain):
    """No call sees a rejected draft, a stale prefix, or a token behind the stop.

    https://github.com/ml-explore/mlx-lm/issues/1175
    """
    eos = int(plain[0, PROMPT_LENGTH + 9])
    for options in ({}, {"eos_token_id": eos}):
        recorder = Recorder()
        want = greedy(target, prompt, 18, logits_processor=LogitsProcessorList([recorder]), **options)
        for name, pattern in PATTERNS.items():
            assisted = Recorder()
            drafter = scripted_drafter(target, plain, pattern, block_size=6)
            got = greedy(
                target,
                prompt,
                18,
                logits_processor=LogitsProcessorList([assisted]),
                assistant_model=drafter,
                **options,
            )
            assert got.tolist() == want.tolist(), name
            assert assisted.prefixes == recorder.prefixes, name


class CountsCalls(LogitsProcessor):
    """A grammar that counts tokens by its calls: every third call it allows a few ids only."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls % 3 == 0:
            scores[:, 9:] = -float("inf")
        return scores


class ForbidsAfterFive(LogitsProcessor):
    """Remembers the longest prefix seen, and forbids a token once it has seen five new ones."""

    def __init__(self, forbidden, prompt_length):
        self.forbidden, self.prompt_length, self.longest = forbidden, prompt_length, 0

    def __call__(self, input_ids, scores):
        self.longest = max(self.longest, input_ids.shape[1])
        if self.longest >= self.prompt_length + 5:
            scores[:, self.forbidden] = -float("inf")
        return scores


@pytest.mark.slow
def test_processors_that_keep_state_work(target, prompt, plain):
    """https://github.com/lmstudio-ai/mlx-engine/pull/112"""
    forbidden = int(plain[0, PROMPT_LENGTH + 7])

    def counts():
        return {"logits_processor": LogitsProcessorList([CountsCalls()])}

    def forbids():
        return {"logits_processor": LogitsProcessorList([ForbidsAfterFive(forbidden, PROMPT_LENGTH)])}

    for fresh in (counts, forbids):
        want = greedy(target, prompt, 24, **fresh())
        assert want.tolist() != plain[:, :34].tolist()
        for sequence in (want, plain):
            assert_lossless(target, prompt, want, sequence, max_new_tokens=24, fresh=fresh)


def test_processor_that_writes_into_its_scores_leaves_the_raw_logits_alone(target, prompt):
    options = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    want = greedy(target, prompt, 12, logits_processor=LogitsProcessorList([CountsCalls()]), **options)
    drafter = scripted_drafter(target, want.sequences, 2)
    got = greedy(
        target, prompt, 12, logits_processor=LogitsProcessorList([CountsCalls()]), assistant_model=drafter, **options
    )
    assert got.sequences.tolist() == want.sequences.tolist()
    torch.testing.assert_close(got.scores, want.scores, atol=1e-4, rtol=0)
    with torch.no_grad():
        raw = target(want.sequences).logits[:, PROMPT_LENGTH - 1 : -1]
    torch.testing.assert_close(torch.stack(got.logits, dim=1), raw, atol=1e-4, rtol=0)


# ----------------------------------------------------------------------------------------------------------- precision

# https://github.com/huggingface/transformers/issues/30413 https://github.com/huggingface/transformers/issues/40513


def audited(target, prompt, drafter, num_new=16):
    """Assisted greedy decoding, held against the target's own forwards of the same shapes."""
    with ForwardAudit(target) as audit:
        out = greedy(target, prompt, num_new, assistant_model=drafter, return_dict_in_generate=True)
    audit.check(out)
    return out.sequences


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")], ids="-".join)
def test_low_precision_keeps_what_the_block_that_verified_it_says(dtypes):
    """Every token is the argmax of its row in the forward that verified it, and the cache is what was written there:
    exactly, where the ids of single steps may differ. An fp32 target gives those too."""
    target_dtype, drafter_dtype = ({"bf16": torch.bfloat16, "fp32": torch.float32}[name] for name in dtypes)
    target = tiny_target().to(target_dtype)
    for seed in range(3):
        prompt = random_ids(5 + 5 * seed, seed=seed)
        plain = greedy(target, prompt, 16)
        scripted = scripted_drafter(target, plain, lambda r: (ALWAYS, 0, 2)[r % 3])
        for drafter in (tiny_drafter(target), scripted):
            got = audited(target, prompt, drafter.to(drafter_dtype))
            if target_dtype == torch.float32:
                assert got.tolist() == plain.tolist()


def test_the_audit_sees_a_wrong_token_and_a_wrong_cache(target, prompt, plain):
    for fault in ("token", "cache"):
        with ForwardAudit(target) as audit:
            drafter = scripted_drafter(target, plain, 2)
            out = greedy(target, prompt, 16, assistant_model=drafter, return_dict_in_generate=True)
        if fault == "token":
            out.sequences[0, -3] = (out.sequences[0, -3] + 1) % 60
        else:
            out.cache.layers[1].overlap_kv["compressor"][0, 0, 0] += 1e-3
        with pytest.raises(AssertionError):
            audit.check(out)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="two devices are needed: a GPU beside the CPU")
def test_drafter_and_target_on_different_devices():
    """https://github.com/huggingface/transformers/pull/47877"""
    prompt = random_ids(10)
    for target_device, drafter_device in (("cuda", "cpu"), ("cpu", "cuda")):
        target = tiny_target().to(target_device)
        drafter = tiny_drafter(target).to(drafter_device)
        got = audited(target, prompt.to(target_device), drafter, 20)
        assert got.device.type == target_device


# ------------------------------------------------------------------------------------------------------------ sampling


def test_sampling_with_a_drafter_is_seeded_and_keeps_to_the_filters(target, prompt, plain):
    """The same seed gives the same ids; with one candidate left sampling is greedy, whatever is drafted."""
    for pattern in PATTERNS.values():
        drafter = scripted_drafter(target, plain, pattern)
        got = target.generate(prompt, do_sample=True, top_k=1, max_new_tokens=20, assistant_model=drafter)
        assert got.tolist() == plain[:, :30].tolist()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        drafter = tiny_drafter(target)
        torch.manual_seed(3)
        runs.append(target.generate(prompt, do_sample=True, max_new_tokens=20, assistant_model=drafter).tolist())
    assert runs[0] == runs[1] != plain[:, :30].tolist()


def test_sampling_counts_end_of_text_and_length(target, prompt, plain):
    """https://github.com/huggingface/transformers/pull/31301"""
    eos = list(range(0, VOCAB_SIZE, 4))
    for seed in range(30):
        torch.manual_seed(seed)
        drafter = scripted_drafter(target, plain, lambda r: (0, None, ALWAYS)[r % 3])
        out = target.generate(prompt, do_sample=True, max_new_tokens=6, assistant_model=drafter, eos_token_id=eos)
        new = out[0, PROMPT_LENGTH:].tolist()
        assert not set(new[:-1]) & set(eos)
        assert new[-1] in eos or len(new) == 6
