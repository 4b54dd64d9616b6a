"""What an assisted call returns besides ids: scores, states, statistics, the stream, and a cache that can go on."""

import copy

import pytest
import torch
from tiny_v4 import (
    ALWAYS,
    CSA,
    FAST,
    HCA,
    PATTERNS,
    SLIDING,
    VOCAB_SIZE,
    assert_same_state,
    greedy,
    random_ids,
    scripted_drafter,
    tiny_drafter,
    tiny_target,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DynamicCache, PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer
from transformers.generation import BaseStreamer

from hyperdflash.generation_hyperdflash import SpeculativeStats
from hyperdflash.target_hyperdflash import ResidualTap

PROMPT_LENGTH = 10


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def prompt():
    return random_ids(PROMPT_LENGTH)


@pytest.fixture(scope="module")
def plain(target, prompt):
    """What the target says, without a stop: prompt and 40 tokens."""
    return greedy(target, prompt, 40)


# --------------------------------------------------------------------------------------------------- scores and states


def stops(plain):
    """A length cut inside a block, the end of a block, an end-of-text id inside one."""
    return ({}, {"eos_token_id": int(plain[0, PROMPT_LENGTH + 6])}, {"eos_token_id": int(plain[0, PROMPT_LENGTH])})


@pytest.mark.slow
def test_one_row_of_scores_and_logits_for_each_new_token(target, prompt, plain):
    """https://github.com/huggingface/transformers/issues/21374"""
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for num_new in (12, 13, 14):
        for stop in stops(plain):
            want = greedy(target, prompt, num_new, repetition_penalty=1.1, **options, **stop)
            for name in FAST:
                drafter = scripted_drafter(target, want.sequences, PATTERNS[name])
                got = greedy(
                    target, prompt, num_new, repetition_penalty=1.1, assistant_model=drafter, **options, **stop
                )
                assert got.sequences.tolist() == want.sequences.tolist(), name
                for ours, plains in ((got.scores, want.scores), (got.logits, want.logits)):
                    assert len(ours) == len(plains) == got.sequences.shape[1] - PROMPT_LENGTH
                    assert all(row.shape == (1, VOCAB_SIZE) and row.dtype == torch.float32 for row in ours)
                    torch.testing.assert_close(ours, plains, atol=1e-4, rtol=0)


def test_transition_scores_of_an_assisted_run(target, prompt, plain):
    """https://github.com/huggingface/transformers/issues/21374"""
    options = {"return_dict_in_generate": True, "output_scores": True}
    want = greedy(target, prompt, 14, **options)
    got = greedy(target, prompt, 14, assistant_model=scripted_drafter(target, plain, 2), **options)
    scores = [
        target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (got, want)
    ]
    torch.testing.assert_close(*scores, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("stack", [(SLIDING, CSA, HCA), (SLIDING, SLIDING), (HCA, CSA)])
@pytest.mark.parametrize("length", [1, 6, 21])
def test_hidden_states_and_attentions_are_plain_generations(stack, length):
    """Every layer for every new token, without gaps, of plain generation's shapes and values.

    https://github.com/huggingface/transformers/pull/48081
    """
    target = tiny_target(stack)
    prompt = random_ids(length, seed=length)
    options = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
    want = greedy(target, prompt, 14, **options)
    for name, pattern in PATTERNS.items():
        for drafter in (
            scripted_drafter(target, want.sequences, pattern, block_size=6),
            scripted_drafter(target, want.sequences, pattern, context_source="hidden_layers", target_layer_ids=[0, 1]),
        ):
            got = greedy(target, prompt, 14, assistant_model=drafter, **options)
            for ours, plains in (
                (got.hidden_states, want.hidden_states),
                (got.attentions, want.attentions),
            ):
                assert len(ours) == len(plains) == 14, name
                torch.testing.assert_close(ours, plains, atol=1e-4, rtol=0)


def test_states_that_nobody_asked_for_are_neither_returned_nor_computed(target, plain):
    """A drafter's tap leaves no layer's output in the result, or on the way to it.

    https://github.com/huggingface/transformers/pull/48081
    """
    outputs = []
    handle = target.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        for drafter in (
            scripted_drafter(target, plain),
            tiny_drafter(target, context_source="hidden_layers", target_layer_ids=[0, 2]),
        ):
            got = greedy(target, plain[:, :33], 6, assistant_model=drafter, return_dict_in_generate=True)
            for name in ("hidden_states", "attentions", "scores", "logits"):
                assert getattr(got, name) is None
    finally:
        handle.remove()
    assert len(outputs) > 2
    assert all(output.hidden_states is None and output.attentions is None for output in outputs)
    assert outputs[0].logits.shape == (1, 1, VOCAB_SIZE)  # no logits of the prompt


def test_drafters_context_of_a_long_prompt_is_its_window(target):
    """What a drafter whose layers all slide cannot reach is not kept: 32 of 200 positions for a window of 32.

    https://github.com/huggingface/transformers/pull/48081
    """
    for layer_types, num_context in ((["sliding_attention"] * 2, 32), (["sliding_attention", "full_attention"], 200)):
        drafter = tiny_drafter(target, sliding_window=32, layer_types=layer_types)
        seen = []
        drafter.register_forward_pre_hook(lambda m, args, kwargs, seen=seen: seen.append(kwargs), with_kwargs=True)
        greedy(target, random_ids(200), 5, assistant_model=drafter)
        assert seen[0]["context_hidden_states"].shape == (1, num_context, 2, 32)
        assert seen[0]["position_ids"][0, [0, -1]].tolist() == [200 - num_context, 203]


def test_tap_of_a_prompt_in_chunks_keeps_its_tail_alone(target, monkeypatch):
    """What no window reaches is let go with the forward that made it."""
    ids = random_ids(60)
    with torch.no_grad(), ResidualTap(target) as whole, ResidualTap(target, last=8) as tail:
        cache = DynamicCache(config=target.config)
        for part in ids.split(7, dim=1):
            target(part, cache=cache, use_cache=True)
            kept = [x for parts in tail._outputs for x in parts]
            assert sum(x.untyped_storage().nbytes() for x in kept) <= (8 + 7) * 2 * 32 * 4
        assert torch.equal(tail.take()[:, -8:], whole.take()[:, -8:])
    taken, take = [], ResidualTap.take
    monkeypatch.setattr(ResidualTap, "take", lambda self: taken.append(take(self)) or taken[-1])
    want = greedy(target, ids, 12)
    drafter = tiny_drafter(target, sliding_window=8, block_size=7)
    for options in ({}, {"prefill_chunk_size": 7}):
        taken.clear()
        assert greedy(target, ids, 12, assistant_model=drafter, **options).tolist() == want.tolist()
        assert 8 <= taken[0].shape[1] < 8 + 7


def test_prompt_lookup_keeps_the_rows_that_a_rewind_can_need(target):
    """Of a long prompt: window, entries' rows and slices for the candidates of one round."""
    kept = []

    def watch(module, args, kwargs, output):
        layers = kwargs["cache"].layers
        rows = [x for layer in layers for record in getattr(layer, "_rows", {}).values() for x in record[0][1:]]
        slices = [x for layer in layers for record in getattr(layer, "_slices", {}).values() for x in record[0][1:]]
        kept.append(
            [max(x.untyped_storage().nbytes() // x[0, 0].nbytes for x in part) for part in (rows, slices or rows)]
            + [max(layer.keys.shape[-2] for layer in layers)]
        )

    handle = target.register_forward_hook(watch, with_kwargs=True)
    prompt = random_ids(11).repeat(1, 12)
    greedy(target, prompt, 2, prompt_lookup_num_tokens=3)
    handle.remove()
    rows, slices, keys = kept[0]
    assert rows <= 4 + 2 * 8
    assert slices <= 4
    assert keys <= 7 + 4


@pytest.mark.slow
@pytest.mark.parametrize("stack", [(SLIDING, CSA, HCA), (CSA, CSA)])
def test_prompt_lookup_rewinds_from_any_length(stack):
    target = tiny_target(stack, window=6, csa=3, hca=5)
    for length in range(2, 40, 5):
        prompt = random_ids(7).repeat(1, 6)[:, :length]
        want = greedy(target, prompt, 14)
        for number in (1, 2, 7):
            got = greedy(target, prompt, 14, prompt_lookup_num_tokens=number, max_matching_ngram_size=1)
            assert got.tolist() == want.tolist()


# ---------------------------------------------------------------------------------------------------------- statistics


def test_rounds_count_what_was_drafted_and_accepted(target, prompt, plain):
    """A round without drafts is none; drafts accepted behind an end-of-text id count; behind a length limit are none.

    https://github.com/huggingface/transformers/pull/46993
    """
    first = {token: i for i, token in reversed(list(enumerate(plain[0, PROMPT_LENGTH:].tolist())))}
    eos = plain[0, PROMPT_LENGTH + 2].item()
    assert first[eos] == 2  # the second draft of the first block
    for pattern, options, num_drafts, num_accepted in (
        (ALWAYS, {"max_new_tokens": 9}, [3, 3], [3, 3]),
        (ALWAYS, {"max_new_tokens": 8}, [3, 2], [3, 2]),
        (ALWAYS, {"max_new_tokens": 7}, [3, 1], [3, 1]),
        (ALWAYS, {"max_new_tokens": 6}, [3], [3]),
        (0, {"max_new_tokens": 4}, [2, 1], [0, 0]),
        (1, {"max_new_tokens": 6}, [3, 2], [1, 1]),
        (None, {"max_new_tokens": 6}, [], []),
        (lambda r: (None, 2)[r % 2], {"max_new_tokens": 9}, [3, 2], [2, 2]),
        (ALWAYS, {"max_new_tokens": 9, "eos_token_id": eos}, [3], [3]),
        (2, {"max_new_tokens": 9, "eos_token_id": eos}, [3], [2]),
        (1, {"max_new_tokens": 9, "eos_token_id": eos}, [3], [1]),
        # With a processor that looks at the prefix, nothing behind the stop is judged.
        (ALWAYS, {"max_new_tokens": 9, "eos_token_id": eos, "min_new_tokens": 1}, [3], [2]),
    ):
        drafter = scripted_drafter(target, plain, pattern)
        out = target.generate(
            prompt, do_sample=False, assistant_model=drafter, return_dict_in_generate=True, **options
        )
        assert (out.speculation.num_drafts, out.speculation.num_accepted) == (num_drafts, num_accepted), options


def test_figures_of_two_pooled_calls():
    """By hand: four rounds of 3, 3, 2 and 1 drafts, of which 3, 1, 0 and 1 were accepted."""
    stats = SpeculativeStats([3, 3], [3, 1])
    stats.extend(SpeculativeStats([2, 1], [0, 1]))
    assert stats.accepted_drafts == 5 / 4
    assert stats.acceptance_length == 9 / 4
    assert stats.per_position_acceptance_rates == [3 / 4, 1 / 4, 1 / 4]
    assert stats.conditional_acceptance_rates == [3 / 4, 1 / 2, 1.0]
    assert stats.to_dict() == {
        "acceptance_length": 9 / 4,
        "accepted_drafts": 5 / 4,
        "per_position_acceptance_rates": [3 / 4, 1 / 4, 1 / 4],
        "conditional_acceptance_rates": [3 / 4, 1 / 2, 1.0],
        "spec_decode_num_drafts": 4,
        "spec_decode_num_draft_tokens": 9,
        "spec_decode_num_accepted_tokens": 5,
        "spec_decode_num_accepted_tokens_per_pos": [3, 1, 1],
    }


def test_figures_without_a_round():
    assert SpeculativeStats().to_dict() == {
        "acceptance_length": 1.0,
        "accepted_drafts": 0.0,
        "per_position_acceptance_rates": [],
        "conditional_acceptance_rates": [],
        "spec_decode_num_drafts": 0,
        "spec_decode_num_draft_tokens": 0,
        "spec_decode_num_accepted_tokens": 0,
        "spec_decode_num_accepted_tokens_per_pos": [],
    }


# ----------------------------------------------------------------------------------------------------------- streaming


@pytest.fixture(scope="module")
def spelled(target):
    """A prompt and 20 tokens, of which new tokens 2 to 5 appear nowhere else."""
    sequence = greedy(target, random_ids(PROMPT_LENGTH, seed=7), 20)
    assert all(sequence[0].tolist().count(token) == 1 for token in sequence[0, PROMPT_LENGTH + 2 :][:4].tolist())
    return sequence


def tokenizer_with_a_split_character(halves):
    """A letter for each id, except two: one behind the other they are an "é"."""
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
    halves = dict(zip(halves, "Ã©", strict=True))  # the byte-level letters of 0xC3 and 0xA9
    vocab = {halves[i] if i in halves else next(letters): i for i in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("index", [2, 3, 4])
def test_streamed_text_is_the_decoded_result(target, spelled, skip_prompt, index):
    """With a character split over two tokens, to the length limit and to an end-of-text id inside a block.

    https://github.com/vllm-project/vllm/pull/45678
    """
    new = spelled[0, PROMPT_LENGTH:].tolist()
    tokenizer = tokenizer_with_a_split_character(new[index : index + 2])
    for options in ({}, {"eos_token_id": new[5]}):
        for name, pattern in PATTERNS.items():
            drafter = scripted_drafter(target, spelled, pattern)
            streamer = TextIteratorStreamer(tokenizer, skip_prompt=skip_prompt, timeout=10)
            out = greedy(target, spelled[:, :PROMPT_LENGTH], 20, assistant_model=drafter, streamer=streamer, **options)
            want = tokenizer.decode(out[0, PROMPT_LENGTH if skip_prompt else 0 :])
            assert "é" in want
            assert "".join(streamer) == want, name


class RecordingStreamer(BaseStreamer):
    def __init__(self):
        self.puts, self.ends = [], 0

    def put(self, value):
        assert not self.ends
        self.puts.append(value.flatten().tolist())

    def end(self):
        self.ends += 1


def test_stream_gets_the_prompt_once_then_kept_tokens_only_then_one_end(target, prompt, plain):
    """No rejected or cut-off token is ever put. https://github.com/vllm-project/vllm/pull/45678"""
    for stop in stops(plain):
        for num_new in (1, 2, 13):
            want = greedy(target, prompt, num_new, **stop)
            for name, pattern in PATTERNS.items():
                streamer = RecordingStreamer()
                drafter = scripted_drafter(target, plain, pattern)
                greedy(target, prompt, num_new, assistant_model=drafter, streamer=streamer, **stop)
                assert streamer.puts[0] == prompt[0].tolist()
                assert sum(streamer.puts, []) == want[0].tolist(), name
                assert all(streamer.puts)
                assert streamer.ends == 1


def test_streamer_may_ask_for_rounds_instead_of_tokens(target, prompt, plain):
    """A `put_round` method gets the new tokens, the drafts and how many were accepted."""
    rounds = []

    class RoundStreamer(RecordingStreamer):
        def put_round(self, new_ids, draft_ids, num_accepted):
            rounds.append((new_ids, draft_ids, num_accepted))

    new = plain[0, PROMPT_LENGTH:].tolist()
    streamer = RoundStreamer()
    greedy(target, prompt, 7, assistant_model=scripted_drafter(target, plain, 1), streamer=streamer)
    assert rounds == [
        (new[:1], [], 0),
        (new[1:3], [new[1], (new[2] + 1) % (VOCAB_SIZE - 1), new[3]], 1),
        (new[3:5], [new[3], (new[4] + 1) % (VOCAB_SIZE - 1), new[5]], 1),
        (new[5:7], [new[5]], 1),
    ]
    assert (streamer.puts, streamer.ends) == ([prompt[0].tolist()], 1)


def test_printing_streamer_works(target, prompt, plain, capsys):
    """https://github.com/vllm-project/vllm/pull/45678"""
    tokenizer = tokenizer_with_a_split_character([0, 1])
    streamer = TextStreamer(tokenizer, skip_prompt=True)
    out = greedy(target, prompt, 15, assistant_model=scripted_drafter(target, plain), streamer=streamer)
    assert capsys.readouterr().out == tokenizer.decode(out[0, PROMPT_LENGTH:]) + "\n"


# ----------------------------------------------------------------------------------------------------------- the cache


def fresh_cache(target, sequence):
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(sequence, cache=cache, use_cache=True)
    return cache


ENDINGS = {
    "end of text inside a block": ({"eos": 6, "max_new_tokens": 30}, ALWAYS),
    "end of text as the bonus token": ({"eos": 4, "max_new_tokens": 30}, ALWAYS),
    "length inside a block": ({"max_new_tokens": 12}, 2),
    "full accept": ({"max_new_tokens": 9}, ALWAYS),
    "nothing accepted": ({"max_new_tokens": 9}, 0),
    "one token": ({"max_new_tokens": 1}, ALWAYS),
}


@pytest.mark.slow
@pytest.mark.parametrize("ending", ENDINGS)
def test_second_turn_with_the_returned_cache(target, prompt, plain, ending):
    """The cache holds all but the last token and nothing rejected; assisted and plain turns follow each other at will.

    https://github.com/huggingface/transformers/pull/47597
    """
    options, pattern = ENDINGS[ending]
    options = dict(options)
    if "eos" in options:
        options["eos_token_id"] = int(plain[0, PROMPT_LENGTH + options.pop("eos")])
    options |= {"do_sample": False, "return_dict_in_generate": True}
    question = random_ids(5, seed=9)
    for first_assisted, second_assisted, third_assisted in ((1, 1, 0), (1, 0, 1), (0, 1, 1)):
        drafter = scripted_drafter(target, plain, pattern) if first_assisted else None
        out = target.generate(prompt, assistant_model=drafter, **options)
        if "eos_token_id" in options:
            assert out.sequences[0, -1] == options["eos_token_id"]
        for assisted in (second_assisted, third_assisted):
            assert out.cache.get_seq_length() == out.sequences.shape[1] - 1
            assert_same_state(out.cache, fresh_cache(target, out.sequences[:, :-1]))
            assert not any(layer.record_past for layer in out.cache.layers)
            sequence = torch.cat([out.sequences, question], dim=1)
            want = greedy(target, sequence, 11)
            drafter = scripted_drafter(target, want, pattern) if assisted else None
            out = greedy(target, sequence, 11, cache=out.cache, assistant_model=drafter, return_dict_in_generate=True)
            assert out.sequences.tolist() == want.tolist()


def test_second_turn_with_the_new_ids_only(target, prompt, plain):
    """Ids of the new turn, with a mask of the whole sequence, as plain `generate` takes them.

    https://github.com/huggingface/transformers/pull/47597
    """
    question = random_ids(5, seed=9)
    for assisted in (True, False):
        first = greedy(
            target, prompt, 12, assistant_model=scripted_drafter(target, plain, 2), return_dict_in_generate=True
        )
        sequence = torch.cat([first.sequences, question], dim=1)
        want = greedy(target, sequence, 11)
        num_cached = first.cache.get_seq_length()
        drafter = scripted_drafter(target, want, 2) if assisted else None
        got = greedy(
            target,
            sequence[:, num_cached:],
            11,
            cache=first.cache,
            attention_mask=torch.ones_like(sequence),
            assistant_model=drafter,
        )
        assert got.tolist() == want[:, num_cached:].tolist()


def test_cache_of_another_length_than_the_prompt_is_refused(target, prompt, plain):
    """One that is as long as the prompt, or longer. https://github.com/huggingface/transformers/pull/47597"""
    for length in (10, 15):
        drafter = scripted_drafter(target, plain)
        cache = fresh_cache(target, plain[:, :length])
        with pytest.raises(ValueError, match=f"holds {length} positions, but the prompt has 10 tokens"):
            greedy(target, prompt, 10, cache=cache, assistant_model=drafter)
        assert drafter.rounds == 0


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_users_cache_is_the_targets_alone(target, prompt, plain):
    """Under its new and its deprecated name; the drafter keeps its own.

    https://github.com/huggingface/transformers/pull/31644
    """
    for name in ("cache", "past_key_values"):
        for filled in (0, 1, 7, 9):
            cache = fresh_cache(target, plain[:, :filled]) if filled else DynamicCache(config=target.config)
            drafter = tiny_drafter(target)
            seen = []
            drafter.register_forward_pre_hook(
                lambda m, args, kwargs, seen=seen: seen.append(kwargs["cache"]), with_kwargs=True
            )
            got = greedy(target, prompt, 10, assistant_model=drafter, **{name: cache})
            assert got.tolist() == plain[:, :20].tolist()
            assert len(cache.layers) == target.config.num_hidden_layers
            assert_same_state(cache, fresh_cache(target, plain[:, :19]))
            assert len({id(own) for own in seen}) == 1
            assert seen[0] is not cache
            assert len(seen[0].layers) == drafter.config.num_hidden_layers


@pytest.mark.parametrize("stack", [(SLIDING, CSA, HCA), (CSA, CSA)])
def test_cache_is_a_fresh_one_after_every_round(stack):
    """Rounds take back 0 to 2 closed CSA entries and 0 or 1 HCA entries, and some propose nothing.

    https://github.com/spiritbuun/buun-llama-cpp/pull/74
    """
    target = tiny_target(stack)
    prompt = random_ids(11)
    want = greedy(target, prompt, 60)
    pattern = lambda r: (0, None, ALWAYS, 1, 5, 3, None, 8, 2)[r % 9]  # noqa: E731
    drafter = scripted_drafter(target, want, pattern, block_size=9)
    cache = DynamicCache(config=target.config)
    own, undone, before = drafter.draft, set(), {}

    def checking(request):
        position = request.position
        ids = want[:, :position]
        now = copy.deepcopy(cache)
        assert now.get_seq_length() == position
        assert_same_state(now, fresh_cache(target, ids))
        for rate in (4, 8):
            if before:
                undone.add((rate, before["end"] // rate - position // rate))
        drafts = own(request)
        before["end"] = position + 1 + len(drafts)
        return drafts

    drafter.draft = checking
    assert greedy(target, prompt, 60, cache=cache, assistant_model=drafter).tolist() == want.tolist()
    assert undone >= {(4, 0), (4, 1), (4, 2), (8, 0), (8, 1)}


@pytest.mark.slow
def test_storage_does_not_grow_over_three_hundred_tokens(target, prompt):
    """After each round the window, raw rows and record are bounded; only entries grow.

    https://github.com/huggingface/transformers/pull/47447
    """
    want = greedy(target, prompt, 300)
    cache = DynamicCache(config=target.config)
    drafter = scripted_drafter(target, want, lambda r: (ALWAYS, 3, ALWAYS, 0)[r % 4], block_size=7)
    own, draft_sizes = drafter.draft, []

    def checking(request):
        position = request.position
        for layer in cache.layers:
            assert layer.keys.shape[-2] <= 7 + 7
            assert layer.keys.untyped_storage().nbytes() <= (7 + 7) * 16 * 4
            for name, buffer in getattr(layer, "buffer_kv", {}).items():
                assert buffer.shape[1] <= layer.compress_rate - 1 + 7
                assert buffer.untyped_storage().nbytes() <= (layer.compress_rate + 7) * 2 * 16 * 4
                if position >= layer.compress_rate:
                    assert layer.compressed_kv[name].shape[1] == position // layer.compress_rate
            assert not getattr(layer, "_rows", {})
            assert not getattr(layer, "_slices", {})
        return own(request)

    drafter.draft = checking
    assert greedy(target, prompt, 300, cache=cache, assistant_model=drafter).tolist() == want.tolist()

    real = tiny_drafter(target, sliding_window=16)
    real.register_forward_hook(
        lambda m, args, kwargs, output: draft_sizes.append([layer.keys.shape[-2] for layer in output.cache.layers]),
        with_kwargs=True,
    )
    greedy(target, prompt, 60, assistant_model=real)
    assert max(max(sizes) for sizes in draft_sizes) <= 15 + 4 + 4
