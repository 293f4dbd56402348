"""flax.linen modules: variables in, variables out."""

import dataclasses
import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
from flax.core import DenyList
from flax.core.scope import CollectionFilter
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
    Extras,
    sort_collections,
    sown_noted,
    sown_paths,
)
from zeroxla.program.compat import note_layout
from zeroxla.program.paths import Path


def adapt_linen(module: nn.Module, loss: Callable[..., Any] | None) -> Adapted:
    """Adapt a linen module; see `adapt`, and `linen_functions`."""
    init, call, is_sown = linen_functions(module, module_loss(module, loss))

    def apply(params: Tree, model_state: Tree, *args: Any, **kwargs: Any) -> Any:
        return module.apply({"params": params, **model_state}, *args, **kwargs)

    return Adapted.of(
        init,
        call,
        apply=apply,
        bound=lambda params, model_state: module.bind({"params": params, **model_state}),
        sown=is_sown,
        overwritten=lambda path: path[0] == OVERWRITE_WITH_GRADIENT,
        **linen_caches(module),
        **about_call(module, loss),
    )


def linen_functions(
    module: nn.Module, run: Callable[..., Any]
) -> tuple[
    Callable[..., tuple[Tree, Tree]], Callable[..., tuple[Any, Tree]], Callable[[Path], bool]
]:
    """Return `run(module, batch, train)` as two pure functions.

    Parameters are the collection "params". Every other collection is model state, mutable in
    training only, except what `sow` and `perturb` write, wherever they write it. These outputs are
    dropped after a call; inside of it the loss may read them, as `apply.variables["losses"]`.
    Leaves that hold no arrays, such as the axis names in `params_axes`, are no state and stay as
    `init` made them. Boxed leaves (`nn.Partitioned` and other axis metadata) are unboxed; the
    layouts that they name have no effect. `init` runs with train=True, so that variables that only
    training uses exist too.

    Rng streams are found by tracing: a name that `make_rng` asks for gets `stream_key(key, name)`.
    (linen falls back to a "params" stream. Passing that instead would hide the names, and also
    which streams an `nn.scan` splits.) Streams that the module first tests with `has_rng`
    are not found; "dropout" is always there.

    Returns:
      `init(key, batch) -> (params, model_state)`, `call(params, model_state, batch, key, *,
      train) -> (result, model_state)`, and `is_sown(path)`, which knows what was traced so far.

    Cost: one more abstract evaluation for train and one for eval.
    """
    extras: list[Extras] = []
    found: dict[bool, LinenCall] = {}

    def create(key: jax.Array, batch: Any) -> tuple[Tree, Tree]:
        def make(*denied: str) -> Any:
            create = nn.init(partial(run, train=True), module, mutable=DenyList(denied))
            with sown_noted():
                return create({"params": key}, batch)

        try:
            boxed = make()
        except JaxTransformError:
            boxed = make(INTERMEDIATES)
        note_layout(nn.get_partition_spec(boxed))
        params, state, others = sort_collections(nn.meta.unbox(boxed))
        extras[:] = [others]
        return params, state

    def apply(
        params: Tree,
        state: Tree,
        batch: Any,
        key: jax.Array,
        *,
        train: bool,
        streams: Collection[str],
        mutable: CollectionFilter,
    ) -> tuple[Any, Any]:
        call = nn.apply(partial(run, train=train), module, mutable=mutable)
        rngs = {name: stream_key(key, name) for name in sorted(streams)}
        return call(extras[0].variables(params, state), batch, rngs=rngs)

    def note(sown: set[Path], options: dict[str, Any], *args: Any) -> None:
        _, changed = apply(*args, **options)
        sown |= sown_paths(changed)  # no result of the trace: collections may hold names

    def options_of(*args: Any, train: bool) -> LinenCall:
        # It may sow into any collection, but inside of one of JAX's own loops flax cannot.
        (others,) = extras
        filters: list[CollectionFilter] = [DenyList("params"), DenyList(("params", INTERMEDIATES))]
        filters.append([*(args[1] if train else ()), *(path[0] for path in others.sown)])
        streams = {"dropout"}
        while True:
            options = {"train": train, "streams": streams, "mutable": filters[0]}
            sown: set[Path] = set()
            try:
                with sown_noted():
                    jax.eval_shape(partial(note, sown, options), *args)
            except InvalidRngError as error:
                name = re.search(r'needs PRNG for "([^"]+)"', str(error))
                if name is None or name[1] in streams:
                    raise
                streams.add(name[1])
            except JaxTransformError:
                if len(filters) == 1:
                    raise
                del filters[0]
            else:
                others.sown |= sown
                outputs = {path[0] for path in sown}
                if len(filters) == 3:
                    outputs.add(INTERMEDIATES)
                return LinenCall(streams=streams, outputs=sorted(outputs))

    def call(
        params: Tree, model_state: Tree, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[Any, Tree]:
        args = (params, model_state, batch, key)
        if not extras:  # in another process than `init`
            jax.eval_shape(create, key, batch)
        if train not in found:
            found[train] = options_of(*args, train=train)
        options = found[train]
        mutable = [*(model_state if train else ()), *options.outputs]
        result, changed = apply(*args, train=train, streams=options.streams, mutable=mutable)
        changed = extras[0].state(changed) if train else {}
        return result, kept(model_state, {**model_state, **changed})

    return create, call, lambda path: any(others.is_sown(path) for others in extras)


@dataclasses.dataclass(frozen=True, slots=True)
class LinenCall:
    """How a module is called.

    Attributes:
      streams: the rng streams that it asks for.
      outputs: the collections that it sows into.
    """

    streams: Collection[str]
    outputs: Sequence[str]
