"""`RowScores`: what an engine computes of whole rows of tokens, in one pass."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from zeroxla.hybrid.compile_cache import CompiledPrograms
from zeroxla.hybrid.prompts import as_whole_rows, check_vocabulary
from zeroxla.hybrid.shape_buckets import ShapeBuckets
from zeroxla.hybrid.tensor_copy import TensorCopy
from zeroxla.step.state import TrainState


class RowScores:
    """The part of `HybridEngine` that scores rows."""

    _compiled: CompiledPrograms
    _copy: TensorCopy
    _buckets: ShapeBuckets
    vocabulary: int

    def logprobs(self, state: TrainState, tokens: Any) -> np.ndarray:
        """Return the log-probability of each token after the first, given those before it.

        Args:
          state: the state of the engine's step.
          tokens: int[B, L]. Pad rows on the right: causal models do not see that.

        Returns:
          float32[B, L - 1], at temperature 1. The values at padding mean nothing.

        Raises:
          ValueError: `tokens` is not such an array, or its rows have more than one token beyond
            the context. The model does not read the last one.
        """
        tokens = as_whole_rows(tokens)
        check_vocabulary(tokens, self.vocabulary, "row")
        return self._run("logprobs", state, tokens[:, :-1], tokens[:, 1:])

    def logits(self, state: TrainState, tokens: Any) -> np.ndarray:
        """Return the logits of each position's next token, float32[B, L, V]; see `logprobs`."""
        tokens = as_whole_rows(tokens)
        check_vocabulary(tokens, np.iinfo(np.int32).max, "row")
        return self._run("logits", state, tokens)

    def values(self, state: TrainState, tokens: Any) -> np.ndarray:
        """Return the first logit at each token, float32[B, L]; see `logprobs`.

        This makes a critic or a reward model of any language model.
        """
        tokens = as_whole_rows(tokens)
        # The values of a critic need no token's own logit.
        check_vocabulary(tokens, np.iinfo(np.int32).max, "row")
        return self._run("values", state, tokens)

    def _run(self, name: str, state: TrainState, *arrays: np.ndarray) -> np.ndarray:
        """Run a program of whole rows on arrays [B, L], padded to a shape that is compiled."""
        self._copy.check(state)
        rows, length = arrays[0].shape
        shape = self._buckets.whole_rows(rows, length)
        padding = [(0, whole - own) for whole, own in zip(shape, (rows, length), strict=True)]
        whole = [np.pad(x.astype(np.int32), padding) for x in arrays]
        with self._copy.of(state.params) as (leaves, _):
            found = self._compiled.rows(name, leaves, state.model_state, *whole)
        return found[:rows, :length]

    def lower_logprobs(self, num_rows: int, length: int) -> jax.stages.Lowered:
        """Lower the program that `logprobs` would run on rows of a length; see `lower`."""
        return self._compiled.lower_logprobs(self._buckets.whole_rows(num_rows, length - 1))
