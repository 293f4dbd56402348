"""`FragmentState`: what an island keeps of a fragment between two exchanges."""

from __future__ import annotations

import dataclasses
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
      mean_error: the same of the part of the mean that this island makes, float32 [devices, part].
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
      num_steps: the number of steps taken (static).
    """

    inner: TrainState
    outer: tuple[FragmentState, ...]
    num_steps: int = dataclasses.field(default=0, metadata={"static": True})
