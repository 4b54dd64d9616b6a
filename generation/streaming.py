"""Streamers for the terminal: the text as it is generated, plain or with the drafts in colour."""

import sys

from rich.console import Console
from rich.text import Text

ACCEPTED, OWN, REJECTED = "green", "bold", "red strike"
LEGEND = Text.assemble(
    ("accepted drafts", ACCEPTED), "  ", ("the target's own tokens", OWN), "  ", ("rejected drafts", REJECTED)
)


class DraftStreamer:
    """Prints each round of speculative decoding: accepted drafts, the target's own, rejected ones struck through.

    Give it to `generate(streamer=...)`. Without colours (a pipe), rejected drafts are left out. Text is held back
    until its bytes form whole characters.

    Args:
        tokenizer: the target's.
        console (`rich.console.Console`, *optional*): where to print.
    """

    def __init__(self, tokenizer, console: Console | None = None):
        self.tokenizer = tokenizer
        self.console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.ids: list[int] = []
        self.printed = ""
        self.is_prompt = True

    def put(self, value) -> None:
        """The prompt (skipped), or the tokens of plain decoding."""
        if self.is_prompt:
            self.is_prompt = False
            return
        self._print([(token, OWN) for token in value.flatten().tolist()])

    def put_round(self, new_ids: list[int], draft_ids: list[int], num_accepted: int) -> None:
        """One round: tokens kept, drafts proposed, and how many of those were accepted."""
        self._print([(token, ACCEPTED if i < num_accepted else OWN) for i, token in enumerate(new_ids)])
        rejected = draft_ids[num_accepted:]
        if rejected and self.console.is_terminal:
            self.console.print(Text(self._decode(rejected).replace("\n", "⏎"), REJECTED), end="")

    def end(self) -> None:
        self.console.print(Text(self._decode(self.ids)[len(self.printed) :], OWN))  # an unfinished character, if any

    def _print(self, tokens: list[tuple[int, str]]) -> None:
        text = Text()
        for token, style in tokens:
            self.ids.append(token)
            whole = self._decode(self.ids)
            if not whole.endswith("\ufffd"):
                text.append(whole[len(self.printed) :], style)
                self.printed = whole
        self.console.print(text, end="")

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
