"""The trace: what it says of each round is what happened, it changes nothing, and its page holds up in a browser."""

import base64
import dataclasses
import io
import itertools
import json
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from chromium import CHROMIUM, Page
from PIL import Image
from tiny_v4 import greedy, random_ids, scripted_drafter, tiny_drafter, tiny_target
from transformers import AutoTokenizer

from hyperdflash.__main__ import main
from hyperdflash.generation import comparison
from hyperdflash.generation.demo import TINY
from hyperdflash.generation.mtp import DeepseekV4MTP
from hyperdflash.generation.trace import TokenTexts, as_page, check_trace_path, write_trace
from hyperdflash.generation.trace_recorder import ACCEPTED, BEHIND, CUT, OWN, REJECTED, RoundRecorder

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: on Debian, apt-get install chromium")
PROMPT = random_ids(9)
HOSTILE = "</script><script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\"> & <b>bold"


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY / "target")


def record(target, drafter, tokenizer, **kwargs):
    """The recorder of one call, and the call's output."""
    options = {"do_sample": False, "max_new_tokens": 16, "return_dict_in_generate": True, **kwargs}
    torch.manual_seed(0)
    with RoundRecorder(target, drafter, tokenizer) as recorder:
        output = target.generate(PROMPT, assistant_model=drafter, **options)
    return recorder, output


def states(recorder) -> list[list[str]]:
    return [[slot.state for slot in one.slots] for one in recorder.rounds]


@torch.no_grad()
def next_probs(target, sequence: list[int]) -> torch.Tensor:
    """What the target thinks of the next token, from a forward of its own without any cache."""
    return target(torch.tensor([sequence]), use_cache=False).logits[0, -1].softmax(-1)


# -------------------------------------------------------------------------------------------------------- what it says


def test_a_round_is_told_as_the_script_dictated_it(target, tokenizer):
    """Two right drafts, then a wrong one, then right ones that nobody looks at; 1 + 3 + 3 + ... tokens."""
    want = greedy(target, PROMPT, 16)
    recorder, output = record(target, scripted_drafter(target, want, 2, block_size=6), tokenizer)
    assert output.sequences.tolist() == want.tolist()
    assert states(recorder)[:3] == [[OWN], *[[ACCEPTED, ACCEPTED, REJECTED, BEHIND, BEHIND, OWN]] * 2]
    first = recorder.rounds[1].slots
    assert [slot.position for slot in first] == [10, 11, 12, 13, 14, 12]
    assert first[0].token_id == want[0, 10]
    assert first[2].token_id == (want[0, 12] + 1) % 63
    assert first[5].token_id == want[0, 12]
    assert recorder.stats == output.speculation
    assert recorder.prompt_ids + recorder.new_ids == want[0].tolist()


@pytest.mark.parametrize("kind", ["block", "one after the other"])
def test_greedy_probabilities_are_those_of_forwards_of_their_own(target, tokenizer, kind, monkeypatch):
    """Of the target from a forward without cache, of the drafter from what it handed to the loop."""
    drafter = tiny_drafter(target, block_size=4) if kind == "block" else DeepseekV4MTP(target.config, 3).eval()
    seen, propose = [], drafter.propose

    def spy(*args):
        propose(*args[:-1], lambda logits: seen.extend(logits.softmax(-1)) or args[-1](logits))

    monkeypatch.setattr(drafter, "propose", spy)
    recorder, output = record(target, drafter, tokenizer)
    assert output.sequences.tolist() == greedy(target, PROMPT, 16).tolist()
    sequence, drafted = PROMPT[0].tolist(), 0
    for one in recorder.rounds:
        drafts = [slot for slot in one.slots if slot.state != OWN]
        for i, slot in enumerate(drafts):
            assert slot.drafter.probability == pytest.approx(float(seen[drafted + i][slot.token_id]), abs=1e-6)
            assert [t for t, _ in slot.drafter.top] == seen[drafted + i].topk(3).indices.tolist()
            assert slot.chance is None
            probs = next_probs(target, sequence + [d.token_id for d in drafts[:i]])  # behind a rejection, too
            assert slot.target.probability == pytest.approx(float(probs[slot.token_id]), abs=1e-5)
            assert slot.target.top == [
                (t, pytest.approx(float(probs[t]), abs=1e-5)) for t in probs.topk(3).indices.tolist()
            ]
        drafted += len(drafts)
        sequence += [slot.token_id for slot in one.slots if slot.state in (ACCEPTED, OWN)]
        own = one.slots[-1]
        assert own.target.top[0][0] == own.token_id == sequence[-1]
    assert drafted == len(seen) > 10


def test_sampled_probabilities_are_those_that_were_compared(target, tokenizer):
    """After temperature and top-k. A scripted drafter is sure of its drafts (q = 1), so a draft is to be accepted with
    the target's probability of it, and what is drawn after a rejection is the target's rest, p / (1 - p(draft))."""
    options = {"do_sample": True, "temperature": 0.7, "top_k": 8, "top_p": 1.0, "max_new_tokens": 30}
    sequence = greedy(target, PROMPT, 40)
    recorder, output = record(
        target, scripted_drafter(target, sequence, 1000, block_size=4, verification="token"), tokenizer, **options
    )
    drafter = scripted_drafter(target, sequence, block_size=4, verification="token")
    torch.manual_seed(0)
    plain = target.generate(PROMPT, assistant_model=drafter, **options)
    assert output.sequences.tolist() == plain.tolist()  # recording draws nothing

    tokens, kinds = PROMPT[0].tolist(), set()
    for one in recorder.rounds:
        for slot in one.slots:
            kinds.add(slot.state)
            if slot.state == BEHIND:
                assert slot.chance is None
                continue
            raw = next_probs(target, tokens).log() / 0.7
            best = raw.topk(8)
            probs = torch.zeros_like(raw).scatter(0, best.indices, best.values.softmax(-1))
            p = float(probs[slot.token_id])
            assert slot.target.probability == pytest.approx(p, abs=1e-5)
            rejected = next((s for s in one.slots if s.state == REJECTED), None)
            if slot.state == OWN and rejected is not None:
                p /= 1 - float(probs[rejected.token_id])
            assert slot.chance == pytest.approx(p, abs=1e-4)
            if slot.state in (ACCEPTED, OWN):
                tokens.append(slot.token_id)
    assert kinds == {ACCEPTED, REJECTED, BEHIND, OWN}
    assert recorder.facts["Decoding"] == "sampling, temperature 0.7, top-k 8"


@pytest.mark.parametrize("kind", ["block", "one after the other"])
def test_a_chance_is_the_ratio_of_two_real_distributions(target, tokenizer, kind):
    drafter = tiny_drafter(target, verification="token")
    if kind == "one after the other":
        drafter = DeepseekV4MTP(target.config, 3).eval()
        drafter.verification = "token"
    recorder, _ = record(target, drafter, tokenizer, do_sample=True, top_k=0, temperature=1.5)
    judged = [s for one in recorder.rounds for s in one.slots if s.state in (ACCEPTED, REJECTED)]
    assert len(judged) > 5
    for slot in judged:
        assert slot.chance == pytest.approx(min(1, slot.target.probability / slot.drafter.probability), rel=1e-4)
    assert min(slot.chance for slot in judged) < 0.9


def test_drafts_judged_together_have_the_chance_of_their_prefix(target, tokenizer):
    """The last draft's by hand, from the probabilities of the page: p_i = min(p_{i-1} p / q, 1)."""
    recorder, _ = record(target, tiny_drafter(target), tokenizer, do_sample=True, top_k=0, temperature=1.5)
    assert recorder.trace("x").by_block
    last = []
    for one in recorder.rounds:
        drafts, weight = [slot for slot in one.slots if slot.state != OWN], 1.0
        for slot in drafts:
            assert 0 <= slot.chance <= 1
            weight = min(1.0, weight * slot.target.probability / slot.drafter.probability)
        if drafts:
            assert drafts[-1].chance == pytest.approx(weight, rel=1e-3, abs=1e-6)
            last.append(weight)
    assert len(last) > 5
    assert min(last) < 0.5


@pytest.mark.parametrize("do_sample", [False, True])
def test_processors_that_look_at_the_prefix_are_in_the_figures_and_see_what_they_always_saw(
    target, tokenizer, do_sample
):
    options = {"repetition_penalty": 2.0, "do_sample": do_sample, "top_k": 0}
    sequence = greedy(target, PROMPT, 16, repetition_penalty=2.0)
    drafter = scripted_drafter(target, sequence, 2, block_size=5)
    recorder, output = record(target, drafter, tokenizer, output_scores=True, **options)
    torch.manual_seed(0)
    drafter.follow(sequence, 2)
    plain = target.generate(PROMPT, assistant_model=drafter, max_new_tokens=16, **options)
    assert output.sequences.tolist() == plain.tolist()
    kept = [slot for one in recorder.rounds for slot in one.slots if slot.state in (ACCEPTED, OWN)]
    for slot, scores in zip(kept, output.scores, strict=True):
        assert slot.target.probability == pytest.approx(float(scores[0].softmax(-1)[slot.token_id]), abs=1e-6)
    behind = [slot for one in recorder.rounds for slot in one.slots if slot.state == BEHIND]
    assert len(behind) > 2
    assert all(slot.target is None for slot in behind)
    assert "RepetitionPenaltyLogitsProcessor" in recorder.facts["Decoding"]


@pytest.mark.parametrize("repetition_penalty", [1.0, 1.0001])
def test_drafts_behind_the_end_of_the_text_are_told_apart(target, tokenizer, repetition_penalty):
    """Accepted where a whole block is judged at once; never looked at where a processor sees the prefix."""
    want = greedy(target, PROMPT, 16, repetition_penalty=repetition_penalty)
    end = int(want[0, 11])
    assert end not in want[0, 9:11].tolist()
    drafter = scripted_drafter(target, want, block_size=6)
    recorder, output = record(
        target, drafter, tokenizer, eos_token_id=end, repetition_penalty=repetition_penalty, pad_token_id=0
    )
    behind = CUT if repetition_penalty == 1.0 else BEHIND
    assert states(recorder) == [[OWN], [ACCEPTED, ACCEPTED, behind, behind, behind]]
    assert recorder.stats == output.speculation
    as_page([recorder.trace("cut")])


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampling"])
def test_a_wrong_draft_behind_an_accepted_end_of_the_text_is_not_called_rejected(target, tokenizer, options):
    """The text ended before it: whether the target agrees with it made no difference."""
    want = greedy(target, PROMPT, 16)
    drafter = scripted_drafter(target, want, 2, block_size=6)
    recorder, output = record(target, drafter, tokenizer, eos_token_id=int(want[0, 11]), pad_token_id=0, **options)
    assert output.sequences.tolist() == want[:, :12].tolist()
    assert states(recorder) == [[OWN], [ACCEPTED, ACCEPTED, BEHIND, BEHIND, BEHIND]]
    assert [slot.chance for slot in recorder.rounds[1].slots[2:]] == [None] * 3


def test_rounds_without_drafts_are_lines_too(target, tokenizer):
    want = greedy(target, PROMPT, 8)
    recorder, _ = record(target, scripted_drafter(target, want, None), tokenizer, max_new_tokens=8)
    assert states(recorder) == [[OWN]] * 8
    assert recorder.stats.num_drafts == []
    assert "rounds + 7 without drafts" in as_page([recorder.trace("none")])


def test_times_are_split_by_where_they_passed_and_leave_recording_out(target, tokenizer, monkeypatch):
    """With a clock that moves on by a second each time it is read: on entering and leaving `propose` and the forward,
    before and after a round is written down, and at both ends of the call."""
    ticks = itertools.count()
    monkeypatch.setattr(comparison, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    recorder, _ = record(target, scripted_drafter(target, greedy(target, PROMPT, 16), 2), tokenizer)
    parts = [(r.draft_s, r.verify_s, r.other_s) for r in recorder.rounds]
    assert parts == [(0, 1, 2), *[(1, 1, 3)] * 5]
    assert recorder.recording_s == 6
    assert recorder.seconds == 3 + 5 * 5 + 1


# ------------------------------------------------------------------------------------------------ what it leaves alone


class Rounds:
    """A streamer that takes rounds."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.flatten().tolist())

    def put_round(self, *args):
        self.calls.append(args)

    def end(self):
        self.calls.append("end")


class Tokens(Rounds):
    """A streamer that takes tokens."""

    put_round = None


@pytest.mark.parametrize("kind", [Rounds, Tokens])
def test_a_streamer_of_the_calls_own_sees_what_it_would_see_without(target, tokenizer, kind):
    streamers = [kind(), kind()]
    want = greedy(target, PROMPT, 16)
    drafter = scripted_drafter(target, want, 1)
    record(target, drafter, tokenizer, streamer=streamers[0])
    drafter.follow(want, 1)
    greedy(target, PROMPT, 16, assistant_model=drafter, streamer=streamers[1])
    assert streamers[0].calls == streamers[1].calls


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_stays_behind_whatever_ends_the_call(target, tokenizer, error, monkeypatch):
    drafter = tiny_drafter(target)
    before = dict(vars(drafter)), dict(vars(target))
    hooks = len(target._forward_hooks), len(target._forward_pre_hooks)

    class Failing(Rounds):
        def put_round(self, *args):
            if len(self.calls) == 3:
                raise error
            super().put_round(*args)

    recorder = RoundRecorder(target, drafter, tokenizer)
    with pytest.raises(error), recorder:
        greedy(target, PROMPT, 16, assistant_model=drafter, streamer=Failing())
    assert (dict(vars(drafter)), dict(vars(target))) == before
    assert (len(target._forward_hooks), len(target._forward_pre_hooks)) == hooks
    held = [v for v in vars(recorder).values() if isinstance(v, torch.Tensor)]
    assert held == [recorder._target_logits] * len(held)
    assert recorder._target_logits is None
    assert greedy(target, PROMPT, 16, assistant_model=drafter).tolist() == greedy(target, PROMPT, 16).tolist()


def test_calls_of_other_threads_are_not_recorded(target, tokenizer):
    drafter = tiny_drafter(target)
    with RoundRecorder(target, drafter, tokenizer) as recorder:
        thread = threading.Thread(target=lambda: greedy(target, PROMPT, 4, assistant_model=drafter))
        thread.start()
        thread.join()
        assert recorder.rounds == []
        target(PROMPT)  # nor a forward outside the call
        greedy(target, PROMPT, 4, assistant_model=drafter)
    assert len(recorder.rounds) > 1


def test_a_second_call_and_none_are_refused(target, tokenizer):
    drafter = tiny_drafter(target)
    with RoundRecorder(target, drafter, tokenizer) as recorder:
        with pytest.raises(ValueError, match="no round was recorded"):
            recorder.trace("empty")
        greedy(target, PROMPT, 4, assistant_model=drafter)
        with pytest.raises(ValueError, match="make another for the next"):
            greedy(target, PROMPT, 4, assistant_model=drafter)


# ------------------------------------------------------------------------------------------------------------ the page


def test_bytes_that_are_no_whole_character_are_to_be_seen(tokenizer):
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode("a☃\n", add_special_tokens=False)
    assert len(ids) == 5  # three of them the bytes of the snowman
    assert [texts[i] for i in ids] == ["a", r"\xe2", r"\x98", r"\x83", "⏎"]
    assert texts.running(ids) == ["a", "", "", "☃", "⏎\n"]
    assert texts.running(ids[:2]) == ["a", r"\xe2"]  # the text ends within it
    assert texts[tokenizer.convert_tokens_to_ids("<｜User｜>")] == "<｜User｜>"
    assert texts[10**6] == "⟨1000000⟩"
    assert texts[tokenizer.encode("    ", add_special_tokens=False)[0]].strip("␣") == ""


@pytest.fixture(scope="module")
def traces(target, tokenizer):
    """Greedy and sampled calls of the random pair, with a title that would run if it could."""
    sequence = greedy(target, PROMPT, 40)
    out = []
    for options in ({}, {"do_sample": True, "top_k": 0}):
        drafter = scripted_drafter(target, sequence, lambda r: r % 5, block_size=5)
        recorder, _ = record(target, drafter, tokenizer, max_new_tokens=40, **options)
        out.append(recorder.trace(HOSTILE, {"Seed": HOSTILE}))
    return out


@pytest.fixture(scope="module")
def page(traces, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "two traces.html"
    write_trace(path, traces)
    return path


def test_a_page_escapes_everything_and_loads_nothing(traces, target, tokenizer):
    hostile = dataclasses.replace(traces[0], prompt_ids=tokenizer.encode(HOSTILE, add_special_tokens=False))
    content = as_page([hostile])
    assert "<img" not in content
    assert content.count("<script") == content.count("</script>") == 2
    assert "&lt;/script&gt;&lt;script&gt;" in content
    assert not re.search(r"//[a-z]|url\(|\bsrc=(?!x onerror=&quot;)|\bhref=|@import", content)


def test_the_data_of_a_page_cannot_end_its_script(traces, tokenizer):
    """A token with markup in it, wherever it stands."""

    class Markup:
        def get_added_vocab(self):
            return {"</script><img src=x>": 5}

        def convert_ids_to_tokens(self, token_id):
            return "</script><img src=x>"

    content = as_page([dataclasses.replace(traces[0], title="markup", facts={}, tokenizer=Markup())])
    assert content.count("</script>") == 2
    assert "<img" not in content
    data = json.loads(re.search(r'id="data">(.*?)</script>', content, re.DOTALL)[1])
    assert set(data[0]["texts"].values()) == {"</script><img src=x>"}


def long_trace(trace, num_rounds: int):
    """The trace with its rounds over and over."""
    rounds = [trace.rounds[i % (len(trace.rounds) - 1) + 1] for i in range(num_rounds)]
    kept = [slot.token_id for one in rounds for slot in one.slots if slot.state in (ACCEPTED, OWN)]
    return dataclasses.replace(trace, rounds=[trace.rounds[0], *rounds], new_ids=kept)


def test_500_rounds_of_six_drafts_stay_under_a_megabyte_and_a_half(target, tokenizer):
    recorder, _ = record(target, tiny_drafter(target, block_size=7), tokenizer, do_sample=True, top_k=0)
    assert recorder.stats.num_drafts[0] == 6
    long = long_trace(recorder.trace("long"), 500)
    assert len(as_page([long]).encode()) < 1.5e6


# ---------------------------------------------------------------------------------------------------- the command line

PAIR = [str(TINY / "target"), str(TINY / "drafter")]
COMMAND = ["generate", *PAIR, "--prompt", "I need a cheap hotel.", "--threads", "1"]
SHORT = ["--max-new-tokens", "12"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--show-drafts"], ["--temperature", "1"]])
def test_generate_writes_a_page_and_prints_what_it_prints_without(tmp_path, capsys, options):
    assert main([*COMMAND, *SHORT, *options]) == 0
    plain = capsys.readouterr().out
    path = tmp_path / "trace.html"
    assert main([*COMMAND, *SHORT, *options, "--trace", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == plain
    assert f"{path}: " in captured.err
    content = path.read_text()
    assert "I need a cheap hotel." in content
    assert ("<dt>Seed<dd>0" in content) == ("--temperature" in options)
    assert [p.name for p in tmp_path.iterdir()] == ["trace.html"]


def test_a_page_that_cannot_be_written_is_refused_before_any_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hyperdflash.generation.generate.load_target_model", lambda *args: pytest.fail("loaded"))
    without = [part for part in COMMAND if part != PAIR[1]]
    for command, path, status, message in (
        (without, tmp_path / "trace.html", 2, "--trace needs a drafter"),
        (COMMAND, tmp_path, 1, "is a folder"),
        (COMMAND, tmp_path / "missing" / "trace.html", 1, f"no folder {tmp_path / 'missing'}"),
    ):
        assert main([*command, "--trace", str(path)]) == status
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_takes_no_file_is_refused_by_name(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(OSError, match=r"the trace .*trace.html cannot be written: Permission denied"):
        check_trace_path(tmp_path / "trace.html")


# --------------------------------------------------------------------------------------------------- in a real browser

NUM_LINES = "[...document.querySelectorAll('section:not([hidden]) li')].filter(line => line.checkVisibility()).length"


@needs_browser
@pytest.mark.slow
def test_a_browser_shows_every_round_without_an_error_and_runs_nothing_foreign(page, traces):
    with Page.open(page) as browser:
        assert browser.evaluate(NUM_LINES) == len(traces[0].rounds)
        assert browser.evaluate("document.querySelectorAll('section').length") == 2
        assert browser.evaluate("document.images.length") == 0
        assert browser.evaluate("document.title") == "2 traces"
        assert browser.evaluate("document.querySelector('h1').textContent") == HOSTILE
        browser.evaluate("choose.selectedIndex = 1; choose.dispatchEvent(new Event('change'))")
        assert browser.evaluate(NUM_LINES) == len(traces[1].rounds)
        assert browser.errors == []
        assert browser.requests == [page.as_uri()]
        # And what did get in as markup would be stopped
        browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"document.title=1\">')")
        browser.frame()
        assert browser.evaluate("document.title") == "2 traces"


@needs_browser
@pytest.mark.slow
def test_the_card_of_a_token_comes_with_mouse_keys_and_from_the_text(page, traces):
    card = "card.hidden ? null : card.innerText"
    rejected = next(i for i, one in enumerate(traces[0].rounds) if one.slots[0].state == REJECTED)
    line = f"#t0-{rejected}"
    with Page.open(page) as browser:
        assert browser.evaluate(card) is None
        browser.hover(f"{line} .d s")
        slot = traces[0].rounds[rejected].slots[0]
        text = browser.evaluate(card)
        assert "draft 1 of 4, rejected" in text
        assert f"round {rejected} · position {slot.position} · token id {slot.token_id}" in text
        assert "100 %" in text  # a scripted drafter is sure
        assert f"{100 * slot.target.top[0][1]:.1f} %" in text
        browser.press("Escape")
        assert browser.evaluate(card) is None

        browser.evaluate("document.querySelector('.d > [tabindex=\"0\"]').focus()")
        assert "the target's own" in browser.evaluate(card)
        browser.press("ArrowRight")
        assert "round 1 · position 10" in browser.evaluate(card)
        browser.press("ArrowDown")
        assert "round 2 · " in browser.evaluate(card)

        browser.click("#t0 .text > :nth-child(5)")
        assert "position 13" in browser.evaluate(card)
        assert browser.evaluate("document.querySelector('li.on').id").startswith("t0-")
        assert browser.errors == []


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_is_readable_on_a_narrow_screen_and_in_the_dark(page, dark):
    """No sideways scrolling, and WCAG's contrast of 4.5 for every kind of token."""
    with Page.open(page, width=400, dark=dark) as browser:
        assert browser.evaluate("document.documentElement.scrollWidth") == 400
        for tag in ("b", "s", "i", "strong"):
            colours = browser.evaluate(
                f"(style => [style.color, style.backgroundColor, getComputedStyle(document.body).backgroundColor])"
                f"(getComputedStyle(document.querySelector('ol {tag}')))"
            )
            front, back, body = ([float(v) for v in re.findall(r"[\d.]+", colour)] for colour in colours)
            assert contrast(front, body if back[3:] == [0.0] else back) >= 4.5, tag


def contrast(a, b) -> float:
    def luminance(colour):
        channels = [v / 255 for v in colour[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in channels]
        return sum(w * v for w, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1200, 400])
def test_every_column_has_a_name_that_fits_and_stands_over_it(page, width):
    with Page.open(page, width=width) as browser:
        for column, name in (("n", "round"), ("c", "accepted"), ("t", "time")):
            edges = "(b => [b.left, b.right])(document.querySelector('#t0 {} .{}').getBoundingClientRect())"
            assert browser.evaluate(edges.format(".head", column)) == browser.evaluate(edges.format("li", column))
            head = f"document.querySelector('#t0 .head .{column}')"
            assert browser.evaluate(f"{head}.innerText").startswith(name)
            assert browser.evaluate(f"{head}.scrollWidth <= {head}.clientWidth")


@needs_browser
@pytest.mark.slow
def test_a_picture_of_the_whole_page_has_every_round_in_it(traces, tmp_path):
    """Tools that take one draw the page once, and a browser leaves out what it was told may wait."""
    write_trace(tmp_path / "long.html", [long_trace(traces[0], 150)])
    with Page.open(tmp_path / "long.html") as browser:
        height = browser.evaluate("document.documentElement.scrollHeight")
        clip = {"x": 0, "y": height - 600, "width": 700, "height": 500, "scale": 1}
        shot = browser.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"]
        green = np.asarray(Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")).reshape(-1, 3)
        background = browser.evaluate("getComputedStyle(document.querySelector('ol b')).backgroundColor")
    colour = [int(v) for v in re.findall(r"\d+", background)[:3]]
    assert (green == colour).all(-1).sum() > 1000


@needs_browser
@pytest.mark.slow
def test_without_scripts_the_rounds_are_there_with_their_probabilities(page, traces):
    with Page.open(page, script=False) as browser:
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        markup = browser.call("DOM.getOuterHTML", nodeId=root)["outerHTML"]
    assert markup.count("<li ") == sum(len(trace.rounds) for trace in traces)
    assert '<s title="rejected, drafter 100.0%, target ' in markup


@needs_browser
@pytest.mark.slow
def test_500_rounds_are_there_and_the_last_can_be_reached(traces, tmp_path):
    write_trace(tmp_path / "long.html", [long_trace(traces[0], 500)])
    with Page.open(tmp_path / "long.html") as browser:
        assert browser.evaluate(NUM_LINES) == 501
        browser.hover("li:last-child .d > :first-child")
        assert "round 500 · " in browser.evaluate("card.innerText")
        assert browser.errors == []
