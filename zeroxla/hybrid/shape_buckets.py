"""The shapes that programs are compiled for, so that calls of similar sizes share a program."""

from __future__ import annotations

import dataclasses

from zeroxla.hybrid.decode import DecodeShape
from zeroxla.hybrid.prompts import LengthLimits
from zeroxla.hybrid.sampling import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShapeBuckets:
    """Rounds the shapes of calls up to those that programs are compiled for.

    Attributes:
      limits: rounds lengths.
      copies: the number of device groups that hold the model; rows are padded to a multiple of it.
    """

    limits: LengthLimits
    copies: int

    def device_rows(self, rows: int) -> int:
        """Return the number of rows of one device."""
        return -(-rows // self.copies)

    def decode_shape(
        self, num_rows: int, longest: int, max_new_tokens: int, sampling: Sampling
    ) -> DecodeShape:
        """Return the shape that is compiled to continue prompts.

        Args:
          num_rows: the number of prompts.
          longest: the number of tokens of the longest prompt.
          max_new_tokens: the most tokens drawn for a row.
          sampling: how tokens are chosen.

        Raises:
          ValueError: there is nothing to generate, or more than the context holds.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens} must be 1 or more")
        prompt, new = self.limits.buckets(longest, max_new_tokens)
        return DecodeShape(
            rows=self.device_rows(num_rows),
            prompt=prompt,
            new=new,
            greedy=sampling.is_greedy,
            filtered=sampling.is_filtered,
        )

    def whole_rows(self, rows: int, length: int) -> tuple[int, int]:
        """Return the shape that is compiled to score whole rows of one length.

        Raises:
          ValueError: the rows are longer than the context, or empty.
        """
        return self.device_rows(rows) * self.copies, self.limits.bucket(length)
