"""`Adapted`, the form that every model gets, and the checks and conversions that its makers
share."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from zeroxla.mesh.axes import BATCH_AXES
from zeroxla.program.compat import axes_of_one
from zeroxla.program.paths import Path, paths_of

Tree = dict[str, Any]
"""Nested dicts with string keys and arrays as leaves."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Containers:
    """The lists, tuples and dicts in which a model has its parameters.

    Attributes:
      paths: the path of each leaf, in the tree's order.
      tree: the structure of the model's own tree.
    """

    paths: tuple[Path, ...]
    tree: Any

    def filled(self, params: Tree) -> Any:
        """Return nested dicts of parameters as the model has them."""
        leaves = to_flat(params)
        return self.tree.unflatten([leaves[path] for path in self.paths])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Caching:
    """The calls of a module that keeps a cache of keys and values in its own variables.

    `empty(rows, places, dtype, use) -> cache`: nested dicts of zeros for this many rows and places.
    Floating arrays have the given dtype; None means the module's own dtypes. `use(model)` calls the
    module once, on tokens int32[rows, places] and with the other arguments that its call wants.

    `apply(params, model_state, cache, *args, **kwargs) -> (result, cache)`: as `Adapted.apply`.
    """

    empty: Callable[[int, int, Any, Callable[[Callable[..., Any]], Any]], Tree]
    apply: Callable[..., tuple[Any, Tree]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adapted:
    """A model as two pure functions. Compared and hashed by identity.

    `init(key, batch) -> (params, model_state)`: two nested dicts (string keys, arrays). It works
    under jit and eval_shape.

    `loss(params, model_state, batch, key, *, train) -> (loss, metrics, model_state)`: a floating
    scalar, a dict of scalars, and the state after the call. In evaluation the state is returned as
    it was given. All random streams come from `key`.

    `apply(params, model_state, *args, **kwargs)`: calls the module without changing its state and
    without randomness. None for a pair of functions.

    `bound(params, model_state)`: the module with these leaves, in evaluation, with its attributes
    and methods. None for a pair of functions, and for a model with adapters.

    `caching`: the same with a cache. None if the module keeps no cache in its variables.

    `make_cache(rows, places, dtype) -> cache`: an empty cache, any pytree of arrays, for a module
    whose call takes its cache as an argument and returns it. None if the module makes none.

    `signature`: the signature of the module's call, `self` aside; None for a pair of functions.

    `context`: the longest sequence that the module is meant for, if it says so; see `CONTEXT`.

    `vocabulary`: the number of different tokens that the module's own loss knows, if the module
    says so; see `VOCABULARY`. The tokens of a batch are below it.

    `indices`: the paths of those names that are whole numbers or tuples in the model itself, as
    the items of an nnx list are, and the statistics of `nnx.SpectralNorm`.

    `containers()`: how parameters lie in the lists and tuples of a pair of functions; None if they
    lie in nested dicts. Known after `init` was traced.

    `overwritten(path)`: whether the gradient of this leaf of the model state is its new value, as
    the scales of fp8 dots are; see `OVERWRITE_WITH_GRADIENT`.

    `sown(path)`: whether a leaf of the module's variables is an output of its `sow`, and so neither
    a parameter nor model state. Known after `init` was traced.

    `frozen`: regular expressions as in `ZeroConfig.frozen`, which hold for this model.

    `base` and `merge`: for a model with adapters, the model without them, and a traceable function
    that turns parameters with adapters, in natural shapes, into parameters of the base. None for
    any other model.

    `plan`: for a model with adapters, a function that returns its `LoraPlan` for the newest batch.
    None for any other model.
    """

    init: Callable[..., tuple[Tree, Tree]]
    loss: Callable[..., tuple[jax.Array, dict[str, jax.Array], Tree]]
    apply: Callable[..., Any] | None = None
    bound: Callable[[Tree, Tree], Any] | None = None
    caching: Caching | None = None
    make_cache: Callable[[int, int, Any], Any] | None = None
    signature: inspect.Signature | None = None
    context: int | None = None
    vocabulary: int | None = None
    indices: tuple[Path, ...] = ()
    containers: Callable[[], Containers | None] = lambda: None
    overwritten: Callable[[Path], bool] = lambda path: False
    sown: Callable[[Path], bool] = lambda path: False
    frozen: tuple[str, ...] = ()
    base: Adapted | None = None
    merge: Callable[[Tree], Tree] | None = None
    plan: Callable[[], Any] | None = None

    @staticmethod
    def of(init: Callable[..., Any], call: Callable[..., Any], **others: Any) -> Adapted:
        """Make an `Adapted` from a module's functions.

        Args:
          init: the attribute `init`.
          call: like `loss`, but it returns (the result of the module's loss, model_state).
          **others: the other attributes.
        """

        def loss(
            params: Tree, model_state: Tree, batch: Any, key: jax.Array, *, train: bool
        ) -> tuple[jax.Array, dict[str, jax.Array], Tree]:
            result, state = call(params, model_state, batch, key, train=train)
            return *checked(result), state

        return Adapted(init=init, loss=loss, **others)


class AdaptsItself(abc.ABC):
    """A model that makes its own `Adapted`, such as one with adapters; `adapt` asks it to."""

    __slots__ = ()

    @abc.abstractmethod
    def adapt(self, loss: Callable[..., Any] | None) -> Adapted:
        """Return the model as pure functions.

        Args:
          loss: the argument `loss` of `make_step`; None means the model's own loss.
        """


def with_axes_of_one(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in which the mesh axes `node` and `device` are bound, with length 1.

    A loss may name them, and linen calls the loss while parameters are made, which is no work of
    several devices.

    Args:
      fun: a function of arrays that returns a pytree of arrays.
    """

    def bound(*args: Any) -> Any:
        with axes_of_one(BATCH_AXES) as name:
            found = jax.vmap(fun, in_axes=None, axis_size=1, axis_name=name)(*args)
        return jax.tree.map(lambda x: x[0], found)

    return bound


def stream_key(key: jax.Array, name: str) -> jax.Array:
    """Return the key of a named rng stream: `fold_in(key, crc32(name))`, the low 31 bits.

    linen streams have a name of their own ("dropout"), nnx streams are named by their path
    ("drop/rngs"). It is crc32 and not `hash`, because `hash` differs between processes.
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()) & 0x7FFFFFFF)


CONTEXT = (
    "length",
    "max_length",
    "max_len",
    "max_seq_len",
    "max_position_embeddings",
    "context_length",
    "block_size",
)
"""Usual names of the attribute that says how long a language model's sequences may be."""

CONFIG_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "max_len", "block_size")
"""The same in a module's attribute `config`; there `max_length` may be about something else."""


VOCABULARY = ("vocab", "vocab_size")
"""Usual names of the attribute that says how many different tokens a language model knows."""


def about_call(module: Any, loss: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the attributes of `Adapted` that follow from a module: `signature`, `context` and, if
    the loss is its own, `vocabulary`."""
    sizes = (getattr(module, name, None) for name in VOCABULARY if loss is None)
    config = getattr(module, "config", None)
    found = [getattr(module, name, None) for name in CONTEXT]
    found += [getattr(config, name, None) for name in CONFIG_CONTEXT]
    lengths = [n for n in found if isinstance(n, int) and n > 0]
    call = inspect.signature(type(module).__call__)
    return {
        "signature": call.replace(parameters=list(call.parameters.values())[1:]),
        "context": lengths[0] if lengths else None,
        "vocabulary": next((n for n in sizes if isinstance(n, int) and n > 0), None),
    }


def module_loss(module: Any, loss: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return `run(module, batch, train)`, the module's own loss or the one given.

    Raises:
      ValueError: there is no loss, or it cannot be called in this way.
    """
    name = type(module).__name__
    if loss is not None:
        check_signature(loss, "loss=", "loss(apply, batch, *, train)", 2, train=True)
        return lambda module, batch, train: loss(module, batch, train=train)
    if not callable(getattr(module, "loss", None)):
        raise ValueError(
            f"{name} has no method loss(batch, *, train) and no loss= is given; add the method, "
            "or pass loss=function(apply, batch, *, train)"
        )
    check_signature(module.loss, f"{name}.loss", "loss(batch, *, train)", 1, train=True)
    return lambda module, batch, train: module.loss(batch, train=train)


def check_signature(
    function: Callable[..., Any], what: str, wanted: str, num_args: int, **kwargs: Any
) -> None:
    """Raise ValueError unless the function can be called with num_args and these keywords."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # Some builtins have none to inspect.
        return
    try:
        signature.bind(*[None] * num_args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{what} has the signature {signature}, but is called as {wanted}: {error}"
        ) from error


def checked(result: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return (loss, metrics) from the result of a loss.

    Raises:
      ValueError: the loss is not a floating scalar, or metrics is not a dict of scalars.
    """
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(loss, jax.Array | float) and not hasattr(loss, "dtype"):
        raise ValueError(
            f"the loss returned a {type(loss).__name__}; expected a floating scalar or "
            "(scalar, metrics)"
        )
    loss = jnp.asarray(loss)
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ValueError(
            f"the loss has shape {loss.shape} and dtype {loss.dtype}; it must be a floating "
            "scalar: return its mean"
        )
    if not isinstance(metrics, Mapping):
        raise ValueError(
            f"the loss's metrics are a {type(metrics).__name__}; expected a dict of scalars"
        )
    for name, value in metrics.items():
        is_array = hasattr(value, "dtype") or isinstance(value, bool | int | float)
        if not isinstance(name, str) or not is_array:
            raise ValueError(
                f"metric {name!r} is a {type(value).__name__}; expected a dict of scalars with "
                "string names"
            )
        if jnp.shape(value) != ():
            raise ValueError(
                f"metric {name!r} has shape {jnp.shape(value)}; each metric must be a scalar: "
                "return its mean"
            )
    return loss, {name: jnp.asarray(value) for name, value in metrics.items()}


def empty_like(x: Any, dtype: Any) -> jax.Array:
    """Return zeros for an entry of a cache. Floating entries get `dtype`, if it is given."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.zeros(x.shape, dtype if is_float and dtype is not None else x.dtype)


OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
"""Flax's name for a collection, or a kind of variable, whose gradient is the new value."""


def kept(old: Tree, new: Tree) -> Tree:
    """Return the new model state in the old one's structure, shapes and dtypes.

    Dtypes are cast back (a counter `n + 1` may be promoted). Any other change is an error, because
    the state goes into the next step.

    Raises:
      ValueError: a leaf was added, is missing, or changed its shape.
    """
    before, after = dict(paths_of(old)), dict(paths_of(new))
    changed = sorted("/".join(path) for path in before.keys() ^ after.keys())
    changed += [
        f"{'/'.join(path)}: {jnp.shape(before[path])} -> {jnp.shape(after[path])}"
        for path in before.keys() & after.keys()
        if jnp.shape(before[path]) != jnp.shape(after[path])
    ]
    if changed:
        raise ValueError(
            f"the model state changed its leaves or shapes in a step: {', '.join(changed)}; "
            "state must keep its structure (create every variable in init)"
        )
    return jax.tree.map(lambda a, b: jnp.asarray(b, jnp.asarray(a).dtype), old, new)


def to_flat(tree: Tree) -> dict[Path, Any]:
    """Return {path: leaf} of nested dicts; everything that is not a dict is a leaf."""
    flat = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= {(name, *path): leaf for path, leaf in to_flat(value).items()}
        else:
            flat[(name,)] = value
    return flat


def to_nested(flat: Mapping[Path, Any]) -> Tree:
    """Return nested dicts of {path: leaf}."""
    tree: Tree = {}
    for path, leaf in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    return tree
