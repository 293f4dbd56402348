"""flax.linen modules: variables in, variables out."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList, unfreeze
from flax.errors import InvalidRngError

from zeroxla.frontend.base import (
    Adapted,
    Tree,
    about_call,
    kept,
    module_loss,
    stream_key,
    to_flat,
)
from zeroxla.frontend.linen_cache import linen_caches

NOT_STATE = ("intermediates", "perturbations")
"""Collections that `sow` and `perturb` fill: outputs of one call, not state."""


def adapt_linen(module: nn.Module, loss: Callable[..., Any] | None) -> Adapted:
    """Adapt a linen module; see `adapt`, and `linen_functions`."""
    init, call = linen_functions(module, module_loss(module, loss))

    def apply(params: Tree, model_state: Tree, *args: Any, **kwargs: Any) -> Any:
        return module.apply({"params": params, **model_state}, *args, **kwargs)

    caches = linen_caches(module)
    return Adapted.of(init, call, apply=apply, **caches, **about_call(module, loss))


def linen_functions(
    module: nn.Module, run: Callable[..., Any]
) -> tuple[Callable[..., tuple[Tree, Tree]], Callable[..., tuple[Any, Tree]]]:
    """Return `run(module, batch, train)` as two pure functions.

    Parameters are the collection "params". Every other collection is model state, mutable in
    training only, except the outputs of `sow` and `perturb` (see `is_output`) and collections that
    hold no arrays, such as `params_axes`. Boxed leaves (`nn.Partitioned` and other axis metadata)
    are unboxed. `init` runs with train=True, so that variables that only training uses exist too.

    Rng streams are found by tracing: a name that `make_rng` asks for gets `stream_key(key, name)`.
    (linen falls back to a "params" stream. Passing that instead would hide the names, and also
    which streams an `nn.scan` splits.) Streams that the module first tests with `has_rng`
    are not found; "dropout" is always there.

    Returns:
      `init(key, batch) -> (params, model_state)` and `call(params, model_state, batch, key, *,
      train) -> (result, model_state)`.

    Cost: one more abstract evaluation for train and one for eval.
    """
    found: dict[bool, set[str]] = {}

    def init(key: jax.Array, batch: Any) -> tuple[Tree, Tree]:
        create = nn.init(partial(run, train=True), module, mutable=DenyList(NOT_STATE))
        variables = unfreeze(nn.meta.unbox(create({"params": key}, batch)))
        params = variables.pop("params", {})
        for path, leaf in to_flat(params).items():
            if not hasattr(leaf, "dtype"):
                raise ValueError(
                    f"parameter {'/'.join(path)} is a {type(leaf).__name__}; a parameter must be "
                    "one array: declare each array with a self.param of its own"
                )
        state = {n: c for n, c in variables.items() if jax.tree.leaves(c) and not is_output(c)}
        return params, state

    def apply(
        params: Tree, state: Tree, batch: Any, key: jax.Array, *, train: bool, streams: set[str]
    ) -> tuple[Any, Tree]:
        mutable = list(state) if train else []
        call = nn.apply(partial(run, train=train), module, mutable=mutable)
        rngs = {name: stream_key(key, name) for name in sorted(streams)}
        result, changed = call({"params": params, **state}, batch, rngs=rngs)
        return result, {**state, **unfreeze(changed)}

    def streams_of(*args: Any, train: bool) -> set[str]:
        streams = {"dropout"}
        while True:
            try:
                jax.eval_shape(partial(apply, train=train, streams=streams), *args)
                return streams
            except InvalidRngError as error:
                name = re.search(r'needs PRNG for "([^"]+)"', str(error))
                if name is None or name[1] in streams:
                    raise
                streams.add(name[1])

    def call(
        params: Tree, model_state: Tree, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[Any, Tree]:
        args = (params, model_state, batch, key)
        if train not in found:
            found[train] = streams_of(*args, train=train)
        result, state = apply(*args, train=train, streams=found[train])
        return result, kept(model_state, state)

    return init, call


def is_output(collection: Tree) -> bool:
    """Say whether `sow` filled the collection: its values are tuples, one item for each call.

    If they were kept as state, they would grow by one item in each step.
    """
    return any(isinstance(leaf, tuple) for leaf in to_flat(collection).values())
