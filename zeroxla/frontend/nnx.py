"""flax.nnx modules: the graph definition is fixed; variables go in and out of each call."""

import dataclasses
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer

from zeroxla.frontend.base import (
    Adapted,
    Tree,
    about_call,
    kept,
    module_loss,
    stream_key,
    to_flat,
    to_nested,
)
from zeroxla.frontend.nnx_cache import cache_kind, nnx_caches
from zeroxla.program.paths import Path


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StaticModule:
    """The static part of a module, from which it is put together again with arrays."""

    graphdef: Any
    paths: dict[Path, tuple[Any, ...]]
    """The module's own path (integers for list items) of each leaf."""
    streams: dict[Path, jax.ShapeDtypeStruct]
    """The key and the count of each rng stream; stacked layers have stacked streams."""


def is_nnx(model: Any) -> bool:
    """Return whether a model is an instance of an nnx module."""
    return isinstance(model, nnx.Module)


def adapt_nnx(model: Any, loss: Callable[..., Any] | None) -> Adapted:
    """Adapt `lambda rngs: Module` or a Module instance; see `adapt`, and `nnx_functions`.

    Raises:
      TypeError: the callable does not return an nnx.Module.
    """
    if isinstance(model, nnx.Module):
        warnings.warn(
            f"{type(model).__name__} was already allocated whole, on one device; pass "
            f"`lambda rngs: {type(model).__name__}(..., rngs=rngs)` to create it sharded",
            UserWarning,
            stacklevel=4,  # The caller of make_step, which calls adapt.
        )
    about: dict[str, Any] = {}

    def make_run(module: nnx.Module) -> Callable[..., Any]:
        about.update(about_call(module, loss), indices=indices_of(real_paths(module).values()))
        about["kind"] = cache_kind(module)
        return module_loss(module, loss)

    init, call, assemble = nnx_functions(model, make_run)

    def in_eval(params: Tree, model_state: Tree) -> Any:
        module = assemble(params, model_state, jax.random.key(0))
        module.eval()
        return module

    def apply(params: Tree, model_state: Tree, *args: Any, **kwargs: Any) -> Any:
        return in_eval(params, model_state)(*args, **kwargs)

    caches = nnx_caches(init, in_eval, about.pop("kind"))
    return Adapted.of(init, call, apply=apply, **caches, **about)


def nnx_functions(
    model: Any, make_run: Callable[[nnx.Module], Callable[..., Any]]
) -> tuple[
    Callable[..., tuple[Tree, Tree]], Callable[..., tuple[Any, Tree]], Callable[..., nnx.Module]
]:
    """Return `run(module, batch, train)` as pure functions.

    Parameters are the `nnx.Param` variables, subclasses included; a shared one comes once. Rng
    streams are not state: each call gives every stream its own key, `stream_key(key, path)`, and
    count 0. All other variables, and arrays that are plain attributes, are model state.
    `module.train()` or `module.eval()` is called before. Variables created during a call (`sow`)
    are dropped.

    Args:
      model: a module, or a function of rngs that returns one.
      make_run: given a module, returns `run`.

    Returns:
      `init(key, batch) -> (params, model_state)`, `call(params, model_state, batch, key, *, train)
      -> (result, model_state)`, and `assemble(params, model_state, key) -> module`.

    Raises:
      TypeError: the callable does not return an nnx.Module.
    """

    def build(key: jax.Array) -> nnx.Module:
        if isinstance(model, nnx.Module):
            return model
        # Sharding annotations are for another way to parallelise, and would need a mesh here.
        with nnx.use_eager_sharding(False):
            module = model(nnx.Rngs(key))
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f"the model function returned a {type(module).__name__}; expected "
                "`lambda rngs: Module(..., rngs=rngs)` that returns an nnx.Module"
            )
        own_arrays(module)
        return module

    paths: dict[Path, tuple[Any, ...]] = {}
    runs: list[Callable[..., Any]] = []

    def shapes(key: jax.Array) -> Any:
        module = build(key)
        runs.append(make_run(module))
        paths.update(real_paths(module))
        return take_apart(module)

    # eval_shape of the taken-apart module, not nnx.eval_shape: that returns a module whose plain
    # array attributes became ShapeDtypeStructs, which a later split takes for static values.
    graphdef, _, streams, _ = jax.eval_shape(shapes, jax.random.key(0))
    layout = StaticModule(graphdef=graphdef, paths=paths, streams=streams)
    (run,) = runs

    def init(key: jax.Array, batch: Any) -> tuple[Tree, Tree]:
        del batch  # An nnx module knows its shapes.
        _, params, _, state = take_apart(build(key))
        # Copies are made because an instance's arrays belong to its owner, and states are donated.
        return jax.tree.map(jnp.copy, (to_nested(params), to_nested(state)))

    def assemble(params: Tree, model_state: Tree, key: jax.Array) -> nnx.Module:
        leaves = {**to_flat(params), **to_flat(model_state)}
        return put_together(layout, {text(path): leaf for path, leaf in leaves.items()}, key)

    def call(
        params: Tree, model_state: Tree, batch: Any, key: jax.Array, *, train: bool
    ) -> tuple[Any, Tree]:
        module = assemble(params, model_state, key)
        module.train() if train else module.eval()
        result = run(module, batch, train)
        if not train:
            return result, model_state
        _, _, _, state = take_apart(module, layout.paths)
        return result, kept(model_state, to_nested(state))

    return init, call, assemble


def take_apart(
    module: nnx.Module, known: Collection[Path] | None = None
) -> tuple[Any, dict[Path, Any], dict[Path, Any], dict[Path, Any]]:
    """Return (graph definition, parameters, rng streams, all other arrays), by path as text.

    With `known` given, variables at other paths are left out.
    """

    def flat(state: Any) -> dict[Path, Any]:
        return {
            text(path): raw(path, leaf)
            for path, leaf in nnx.to_flat_state(state)
            if known is None or text(path) in known
        }

    graphdef, params, streams, others = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return graphdef, flat(params), flat(streams), flat(others)


def put_together(layout: StaticModule, leaves: Mapping[Path, Any], key: jax.Array) -> nnx.Module:
    """Return the module with these arrays, and with rng streams made from the key."""
    streams = {path: fresh(path, shape, key) for path, shape in layout.streams.items()}
    state = nnx.from_flat_state(
        [(layout.paths[path], leaf) for path, leaf in {**leaves, **streams}.items()]
    )
    # copy=True makes variables of the present trace. Otherwise their updates raise an error.
    return nnx.merge(layout.graphdef, state, copy=True)


def fresh(path: Path, shape: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """Return the stream's own key (split to its shape if stacked), or a zero count."""
    if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.zeros(shape.shape, shape.dtype)
    own = stream_key(key, "/".join(path[:-1]))
    return jax.random.split(own, shape.shape) if shape.shape else own


def real_paths(module: nnx.Module) -> dict[Path, tuple[Any, ...]]:
    """Return the module's own path of each path as text.

    Raises:
      ValueError: two paths read the same, as the keys 0 and "0" of one dict do.
    """
    paths: dict[Path, tuple[Any, ...]] = {}
    for path, _ in nnx.to_flat_state(nnx.state(module)):
        if text(path) in paths:
            raise ValueError(
                f"two variables have the same path as text: {'/'.join(text(path))}; "
                "rename a dict key"
            )
        paths[text(path)] = path
    return paths


def indices_of(paths: Iterable[tuple[Any, ...]]) -> tuple[Path, ...]:
    """Return the beginnings of a module's own paths that end in a whole number, as text."""
    beginnings = (path[: i + 1] for path in paths for i in range(len(path)))
    return tuple(sorted({text(path) for path in beginnings if isinstance(path[-1], int)}))


def own_arrays(module: nnx.Module) -> None:
    """Mark arrays that are plain attributes of the module or its parts as data.

    Flax does so when they are concrete; while tracing it takes them for static values, and the
    tracers leak into the graph definition.
    """
    for _, part in list(nnx.iter_modules(module)):
        for name, value in list(vars(part).items()):
            traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value))
            if traced and not isinstance(value, nnx.Variable | nnx.Pytree):
                setattr(part, name, nnx.data(value))


def text(path: tuple[Any, ...]) -> Path:
    return tuple(map(str, path))


def raw(path: tuple[Any, ...], leaf: Any) -> jax.Array:
    value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
    if not hasattr(value, "dtype"):
        raise ValueError(
            f"variable {'/'.join(text(path))} holds a {type(value).__name__}; a variable must hold "
            "one array"
        )
    return jnp.asarray(value)
