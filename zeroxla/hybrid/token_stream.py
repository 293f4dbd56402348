"""`TokenStream`: the tokens that an engine draws, one step after another.

Shape letters: B rows, T turns of the decoding loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterator, Mapping
from types import TracebackType
from typing import Self

import numpy as np

from zeroxla.hybrid.prompts import check_finite


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamedTokens:
    """One token of each row that draws: an item of `HybridEngine.stream`, as NumPy arrays.

    Attributes:
      tokens: int32[B]; `pad` where the row draws none.
      logprobs: float32[B], the log-probability of each token under the model (temperature 1, all
        tokens); 0 where the row draws none.
      drawn: bool[B], whether the row draws a token in this step. It does not after its end; nor,
        with caches that know nothing of padding, while it still reads a prompt longer than others.
      running: bool[B], whether more of the row's tokens follow.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    drawn: np.ndarray
    running: np.ndarray


class TokenStream(Iterator[StreamedTokens]):
    """The tokens of `HybridEngine.stream`: an iterator of `StreamedTokens`, and a context.

    The engine's copy of the model and the cache stay on the devices until the stream has ended. It
    ends after the last token, by `close`, at the end of a `with` block, or when nothing refers to
    it any more.
    """

    def __init__(self, items: Generator[StreamedTokens, None, None]) -> None:
        self._items = items

    def __next__(self) -> StreamedTokens:
        return next(self._items)

    def close(self) -> None:
        """End the stream: free the cache, and the copy if the engine releases copies."""
        self._items.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def items_of(found: Mapping[str, np.ndarray], num_rows: int) -> Iterator[StreamedTokens]:
    """Yield the steps in which rows draw tokens.

    Args:
      found: what some turns have drawn, as `decode_turns` returns it.
      num_rows: the number of rows that were asked for; others only fill up the devices.

    Raises:
      NotFiniteError: some row's logits were not finite.
    """
    mine = {name: x[:num_rows] for name, x in found.items()}
    check_finite(mine.pop("finite"))
    for turn in np.flatnonzero(mine["drawn"].any(axis=0)):
        yield StreamedTokens(**{name: x[:, turn] for name, x in mine.items()})
