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
          ValueError: `tokens` is not such an array, or its rows are longer than the context.
        """
        return self._rows(state, tokens, "logprobs")[:, : np.shape(tokens)[1] - 1]

    def logits(self, state: TrainState, tokens: Any) -> np.ndarray:
        """Return the logits of each position's next token, float32[B, L, V]; see `logprobs`."""
        return self._rows(state, tokens, "logits")[:, : np.shape(tokens)[1]]

    def values(self, state: TrainState, tokens: Any) -> np.ndarray:
        """Return the first logit at each token, float32[B, L]; see `logprobs`.

        This makes a critic or a reward model of any language model.
        """
        return self._rows(state, tokens, "values")[:, : np.shape(tokens)[1]]

    def _rows(self, state: TrainState, tokens: Any, name: str) -> np.ndarray:
        """Run a program of whole rows on tokens, padded to a shape that is compiled."""
        tokens = as_whole_rows(tokens)
        # The values of a critic need no token's own logit.
        size = self.vocabulary if name == "logprobs" else np.iinfo(np.int32).max
        check_vocabulary(tokens, size, "row")
        self._copy.check(state)
        rows, length = tokens.shape
        shape = self._buckets.whole_rows(rows, length)
        whole = np.zeros(shape, np.int32)
        whole[:rows, :length] = tokens
        with self._copy.of(state.params) as (leaves, _):
            return self._compiled.rows(name, leaves, state.model_state, whole)[:rows]

    def lower_logprobs(self, num_rows: int, length: int) -> jax.stages.Lowered:
        """Lower the program that `logprobs` would run on rows of a length; see `lower`."""
        return self._compiled.lower_rows("logprobs", self._buckets.whole_rows(num_rows, length))
