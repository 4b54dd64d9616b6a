"""The trace of `generate` calls as one self-contained HTML page: what became of every draft, and why.

    hyperdflash generate examples/tiny/target examples/tiny/drafter --prompt "I need a cheap hotel." \\
        --trace trace.html

    with RoundRecorder(target, drafter, tokenizer) as recorder:
        target.generate(**inputs, assistant_model=drafter)
    write_trace("trace.html", [recorder.trace("my prompt")])      # one page can hold many calls

`trace.html` beside this file is the template: style and script. The lines are there without the script, which adds the
cards. `trace_recorder.py` records.

    .venv/bin/python -m pytest tests/test_trace.py
"""

import base64
import codecs
import hashlib
import html
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..common.console import visible
from ..common.files import write_atomically
from ..generation_hyperdflash import SpeculativeStats
from .trace_recorder import ACCEPTED, BEHIND, CUT, OWN, REJECTED, Round, RoundRecorder, Slot, Trace

__all__ = ["RoundRecorder", "check_trace_path", "write_trace"]

_TAGS = {ACCEPTED: "b", CUT: "u", REJECTED: "s", BEHIND: "i", OWN: "strong"}


class TokenTexts:
    """Texts of token ids, all of it visible: incomplete characters as `\\xe2`, a line break as `⏎`."""

    _BYTES = {character: byte for byte, character in bytes_to_unicode().items()}

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.texts: dict[int, str] = {}
        self._added = set(tokenizer.get_added_vocab().values())

    def to_bytes(self, token_id: int) -> bytes:
        """A token's bytes; of an id that the tokenizer does not have, the id in brackets."""
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None or token == "":
            return f"⟨{token_id}⟩".encode()
        if token_id in self._added or any(c not in self._BYTES for c in token):
            return token.encode()
        return bytes(self._BYTES[c] for c in token)

    def __getitem__(self, token_id: int) -> str:
        if token_id not in self.texts:
            text = visible(self.to_bytes(token_id).decode(errors="backslashreplace")).replace("\n", "")
            self.texts[token_id] = text if text.strip(" ") else "␣" * len(text)
        return self.texts[token_id]

    def running(self, token_ids: list[int]) -> list[str]:
        """What each token adds to the text; a character made of several comes with its last, the others add `""`."""
        decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        added = [decoder.decode(self.to_bytes(token)) for token in token_ids]
        if added:
            added[-1] += decoder.decode(b"", final=True)
        return [visible(text) for text in added]


# ------------------------------------------------------------------------------------------------------------ the page


def check_trace_path(path: Path) -> None:
    """Raises `OSError` that names the path when no page can be written there."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name the HTML file to write the trace to")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write the trace {path.name} to")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise OSError(f"the trace {path} cannot be written: {error.strerror}") from error


def write_trace(path: str | Path, traces: list[Trace]) -> None:
    """Write one page with all `traces`, atomically. Raises `OSError` that names the path."""
    write_atomically(Path(path), as_page(traces).encode())


def as_page(traces: list[Trace]) -> str:
    """One HTML page without external resources; everything that comes from a model or a user is escaped."""
    template = Path(__file__).with_name("trace.html").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", template, re.DOTALL).group(1)
    sections, data = [], []
    for number, trace in enumerate(traces):
        texts = TokenTexts(trace.tokenizer)
        rounds = [[_slot_data(slot, texts) for slot in one.slots] for one in trace.rounds]
        data.append({"sampling": trace.sampling, "byBlock": trace.by_block, "rounds": rounds, "texts": texts.texts})
        sections.append(_section(f"t{number}", trace, texts))
    values = {
        "title": html.escape(traces[0].title if len(traces) == 1 else f"{len(traces)} traces"),
        "hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "options": "".join(f"<option>{i}. {html.escape(t.title)}</option>" for i, t in enumerate(traces, start=1)),
        "sections": "\n".join(sections),
        # No text can end the script element
        "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _slot_data(slot: Slot, texts: TokenTexts) -> list:
    """`[state, id, position, q, top of q, p, top of p, chance]`, each top a flat list of ids and probabilities."""
    figures = []
    for distribution in (slot.drafter, slot.target):
        if distribution is None:
            figures += [None, []]
            continue
        for token, _ in distribution.top:
            texts[token]
        top = [value for token, p in distribution.top for value in (token, _rounded(p))]
        figures += [_rounded(distribution.probability), top]
    texts[slot.token_id]
    return [slot.state, slot.token_id, slot.position, *figures, None if slot.chance is None else _rounded(slot.chance)]


def _rounded(p: float) -> float:
    return float(f"{p:.4g}")


def _section(key: str, trace: Trace, texts: TokenTexts) -> str:
    times = f"Of this recorded call, without the {trace.recording_s:.2f} s that recording itself took."
    facts = {**trace.facts, "Times": times + " On an accelerator, recording also waits at each time stamp."}
    facts = "".join(f"<div><dt>{html.escape(k)}<dd>{html.escape(v)}</div>" for k, v in facts.items())
    prompt = html.escape("".join(texts.running(trace.prompt_ids)))
    steps = trace.rounds[1:]
    scale = _time_scale(steps) or 1.0
    lines = "\n".join(_line(key, i, one, scale, texts) for i, one in enumerate(trace.rounds))
    return f"""<section id="{key}" class="trace" aria-labelledby="{key}-title">
<h1 id="{key}-title">{html.escape(trace.title)}</h1>
<div class="figures">{_figures(trace)}{_time_figure(steps)}{_acceptance_figure(trace.stats)}</div>
<details class="facts"><summary>Models, settings, and what the figures are</summary><dl>{facts}</dl></details>
<details><summary>Prompt, {len(trace.prompt_ids):,} tokens</summary><pre class="prompt">{prompt}</pre></details>
<div class="columns">
<div class="output"><h2>Text</h2>
<pre class="text tok" tabindex="0" aria-label="Generated text">{_text(trace, texts)}</pre></div>
<div class="list"><h2>Rounds <small>a full time bar is {scale * 1000:.3g} ms or more; 0 is the prompt</small></h2>
<div class="head"><span class="n">round</span><span class="d">drafts, and the target's own token</span>\
<span class="c">accepted</span><span class="t">time</span></div>
<ol start="0" class="tok">
{lines}
</ol></div>
</div>
</section>"""


def _figures(trace: Trace) -> str:
    num_rounds, num_new = len(trace.stats.num_drafts), len(trace.new_ids)
    without = len(trace.rounds) - 1 - num_rounds
    figures = [
        (f"{trace.stats.acceptance_length:.2f}", "acceptance length (tau)", "1 + accepted drafts per round"),
        (f"{num_rounds:,}", "rounds" + (f" + {without} without drafts" if without else ""), "that drafted"),
        (f"{num_new:,}", "new tokens", "without the prompt"),
        (f"{num_new / trace.seconds:.1f}", "tokens/s", "prompt included, recording left out"),
    ]
    return "".join(f'<div class="figure" title="{t}"><strong>{v}</strong> {name}</div>' for v, name, t in figures)


def _time_figure(steps: list[Round]) -> str:
    """The mean time of a round: drafting, verifying, the rest."""
    if not steps:
        return ""
    means = [statistics.fmean(r.draft_s for r in steps), statistics.fmean(r.verify_s for r in steps)]
    means.append(statistics.fmean(r.other_s for r in steps))
    names = ("draft", "verify", "other")
    legend = " ".join(f'<span class="{n}">{n} {1000 * s:.1f}</span>' for n, s in zip(names, means, strict=True))
    bar = _bar(means, sum(means))
    return (
        f'<div class="figure wide">Mean time of a round, {1000 * sum(means):.1f} ms{bar}<small>{legend}</small></div>'
    )


def _bar(seconds: Sequence[float], scale: float) -> str:
    """A stacked bar of draft, verify and other time; `scale` seconds fill it."""
    ends, total = [], 0.0
    for part in seconds:
        total += part
        ends.append(f"{min(100 * total / scale, 100):.3g}%")
    return f'<span class="bar" style="--d:{ends[0]};--v:{ends[1]};--o:{ends[2]}"></span>'


def _time_scale(steps: list[Round]) -> float:
    """Seconds of a full bar: nearly all rounds fit, and a single slow one does not flatten the others."""
    times = sorted(r.seconds for r in steps)
    return times[int(0.95 * (len(times) - 1))] * 1.1 if times else 0.0


def _acceptance_figure(stats: SpeculativeStats) -> str:
    """A bar chart of acceptance by position."""
    rates = stats.per_position_acceptance_rates
    if not rates:
        return ""
    bars = ""
    for i, (rate, conditional) in enumerate(zip(rates, stats.conditional_acceptance_rates, strict=True)):
        x, height = 34 * i + 17, 44 * rate
        top = 58 - height
        bars += (
            f"<g><title>draft {i + 1}: accepted in {rate:.0%} of the rounds, and in {conditional:.0%} of those that "
            f'accepted all before it</title><rect x="{x - 12}" y="{top:.1f}" width="24" height="{height:.1f}"/>'
            f'<text x="{x}" y="{top - 4:.1f}">{rate:.2f}</text><text x="{x}" y="71">{i + 1}</text></g>'
        )
    label = "Acceptance by position: " + ", ".join(f"{rate:.2f}" for rate in rates)
    width = 34 * len(rates)
    return (
        f'<div class="figure wide">Acceptance by position<svg role="img" aria-label="{label}" width="{width}" '
        f'height="74" viewBox="0 0 {width} 74"><path d="M0 58.5H{width}"/>{bars}</svg></div>'
    )


def _text(trace: Trace, texts: TokenTexts) -> str:
    """The generated text, a span for each token: drafts and the target's own."""
    kept = [slot for one in trace.rounds for slot in one.slots if slot.state in (ACCEPTED, OWN)]
    added = texts.running([slot.token_id for slot in kept])
    return "".join(
        f"<{_TAGS[slot.state]}>{html.escape(text) or '·'}</{_TAGS[slot.state]}>"
        for slot, text in zip(kept, added, strict=True)
    )


def _line(key: str, number: int, one: Round, scale: float, texts: TokenTexts) -> str:
    """The line of a round: number, tokens, drafts accepted, time."""
    tokens = "".join(_token(slot, texts) for slot in one.slots)
    states = [slot.state for slot in one.slots if slot.state != OWN]
    count = f"{sum(s in (ACCEPTED, CUT) for s in states)}/{len(states)}" if states else "–"
    parts = (one.draft_s, one.verify_s, one.other_s)
    times = "draft {:.2f}, verify {:.2f}, other {:.2f} ms".format(*(1000 * s for s in parts))
    return (
        f'<li id="{key}-{number}"><span class="n">{number}</span><span class="d">{tokens}</span>'
        f'<span class="c" title="drafts accepted">{count}</span>'
        f'<span class="t" title="{times}">{_bar(parts, scale)}{1000 * one.seconds:.1f}<small> ms</small></span></li>'
    )


def _token(slot: Slot, texts: TokenTexts) -> str:
    tag, known = _TAGS[slot.state], ((slot.drafter, "drafter"), (slot.target, "target"))
    title = ", ".join([slot.state, *(f"{name} {d.probability:.1%}" for d, name in known if d is not None)])
    return f'<{tag} title="{title}">{html.escape(texts[slot.token_id])}</{tag}>'
