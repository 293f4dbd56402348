"""flax.linen modules: variables in, variables out."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList
from flax.errors import InvalidRngError, JaxTransformError

from zeroxla.frontend.base import (
    OVERWRITE_WITH_GRADIENT,
    Adapted,
    Tree,
    about_call,
    kept,
    module_loss,
    stream_key,
)
from zeroxla.frontend.linen_cache import linen_caches
from zeroxla.frontend.linen_collections import (
    INTERMEDIATES,
    PERTURBATIONS,
    Extras,
    sort_collections,
)
from zeroxla.program.compat import note_layout


def adapt_linen(module: nn.Module, loss: Callable[..., Any] | None) -> Adapted:
    """Adapt a linen module; see `adapt`, and `linen_functions`."""
    init, call = linen_functions(module, module_loss(module, loss))

    def apply(params: Tree, model_state: Tree, *args: Any, **kwargs: Any) -> Any:
        return module.apply({"params": params, **model_state}, *args, **kwargs)

    return Adapted.of(
        init,
        call,
        apply=apply,
        bound=lambda params, model_state: module.bind({"params": params, **model_state}),
        overwritten=lambda path: path[0] == OVERWRITE_WITH_GRADIENT,
        **linen_caches(module),
        **about_call(module, loss),
    )


def linen_functions(
    module: nn.Module, run: Callable[..., Any]
) -> tuple[Callable[..., tuple[Tree, Tree]], Callable[..., tuple[Any, Tree]]]:
    """Return `run(module, batch, train)` as two pure functions.

    Parameters are the collection "params". Every other collection is model state, mutable in
    training only, except the outputs of `sow` and `perturb` (see `is_output`). Outputs are dropped
    after a call; inside of it the loss may read them, as `apply.variables["losses"]`. Leaves that
    hold no arrays, such as the axis names in `params_axes`, are no state and stay as `init` made
    them. Boxed leaves (`nn.Partitioned` and other axis metadata) are unboxed; the layouts that they
    name have no effect. `init` runs with train=True, so that variables that only training uses
    exist too.

    Rng streams are found by tracing: a name that `make_rng` asks for gets `stream_key(key, name)`.
    (linen falls back to a "params" stream. Passing that instead would hide the names, and also
    which streams an `nn.scan` splits.) Streams that the module first tests with `has_rng`
    are not found; "dropout" is always there.

    Returns:
      `init(key, batch) -> (params, model_state)` and `call(params, model_state, batch, key, *,
      train) -> (result, model_state)`.

    Cost: one more abstract evaluation for train and one for eval.
    """
    extras: list[Extras] = []
    found: dict[bool, LinenCall] = {}

    def create(key: jax.Array, batch: Any) -> tuple[Tree, Tree]:
        def make(*denied: str) -> Any:
            create = nn.init(partial(run, train=True), module, mutable=DenyList(denied))
            return create({"params": key}, batch)

        try:
            boxed = make(PERTURBATIONS)
        except JaxTransformError:
            boxed = make(PERTURBATIONS, INTERMEDIATES)
        note_layout(nn.get_partition_spec(boxed))
        params, state, others = sort_collections(nn.meta.unbox(boxed))
        extras[:] = [others]
        return params, state

    def apply(
        params: Tree, state: Tree, batch: Any, key: jax.Array, *, train: bool, options: LinenCall
    ) -> tuple[Any, Tree]:
        (others,) = extras
        mutable = [*(state if train else ()), *others.outputs, *options.mutable]
        call = nn.apply(partial(run, train=train), module, mutable=mutable)
        rngs = {name: stream_key(key, name) for name in sorted(options.streams)}
        result, changed = call(others.variables(params, state), batch, rngs=rngs)
        return result, {**state, **others.state(changed)}

    def options_of(*args: Any, train: bool) -> LinenCall:
        options = LinenCall()
        while True:
            try:
                jax.eval_shape(partial(apply, train=train, options=options), *args)
                return options
            except InvalidRngError as error:
                name = re.search(r'needs PRNG for "([^"]+)"', str(error))
                if name is None or name[1] in options.streams:
                    raise
                options.streams.add(name[1])
            except JaxTransformError:  # It sows inside of one of JAX's loops, where flax cannot.
                if not options.mutable:
                    raise
                options.mutable.clear()

    def call(
        params: Tree, model_state: Tree, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[Any, Tree]:
        args = (params, model_state, batch, key)
        if not extras:  # in another process than `init`
            jax.eval_shape(create, key, batch)
        if train not in found:
            found[train] = options_of(*args, train=train)
        result, state = apply(*args, train=train, options=found[train])
        return result, kept(model_state, state)

    return create, call


@dataclasses.dataclass(frozen=True, slots=True)
class LinenCall:
    """How a module is called.

    Attributes:
      streams: the rng streams that it asks for.
      mutable: the collections of intermediates that it may sow into.
    """

    streams: set[str] = dataclasses.field(default_factory=lambda: {"dropout"})
    mutable: list[str] = dataclasses.field(default_factory=lambda: [INTERMEDIATES])
