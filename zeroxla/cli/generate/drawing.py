"""`Drawing`: draws answers as texts, and counts what it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np

from zeroxla.cli.data.vocabulary import Vocabulary
from zeroxla.cli.generate.answer_text import AnswerText
from zeroxla.cli.generate.settings import AnswerSettings
from zeroxla.hybrid.engine import HybridEngine
from zeroxla.hybrid.token_stream import StreamedTokens
from zeroxla.program.report import format_bytes
from zeroxla.step.state import TrainState


@dataclass(kw_only=True, slots=True)
class Speed:
    """How fast tokens come.

    Attributes:
      num_tokens: the number of tokens of all answers.
      first_s: the seconds until the first token of the first request, compilation included.
      timed: the number of tokens after the first steps of each request.
      timed_s: the seconds that these took.
    """

    num_tokens: int = 0
    first_s: float | None = None
    timed: int = 0
    timed_s: float = 0.0

    def rate(self) -> str:
        """Return the number of tokens a second, in words; "" as long as it is not known."""
        return f"{self.timed / self.timed_s:.1f} tokens/s" if self.timed_s > 0 else ""

    def words(self) -> str:
        """Return a line about the tokens so far; "" if there are none."""
        if self.first_s is None:
            return ""
        rate = self.rate()
        found = f"{self.num_tokens:,} tokens, the first after {self.first_s:.2f} s"
        found += f", then {rate}" if rate else ""
        used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return found if used is None else f"{found}; {format_bytes(used)} of a device at the peak"


@dataclass(kw_only=True, slots=True)
class Drawing:
    """A model that draws answers.

    Attributes:
      engine: the engine.
      state: the state that holds the weights.
      vocabulary: turns tokens into text.
      settings: how tokens are chosen, and what ends an answer.
      speed: the count of all tokens.
      requests: the number of requests so far; each has a random key of its own.
    """

    engine: HybridEngine
    state: TrainState
    vocabulary: Vocabulary
    settings: AnswerSettings
    speed: Speed = field(default_factory=Speed)
    requests: int = 0

    def answers(self, prompts: Sequence[Sequence[int]], continues: Sequence[bool]) -> AnswerTexts:
        """Return the answers to prompts, before their first token.

        Args:
          prompts: the prompts in tokens.
          continues: whether the answer continues the text of its prompt.
        """
        decode = partial(self.vocabulary.decode, special=False)
        ends, stops = self.settings.ends, self.settings.stops
        rows = [
            AnswerText(decode, prompt if goes_on else (), ends=ends, stops=stops)
            for prompt, goes_on in zip(prompts, continues, strict=True)
        ]
        return AnswerTexts(rows=rows)

    def draw(
        self, prompts: Sequence[Sequence[int]], answers: AnswerTexts, *, every: int = 1
    ) -> Iterator[list[tuple[int, str]]]:
        """Draw the answers to prompts; yield (number of the row, new text) of each step.

        Args:
          prompts: the prompts in tokens.
          answers: their answers, which grow. Rows after them are drawn and dropped.
          every: as for `HybridEngine.stream`.

        Raises:
          ValueError: the context has no room, or the model's numbers are not finite.
        """
        settings, started = self.settings, time.perf_counter()
        last = started
        sampling, longest = settings.sampling, max(map(len, prompts))
        key = jax.random.fold_in(jax.random.key(settings.seed), self.requests)
        self.requests += 1
        stream = self.engine.stream(
            self.state,
            prompts,
            key=key,
            max_new_tokens=settings.room(longest, self.engine.max_length),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            eos=settings.ends or None,
            every=every,
        )
        with stream:
            for number, item in enumerate(stream):
                new = answers.add(item)
                now = time.perf_counter()
                self.speed.num_tokens += len(new)
                if number == 0:
                    last = now
                    self.speed.first_s = self.speed.first_s or now - started
                if number >= every:  # those before came together with the first
                    self.speed.timed += len(new)
                    self.speed.timed_s += now - last
                    last = now
                yield new
                if answers.are_whole:
                    break


@dataclass(kw_only=True, slots=True)
class AnswerTexts:
    """Some answers, as they grow.

    Attributes:
      rows: the text of each.
    """

    rows: list[AnswerText]

    def add(self, item: StreamedTokens) -> list[tuple[int, str]]:
        """Add a step's tokens; return (number of the row, new text) of each row that drew one."""
        return [
            (int(i), self.rows[i].add(int(item.tokens[i]), is_last=not item.running[i]))
            for i in np.flatnonzero(item.drawn[: len(self.rows)])
            if self.rows[i].finished is None
        ]

    @property
    def are_whole(self) -> bool:
        """Whether all have ended."""
        return all(row.finished is not None for row in self.rows)
