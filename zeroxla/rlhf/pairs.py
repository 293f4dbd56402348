"""Pairs of responses as right-padded rows.

Shape letters: B pairs, L tokens of a row (prompt, response, padding), T = L - 1 targets. Target t
of a row is its token t + 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

Row = Sequence[int] | np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """Two responses to each prompt, of which one was preferred.

    Attributes:
      chosen_BL, rejected_BL: int32, prompt and response next to each other, then padding.
      chosen_mask_BT, rejected_mask_BT: float32, 1 at the targets of the response.
    """

    chosen_BL: np.ndarray
    rejected_BL: np.ndarray
    chosen_mask_BT: np.ndarray
    rejected_mask_BT: np.ndarray

    @staticmethod
    def of(
        prompts: Sequence[Row],
        chosen: Sequence[Row],
        rejected: Sequence[Row],
        *,
        length: int,
        pad: int = 0,
    ) -> Pairs:
        """Put prompts and responses into rows.

        Args:
          prompts: token numbers, one or more for each pair.
          chosen, rejected: the tokens of the preferred and of the other response, their end tokens
            included, one or more for each pair.
          length: L, the number of tokens in a row.
          pad: the token after a row's end. Nothing depends on it.

        Raises:
          ValueError: there are not as many prompts as responses, one has no token, or a row needs
            more than L tokens.
        """
        if not len(prompts) == len(chosen) == len(rejected):
            raise ValueError(
                f"{len(prompts)} prompts, {len(chosen)} chosen and {len(rejected)} rejected "
                "responses do not belong together; give one of each for every pair"
            )
        rows = [_rows(prompts, responses, length, pad) for responses in (chosen, rejected)]
        return Pairs(
            chosen_BL=rows[0][0],
            rejected_BL=rows[1][0],
            chosen_mask_BT=rows[0][1],
            rejected_mask_BT=rows[1][1],
        )

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.chosen_BL)


def _rows(
    prompts: Sequence[Row], responses: Sequence[Row], length: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and the mask of responses."""
    tokens_BL = np.full((len(prompts), length), pad, np.int32)
    mask_BT = np.zeros((len(prompts), length - 1), np.float32)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        first, last = len(prompt), len(prompt) + len(response)
        if not len(prompt) or not len(response):
            raise ValueError(f"pair {i} has an empty prompt or response; leave it out")
        if last > length:
            raise ValueError(
                f"pair {i} has a prompt and a response of {last} tokens, and rows are {length} "
                "long; make rows longer (length=), or cut the texts"
            )
        tokens_BL[i, :first], tokens_BL[i, first:last] = prompt, response
        mask_BT[i, first - 1 : last - 1] = 1
    return tokens_BL, mask_BT
