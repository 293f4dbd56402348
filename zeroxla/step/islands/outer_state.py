"""`FragmentState`: what an island keeps of a fragment between two exchanges."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from zeroxla.step.state import TrainState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FragmentState:
    """A fragment of the outer parameters. Arrays [devices, ...] have one row on each device.

    Attributes:
      copy: the outer parameters, float32 [devices, size]: the same on all islands.
      opt_state: the outer optimizer's state, the same on all islands.
      error: what this island's last difference lost by quantizing, float32 [devices, size]; None
        without error feedback.
      mean_error: the same of the part of the mean that this island makes, float32 [devices, size]
        with zeros elsewhere.
    """

    copy: jax.Array
    opt_state: Any
    error: jax.Array | None
    mean_error: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class IslandState:
    """The state of an island.

    Attributes:
      inner: the training state.
      outer: the state of each fragment.
      clock: the steps that islands have in common (static); an island that was late takes the
        others'.
      round: the number of the next round that it takes part in (static).
      versions: for each fragment, the number after that of the last round in its outer parameters
        (static).
    """

    inner: TrainState
    outer: tuple[FragmentState, ...]
    clock: int = dataclasses.field(default=0, metadata={"static": True})
    round: int = dataclasses.field(default=0, metadata={"static": True})
    versions: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def with_fragment(self, fragment: int, **changed: Any) -> IslandState:
        """Return a state with another state of one fragment."""
        outer = list(self.outer)
        outer[fragment] = dataclasses.replace(outer[fragment], **changed)
        return dataclasses.replace(self, outer=tuple(outer))

    def with_version(self, fragment: int, version: int) -> IslandState:
        """Return a state with another version of one fragment."""
        versions = (*self.versions[:fragment], version, *self.versions[fragment + 1 :])
        return dataclasses.replace(self, versions=versions)

    def with_leaves(self, changed: Mapping[int, jax.Array]) -> IslandState:
        """Return a state with other leaves of the parameters."""
        leaves, tree = jax.tree.flatten(self.inner.params)
        params = tree.unflatten([changed.get(i, x) for i, x in enumerate(leaves)])
        return dataclasses.replace(self, inner=dataclasses.replace(self.inner, params=params))
