"""`Run`: a model under test, and what its checks share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import zeroxla
from gauntlet_parts.case import Built, Case
from gauntlet_parts.reference import Reference, real_parts, reference_of, worst_leaf
from zeroxla.step.state import as_in_model

NUM_DEVICES = 4


def optimizer(built: Built) -> optax.GradientTransformation:
    """Return gradient descent with momentum, whose first step is plain gradient descent."""
    return optax.sgd(built.rate, momentum=0.9)


class Run:
    """A model under test, and what its checks share."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.built: Built = case.build()

    def step(self, mesh: Any, **options: Any) -> zeroxla.Step:
        """Return a step that splits every leaf, however small."""
        config = options.pop("config", None) or zeroxla.ZeroConfig(persistence_threshold=0)
        return zeroxla.make_step(
            options.pop("model", self.built.model),
            mesh,
            optimizer(self.built),
            loss=self.built.loss,
            config=config,
            **self.built.options,
        )

    @functools.cached_property
    def plain(self) -> zeroxla.Step:
        """The ZeRO-3 step on 2 x 2 devices."""
        return self.step(zeroxla.make_mesh(nodes=2, devices_per_node=2))

    @functools.cached_property
    def _first(self) -> zeroxla.TrainState:
        return self.plain.init(jax.random.key(0), self.built.batch)

    def start(self) -> zeroxla.TrainState:
        """Return the state before the first step, as a copy: a step takes its memory."""
        return jax.tree.map(lambda x: x.copy(), self._first)

    @functools.cached_property
    def after_a_step(self) -> tuple[zeroxla.TrainState, float]:
        """The state after a step of ZeRO-3, not to be given to a step, and the step's loss."""
        state, metrics = self.plain(self.start(), self.built.batch)
        return state, float(metrics["loss"])

    @functools.cached_property
    def reference(self) -> Reference:
        """The model on one device, with the parameters of `start`."""
        state = self._first
        model_state = jax.tree.map(np.asarray, state.model_state)
        # The containers hold parameters; the model's other state lies in plain dicts.
        plain = dataclasses.replace(state, containers=None)
        return reference_of(
            self.built, zeroxla.full_params(state), as_in_model(model_state, plain)
        )

    @functools.cached_property
    def expected(self) -> tuple[float, dict[str, np.ndarray], float]:
        """The reference's loss, its gradients, and its loss after a step."""
        loss, gradients, after = self._step_of(self.reference)
        return loss, real_parts(self.reference.names(gradients), conjugate=True), after

    def _step_of(self, reference: Reference) -> tuple[float, Any, float]:
        """Return a reference's loss, its gradients, and its loss after a step."""
        batch, slices = self.built.batch, self.built.slices or NUM_DEVICES
        loss, gradients = reference.gradients(reference.params, batch, slices)
        after, _ = reference.gradients(reference.after(gradients, self.built.rate), batch, slices)
        return loss, gradients, after

    @functools.cached_property
    def rounding(self) -> float:
        """How far other last bits of its parameters take the reference's loss after a step: the
        largest relative difference of four."""
        return max(abs(after / self.expected[2] - 1) for _, after in self._rounded)

    @functools.cached_property
    def gradient_rounding(self) -> float:
        """How far the same takes the reference's gradients: the largest difference, relative to the
        largest gradient of a leaf."""
        return max(worst_leaf(found, self.expected[1])[1] for found, _ in self._rounded)

    @functools.cached_property
    def _rounded(self) -> list[tuple[dict[str, np.ndarray], float]]:
        """The reference's gradients, and its loss after a step, with other last bits of its
        parameters."""
        draw = np.random.default_rng(0)

        def rounded(x: Any) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                return x
            signs = draw.integers(-1, 2, x.shape)
            return (x * (1 + signs * np.finfo(x.dtype).eps)).astype(x.dtype)

        found = []
        for _ in range(4):
            params = jax.tree.map(rounded, self.reference.params)
            _, gradients, after = self._step_of(dataclasses.replace(self.reference, params=params))
            named = real_parts(self.reference.names(gradients), conjugate=True)
            found.append((named, after))
        return found
