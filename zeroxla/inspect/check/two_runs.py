"""Two runs of a step from one state: the second must give what the first gives, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.inspect.check.checked_model import CheckedModel
from zeroxla.inspect.check.reference import Gradients
from zeroxla.program.paths import paths_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class TwoRuns:
    """The results of two runs.

    Attributes:
      gradients: the loss and the gradients of the trained leaves in the first run.
      different: the names of results that differ between the runs.
    """

    gradients: Gradients
    different: tuple[str, ...]


def run_twice(checked: CheckedModel) -> TwoRuns:
    """Run the step twice from copies of one state.

    Cost: the compilation of the step, and one copy of the state.
    """
    results: list[dict[str, Any]] = []
    found = None
    for _ in range(2):
        state, metrics = checked.step.take(jax.tree.map(jnp.copy, checked.state), checked.batch)
        results.append(_arrays(state, metrics))
        if found is None:
            found = Gradients(
                loss=float(metrics["loss"]),
                leaves=[
                    np.asarray(g)[tuple(map(slice, leaf.placement.shape))]
                    for g, leaf in zip(
                        jax.tree.leaves(state.opt_state[0]),
                        (leaf for leaf in checked.layout if not leaf.frozen),
                        strict=True,
                    )
                ],
            )
    assert found is not None
    first, second = results
    different = tuple(name for name, x in first.items() if x.tobytes() != second[name].tobytes())
    return TwoRuns(gradients=found, different=different)


def _arrays(state: Any, metrics: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return what a step computes, by name; rates per second are not among it."""
    named = {"/".join(path): x for path, x in paths_of(state.params)}
    named |= {f"model state {'/'.join(path)}": x for path, x in paths_of(state.model_state)}
    own = {f"metric {n}": x for n, x in metrics.items() if not n.endswith("_per_s")}
    return {name: np.asarray(x) for name, x in {**own, **named}.items()}
