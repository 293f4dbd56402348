"""`Request`: prompts to continue, checked, and padded to a shape that is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from zeroxla.hybrid.decode import DecodeShape
from zeroxla.hybrid.prompts import as_rows, check_vocabulary, end_tokens, left_padded
from zeroxla.hybrid.sampling import Sampling
from zeroxla.hybrid.shape_buckets import ShapeBuckets
from zeroxla.step.checks import check_key


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Prompts, and how they are continued.

    Attributes:
      num_rows: the number of prompts.
      shape: the shape that programs are compiled for.
      batch: `prompt` and `length`, as `left_padded` returns them.
      key: a PRNG key.
      options: as for `Decoder`.
    """

    num_rows: int
    shape: DecodeShape
    batch: dict[str, np.ndarray]
    key: jax.Array
    options: dict[str, Any]

    @staticmethod
    def of(
        prompts: Any,
        *,
        key: Any,
        max_new_tokens: int,
        sampling: Sampling,
        eos: Any,
        pad: int,
        vocabulary: int,
        buckets: ShapeBuckets,
    ) -> Request:
        """Check the arguments of `HybridEngine.generate`.

        Args:
          prompts, key, max_new_tokens, eos, pad: its arguments.
          sampling: its arguments that choose tokens.
          vocabulary: the number of the model's tokens.
          buckets: rounds shapes up.

        Raises:
          ValueError: prompts are malformed or longer than the context, or an option is out of
            range.
        """
        rows = as_rows(prompts)
        check_vocabulary(rows, vocabulary, "prompt")
        ends = end_tokens(eos, pad, vocabulary)
        shape = buckets.decode_shape(len(rows), max(map(len, rows)), max_new_tokens, sampling)
        return Request(
            num_rows=len(rows),
            shape=shape,
            batch=left_padded(rows, shape.rows * buckets.copies, shape.prompt),
            key=check_key(key),
            options={
                "new": np.int32(max_new_tokens),
                "eos": ends,
                "pad": np.int32(pad),
                "numbers": sampling.numbers,
            },
        )
