"""Rewards of responses: functions of text that can be checked, or a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from zeroxla.hybrid.engine import HybridEngine
from zeroxla.rlhf.rollouts import Rollouts
from zeroxla.step.state import TrainState

_PAIRS = {")": "(", "]": "[", "}": "{"}


class Reward(Protocol):
    """Scores whole responses."""

    def __call__(self, rollouts: Rollouts) -> np.ndarray:
        """Return float[B]."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextReward:
    """A function of a response's text.

    Attributes:
      function: takes the text of a response with its end token, without the prompt.
      decode: turns tokens into text.
    """

    function: Callable[[str], float]
    decode: Callable[[Sequence[int]], str]

    def __call__(self, rollouts: Rollouts) -> np.ndarray:
        texts = (self.decode(row.tolist()) for row in rollouts.responses())
        return np.array([self.function(text) for text in texts], np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelReward:
    """A language model of any kind; its first logit at a row's last token is the score.

    Attributes:
      engine: the hybrid engine of the model's step.
      state: the model's training state.
    """

    engine: HybridEngine
    state: TrainState

    def __call__(self, rollouts: Rollouts) -> np.ndarray:
        return rollouts.at_last(self.engine.values(self.state, rollouts.tokens_BL))


def vowels(text: str) -> float:
    """Return the share of characters that are vowels.

    >>> vowels("audio")
    0.8
    """
    return sum(c in "aeiouAEIOU" for c in text) / max(len(text), 1)


def brackets(text: str) -> float:
    """Return the share of characters that open or close a pair of brackets, () or [] or {}, each
    closed by its own kind and in order.

    >>> brackets("f(x)[0]"), brackets("((]")
    (0.5714285714285714, 0.0)
    """
    opened: list[str] = []
    paired = 0
    for c in text:
        if c in _PAIRS.values():
            opened.append(c)
        elif c in _PAIRS:
            if opened and opened[-1] == _PAIRS[c]:
                opened.pop()
                paired += 2
            else:
                opened.clear()  # a wrong bracket leaves those around it unpaired
    return paired / max(len(text), 1)


def brief(text: str) -> float:
    """Return 1 / (1 + characters): 1 for no text, and less for longer text.

    >>> brief("abc")
    0.25
    """
    return 1 / (1 + len(text))


REWARDS: dict[str, Callable[[str], float]] = {
    "vowels": vowels,
    "brackets": brackets,
    "brief": brief,
}
"""Rewards by the name that `zeroxla rlhf --reward` takes."""


def checked(scores: Any, rows: int) -> np.ndarray:
    """Return scores as float32[B].

    Raises:
      ValueError: they are not one finite number for each row.
    """
    try:
        scores_B = np.asarray(scores, np.float32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the reward returned {repr(scores)[:60]}, which are no numbers ({error}); return one "
            "finite number for each response"
        ) from error
    if scores_B.shape != (rows,):
        raise ValueError(
            f"the reward returned an array of the shape {scores_B.shape} for {rows} responses; "
            "return one number for each"
        )
    if not np.isfinite(scores_B).all():
        bad = np.flatnonzero(~np.isfinite(scores_B)).tolist()
        raise ValueError(f"the reward of the rows {bad} is not finite; return finite numbers")
    return scores_B
