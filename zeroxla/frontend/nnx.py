"""flax.nnx modules: the graph definition is fixed; variables go in and out of each call."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError

from zeroxla.frontend.base import (
    Adapted,
    Tree,
    about_call,
    kept,
    module_loss,
    to_flat,
    to_nested,
)
from zeroxla.frontend.nnx_cache import cache_kind, nnx_caches
from zeroxla.frontend.nnx_variables import (
    StaticModule,
    indices_of,
    overwritten_paths,
    own_arrays,
    put_together,
    real_paths,
    set_mode,
    take_apart,
    text,
    whole_numbers,
)
from zeroxla.program.compat import layouts_ignored, note_layout
from zeroxla.program.paths import Path


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
        about["overwritten"] = overwritten_paths(module).__contains__
        about["whole_numbers"] = whole_numbers(module)
        about["kind"] = cache_kind(module)
        return module_loss(module, loss)

    init, call, assemble = nnx_functions(model, make_run)
    if whole := about.pop("whole_numbers"):
        warnings.warn(
            f"{', '.join(whole)}: an nnx.Param of whole numbers or flags has no gradient; it is "
            "kept as model state and stays as it is, unless the model sets it",
            UserWarning,
            stacklevel=4,
        )

    def in_eval(params: Tree, model_state: Tree) -> Any:
        module = assemble(params, model_state, jax.random.key(0))
        set_mode(module, train=False)
        return module

    def apply(params: Tree, model_state: Tree, *args: Any, **kwargs: Any) -> Any:
        return in_eval(params, model_state)(*args, **kwargs)

    caches = nnx_caches(init, in_eval, about.pop("kind"))
    return Adapted.of(init, call, apply=apply, bound=in_eval, **caches, **about)


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
    are dropped, also those of an instance that was called before.

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
        # A variable with a sharding annotation would need a mesh here.
        with layouts_ignored(), nnx.use_eager_sharding(False):
            try:
                module = model(nnx.Rngs(key))
            except TraceContextError as error:
                raise ValueError(
                    "the model function changes a variable that was made before it was called, "
                    f"such as an nnx.Rngs(...) that is the default of an argument ({error}); "
                    "parameters are made under jax.jit, so make rngs inside: pass "
                    "`lambda rngs: Module(..., rngs=rngs)`"
                ) from error
        if not isinstance(module, nnx.Module):
            raise TypeError(
                f"the model function returned a {type(module).__name__}; expected "
                "`lambda rngs: Module(..., rngs=rngs)` that returns an nnx.Module"
            )
        own_arrays(module)
        note_layout(nnx.get_partition_spec(nnx.state(module, graph=True)))
        return module

    if isinstance(model, nnx.Module):
        # What an earlier call has sown would be state, on which each step's `sow` goes on.
        with nnx.set_graph_mode(True):
            nnx.pop(model, nnx.Intermediate)
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
        set_mode(module, train=train)
        result = run(module, batch, train)
        if not train:
            return result, model_state
        _, _, _, state = take_apart(module, layout.paths)
        return result, kept(model_state, to_nested(state))

    return init, call, assemble
