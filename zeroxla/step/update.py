"""`OptimizerUpdate`: from gradients to the next parameters and the next optimizer state.

Optimizers may take extra arguments (`optax.GradientTransformationExtraArgs`). A step has two of
them: `value`, the loss, and `grad`, its gradient. It cannot compute the loss anew with other
parameters, as a line search wants to with `value_fn`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zeroxla.mesh.placement import Placement
from zeroxla.step.state import natural, stored
from zeroxla.wire.leaves import Layout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OptimizerUpdate:
    """The update of a state's parameters and optimizer state. All arrays are in stored form.

    Attributes:
      optimizer: the optax transformation.
      layout: the layout of the parameters.
      placements: the placements of parameters and optimizer state.
    """

    optimizer: optax.GradientTransformation
    layout: Layout
    placements: tuple[tuple[Placement, ...], tuple[Placement, ...]]

    def __call__(
        self, params: Any, opt_state: Any, grads: Any, finite: jax.Array, loss: jax.Array
    ) -> tuple[Any, Any, list[jax.Array]]:
        """Return the parameters and the optimizer's state after a step, and the learning rates that
        the optimizer's state holds.

        Args:
          params, opt_state: those before the step.
          grads: the gradients.
          finite: whether these and the loss are finite. If not, nothing changes.
          loss: the loss.
        """
        in_params, in_opt = self.placements
        layout, masked = self.layout, optax.MaskedNode()
        whole = natural(params, in_params)
        gradients = layout.trainable(natural(grads, in_params), masked)
        updates, new_state = self.optimizer.update(
            gradients,
            natural(opt_state, in_opt),
            layout.trainable(whole, masked),
            **_extra_arguments(self.optimizer, value=loss, grad=gradients),
        )
        new = optax.apply_updates(layout.trainable(whole, masked), updates)
        new_params = stored(layout.with_frozen(new, whole), in_params)
        keep = keep_if(finite)
        # The state of a schedule has the same name, and is no array.
        found = optax.tree_utils.tree_get_all_with_path(new_state, "learning_rate")
        rates = [x for _, x in found if isinstance(x, jax.Array)]
        kept = layout.with_frozen(layout.trainable(keep(new_params, params), masked), params)
        return kept, keep(stored(new_state, in_opt), opt_state), rates


def keep_if(finite: jax.Array) -> Callable[[Any, Any], Any]:
    """Return the function (new, old) -> new if the step was finite, old otherwise."""
    return functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))


def check_extra_arguments(optimizer: optax.GradientTransformation, params: Any) -> None:
    """Check that an optimizer needs no more than a step has.

    Args:
      optimizer: the optimizer.
      params: shapes of the parameters that it updates.

    Raises:
      ValueError: it needs another argument; each one is named.

    Cost: traces the update of an optimizer that takes extra arguments, for one leaf; for all of
    them if it does not take one.
    """
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return
    leaves, tree = jax.tree.flatten(params)
    one = tree.unflatten([*leaves[:1], *(optax.MaskedNode() for _ in leaves[1:])])
    try:
        _trace_update(optimizer, one)
    except _NeedsMoreError:
        raise
    except Exception:  # it may want to see all leaves, such as those that it has labels for
        _trace_update(optimizer, params)


class _NeedsMoreError(ValueError):
    """An optimizer's update needs an argument that a step does not have."""


def _trace_update(optimizer: optax.GradientTransformationExtraArgs, params: Any) -> None:
    def update(params: Any, value: jax.Array) -> Any:
        extra = _extra_arguments(optimizer, value=value, grad=params)
        return optimizer.update(params, optimizer.init(params), params, **extra)

    try:
        jax.eval_shape(update, params, jax.ShapeDtypeStruct((), jnp.float32))
    except TypeError as error:
        pattern = r"(\w+)\S*\(\) missing \d+ required (?:keyword-only|positional) arguments?: (.*)"
        found = re.search(pattern, str(error))
        if found is None:
            raise
        name, missing = found[1], " and ".join(re.findall(r"'(\w+)'", found[2]))
        remedy = (
            "take it without its line search, as optax.lbfgs(learning_rate, linesearch=None)"
            if "value_fn" in missing
            else "take another one"
        )
        raise _NeedsMoreError(
            f"the optimizer's part {name} needs the argument {missing} in its update; a step has "
            f"one loss and its gradient for it (value, grad), and computes no others: {remedy}"
        ) from error


def _extra_arguments(optimizer: optax.GradientTransformation, **known: Any) -> dict[str, Any]:
    """Return those of the known arguments that an optimizer's update takes."""
    if not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return {}
    parameters = inspect.signature(optimizer.update).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return known
    return {name: value for name, value in known.items() if name in parameters}
