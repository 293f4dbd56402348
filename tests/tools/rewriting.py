"""Runs a loss as it was written and as it is rewritten."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from zeroxla import Rewrite
from zeroxla.frontend import adapt
from zeroxla.frontend.rewrite.rewritten_loss import RewrittenLoss
from zeroxla.frontend.rewrite.runs_on import RunsOn

KEY = jax.random.key(0)


class Both:
    """A loss of parameters and a batch, as it was written and rewritten."""

    def __init__(self, written: Callable[..., Any], **options: Any) -> None:
        """Take a loss (params, model_state, batch, key) -> (loss, metrics, model_state)."""
        self.written = written
        runs_on = RunsOn(cpus=True, split_axes=False)
        self.rewritten = RewrittenLoss(loss=written, options=Rewrite(**options), runs_on=runs_on)

    @staticmethod
    def of_model(model: Any, batch: Any, **options: Any) -> tuple[Both, Any, Any]:
        """Return the losses of a model for `make_step`, its parameters and its state."""
        adapted = adapt(model, None)
        params, state = jax.jit(adapted.init)(KEY, batch)
        return Both(functools.partial(adapted.loss, train=True), **options), params, state

    def findings(self, params: Any, batch: Any, state: Any = None) -> Any:
        """Return what is found, from shapes alone."""
        jax.eval_shape(self.rewritten, params, state, batch, KEY)
        return self.rewritten.newest.findings

    def gradients(self, params: Any, batch: Any, state: Any = None) -> tuple[Any, Any]:
        """Return (loss, gradients) of both."""
        found = [
            jax.jit(jax.value_and_grad(self._scalar(loss, state)))(params, batch)
            for loss in (self.written, self.rewritten)
        ]
        return found[0], found[1]

    def error(self, params: Any, batch: Any, state: Any = None) -> float:
        """Return the relative error of the rewritten loss and gradients, the larger of both."""
        (loss, grads), (other_loss, other) = self.gradients(params, batch, state)
        difference = jax.tree.map(lambda x, y: np.float64(x) - np.float64(y), grads, other)
        of_loss = abs(float(loss) - float(other_loss)) / abs(float(loss))
        return max(of_loss, norm(difference) / norm(grads))

    def temporaries(self, params: Any, batch: Any, state: Any = None) -> tuple[int, int]:
        """Return the bytes of temporaries of both, forward and backward, as compiled."""
        found = []
        for loss in (self.written, self.rewritten):
            lowered = jax.jit(jax.value_and_grad(self._scalar(loss, state))).lower(params, batch)
            found.append(lowered.compile().memory_analysis().temp_size_in_bytes)
        return found[0], found[1]

    @staticmethod
    def _scalar(loss: Callable[..., Any], state: Any) -> Callable[..., jax.Array]:
        return lambda params, batch: loss(params, state, batch, KEY)[0]


def norm(tree: Any) -> float:
    """Return the norm of all arrays of a pytree together."""
    return sum(float((np.asarray(x, np.float64) ** 2).sum()) for x in jax.tree.leaves(tree)) ** 0.5
