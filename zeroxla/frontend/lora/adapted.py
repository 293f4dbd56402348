"""Turns a model with adapters into pure functions, from the functions of the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from zeroxla.frontend.base import Adapted, Tree
from zeroxla.frontend.lora.leaf_plan import BASE, LORA, LoraPlan
from zeroxla.frontend.lora.rewrite import evaluate
from zeroxla.program.paths import paths_of
from zeroxla.program.trace import trace


class ModelWithAdapters(Protocol):
    """The part of a `LoraModel` that `adapt_lora` uses."""

    @property
    def traced(self) -> list[LoraPlan]:
        """The plan of the newest batch, which `adapt_lora` writes here; empty before the first."""
        ...

    @property
    def plan(self) -> LoraPlan:
        """The plan in `traced`."""
        ...

    def make_plan(self, base: Adapted, key: jax.Array, batch: Any) -> LoraPlan:
        """Read a plan from the trace of the base's loss."""
        ...

    def merge(self, params: Any) -> Any:
        """Return the base's parameters with the adapters added."""
        ...


def adapt_lora(model: ModelWithAdapters, base: Adapted) -> Adapted:
    """Adapt a model with adapters; see `lora`.

    Args:
      model: the model with adapters.
      base: the functions of the model without them.
    """

    known: dict[Any, LoraPlan] = {}  # by the shapes of a batch, the newest last

    def plan_of(key: jax.Array, batch: Any) -> LoraPlan:
        leaves, tree = jax.tree.flatten(batch)
        shapes = (tree, *((x.shape, x.dtype) for x in leaves))
        plan = known.pop(shapes, None) or model.make_plan(base, key, batch)
        known[shapes] = plan
        model.traced[:] = [plan]
        return plan

    def newest() -> LoraPlan:
        return next(reversed(known.values())) if known else model.plan

    def init(key: jax.Array, batch: Any) -> tuple[Tree, Tree]:
        plan = plan_of(key, batch)
        params, model_state = base.init(key, batch)
        stored = {path: plan.stored(path, x) for path, x in paths_of(params)}
        own = jax.tree.unflatten(jax.tree.structure(params), list(stored.values()))
        return {BASE: own, LORA: plan.fresh_adapters(key, stored.__getitem__)}, model_state

    def loss(
        params: Tree, model_state: Tree, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[jax.Array, dict[str, jax.Array], Tree]:
        def own(params: Tree, model_state: Tree, batch: Any, key: jax.Array) -> Any:
            return base.loss(params, model_state, batch, key, train=train)

        return with_adapters(own, newest(), params, model_state, batch, key)

    def apply(params: Tree, model_state: Tree, *args: Any, **kwargs: Any) -> Any:
        values, tree = jax.tree.flatten((args, kwargs))
        arrays = {i: x for i, x in enumerate(values) if isinstance(x, jax.Array | np.ndarray)}

        def own(params: Tree, model_state: Tree, arrays: dict[int, jax.Array]) -> Any:
            args, kwargs = tree.unflatten([arrays.get(i, x) for i, x in enumerate(values)])
            assert base.apply is not None, "a pair of functions has no apply"
            return base.apply(params, model_state, *args, **kwargs)

        return with_adapters(own, newest(), params, model_state, arrays)

    return Adapted(
        init=init,
        loss=loss,
        apply=None if base.apply is None else apply,
        vocabulary=base.vocabulary,
        indices=tuple((part, *path) for part in (BASE, LORA) for path in base.indices),
        overwritten=base.overwritten,
        sown=base.sown,
        frozen=(f"^{BASE}/",),
        base=base,
        merge=model.merge,
        plan=newest,
    )


def with_adapters(fun: Callable[..., Any], plan: LoraPlan, params: Tree, *args: Any) -> Any:
    """Return `fun(base, *args)`, computed with the adapters.

    Args:
      fun: a function of the model's own parameters and other arrays.
      plan: the model's plan.
      params: parameters of the model with adapters.
      *args: pytrees of arrays; the other arguments of `fun`.
    """
    leaves = plan.evaluated_leaves(params)
    dtype = jax.tree.leaves(params[LORA])[0].dtype
    program, tree = trace(fun, plan.traced_shapes(dtype), *args)
    return tree.unflatten(evaluate(program, [*leaves, *jax.tree.leaves(args)]))
