"""`Chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from zeroxla.cli.data.chat_template import ChatTemplate
from zeroxla.cli.generate.drawing import Drawing
from zeroxla.cli.generate.output import GenerateOutput

NEW = "/new"
"""The line that begins a new conversation."""


@dataclass(kw_only=True, slots=True)
class Chat:
    """A conversation.

    Attributes:
      drawing: draws the answers.
      template: turns the messages into the text that the model reads.
      output: shows them.
      system: the system prompt; None without one.
      messages: the conversation so far.
    """

    drawing: Drawing
    template: ChatTemplate
    output: GenerateOutput
    system: str | None
    messages: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Answer line after line, until the input ends."""
        self._begin()
        while (line := self._line()) is not None:
            if line.strip() == NEW:
                self._begin()
                self.output.say("A new conversation.")
            elif line.strip():
                self._answer(line)

    def _begin(self) -> None:
        self.messages = first_messages(self.system)

    def _line(self) -> str | None:
        """Return the next line; None at the end of the input."""
        is_typed = sys.stdin.isatty()
        while True:
            try:
                return input("> " if is_typed else "")
            except EOFError:
                self.output.write("\n" if is_typed else "")
                return None
            except KeyboardInterrupt:
                self.output.say("\nCtrl-D ends the conversation.")

    def _answer(self, line: str) -> None:
        """Show the answer to a message, and keep both; or say why there is none."""
        asked = [*self.messages, {"role": "user", "content": line}]
        try:
            prompt = self.drawing.vocabulary.encode(self.template.prompt(asked))
            self.drawing.settings.room(len(prompt), self.drawing.engine.max_length)
        except ValueError as error:
            self.output.warn(f"{error}; or begin a new conversation with {NEW}")
            return
        answers = self.drawing.answers([prompt], [False])
        (row,) = answers.rows
        with _interrupted() as is_interrupted:
            for pieces in self.drawing.draw([prompt], answers):
                for _, text in pieces:
                    self.output.write(text)
                if is_interrupted():
                    self.output.write(row.end())
                    break
        self.output.write("\n")
        self.messages = [*asked, {"role": "assistant", "content": row.text}]


def first_messages(system: str | None, *said: str) -> list[dict[str, Any]]:
    """Return the first messages of a conversation: the system prompt, and what the user says."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, *({"role": "user", "content": text} for text in said)]


@contextlib.contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C inside only be noticed; a second one acts as usual.

    Yields:
      A function that returns whether there was one.
    """
    seen: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def notice(number: int, frame: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, notice)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, before)
