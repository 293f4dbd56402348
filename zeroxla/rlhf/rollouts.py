"""Rollouts: prompts and their responses as right-padded rows, and minibatches of them.

Shape letters: B rows, L tokens of a row (prompt, response, padding), T = L - 1 targets. All arrays
are NumPy's, on the host. Target t of a row is its token t + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from zeroxla.hybrid.prompts import Generated

Prompts = Sequence[Sequence[int]] | Sequence[np.ndarray] | np.ndarray
"""Rows of token numbers; the rows may have any lengths."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rollouts:
    """Prompts and the responses that a model gave.

    Attributes:
      tokens_BL: int32, prompt and response next to each other, then padding.
      mask_BT: float32, 1 at the targets of the response, its end token included.
      logprobs_BT: float32, log-probabilities of these targets when they were drawn; 0 elsewhere.
      prompts_B: int32, number of tokens in each prompt.
      lengths_B: int32, number of tokens in each response.
    """

    tokens_BL: np.ndarray
    mask_BT: np.ndarray
    logprobs_BT: np.ndarray
    prompts_B: np.ndarray
    lengths_B: np.ndarray

    @staticmethod
    def of(prompts: Prompts, generated: Generated, *, length: int, pad: int = 0) -> Rollouts:
        """Put prompts and responses into rows.

        Args:
          prompts: the prompts that were continued.
          generated: the result of `HybridEngine.generate`.
          length: L, the number of tokens in a row.
          pad: the token after a row's end.

        Raises:
          ValueError: there are not as many prompts as responses, or a row needs more than L tokens.
        """
        rows = generated.rows()
        if len(prompts) != len(rows):
            raise ValueError(
                f"{len(prompts)} prompts and {len(rows)} responses do not belong together"
            )
        prompts_B = np.array([len(p) for p in prompts], np.int32)
        lengths_B = np.array([len(r) for r in rows], np.int32)
        if (most := int((prompts_B + lengths_B).max())) > length:
            raise ValueError(
                f"a prompt and its response have {most} tokens, and rows are {length} long; make "
                "rows longer, or prompts shorter"
            )
        tokens_BL = np.full((len(rows), length), pad, np.int32)
        mask_BT = np.zeros((len(rows), length - 1), np.float32)
        logprobs_BT = np.zeros_like(mask_BT)
        for i, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            first, last = len(prompt), len(prompt) + len(row)
            tokens_BL[i, :first], tokens_BL[i, first:last] = prompt, row
            mask_BT[i, first - 1 : last - 1] = 1
            logprobs_BT[i, first - 1 : last - 1] = generated.logprobs[i, : len(row)]
        return Rollouts(
            tokens_BL=tokens_BL,
            mask_BT=mask_BT,
            logprobs_BT=logprobs_BT,
            prompts_B=prompts_B,
            lengths_B=lengths_B,
        )

    def responses(self) -> list[np.ndarray]:
        """Return each row's response, its end token included."""
        ends_B = self.prompts_B + self.lengths_B
        rows = zip(self.tokens_BL, self.prompts_B, ends_B, strict=True)
        return [row[first:last] for row, first, last in rows]

    def prompts(self) -> list[np.ndarray]:
        """Return each row's prompt."""
        return [row[:n] for row, n in zip(self.tokens_BL, self.prompts_B, strict=True)]

    def at_last(self, values_BL: np.ndarray) -> np.ndarray:
        """Return the values at each row's last token, [B], from values at all tokens."""
        last_B = self.prompts_B + self.lengths_B - 1
        return values_BL[np.arange(len(last_B)), last_B]


def minibatches(
    columns: Mapping[str, np.ndarray], size: int, *, epochs: int, seed: Sequence[int]
) -> Iterator[dict[str, np.ndarray]]:
    """Yield minibatches: the rows of columns, in another order in each epoch.

    Args:
      columns: arrays with the same leading dim B.
      size: number of rows in a minibatch. It must divide B, so that each row comes once in an
        epoch.
      epochs: how often each row comes.
      seed: whole numbers of 0 or more that determine the order.

    Raises:
      ValueError: `size` does not divide B, or the columns have other numbers of rows.
    """
    counts = {name: len(x) for name, x in columns.items()}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the columns have different numbers of rows: {counts}")
    rows = next(iter(counts.values()))
    if size < 1 or rows % size:
        raise ValueError(
            f"{rows} rows do not divide into minibatches of {size}; use a divisor of {rows}"
        )
    return _minibatches(columns, rows, size, epochs, np.random.default_rng(list(seed)))


def _minibatches(
    columns: Mapping[str, np.ndarray],
    rows: int,
    size: int,
    epochs: int,
    generator: np.random.Generator,
) -> Iterator[dict[str, np.ndarray]]:
    for _ in range(epochs):
        order = generator.permutation(rows)
        for start in range(0, rows, size):
            chosen = order[start : start + size]
            yield {name: x[chosen] for name, x in columns.items()}
