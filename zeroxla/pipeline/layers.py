"""Layers of a pipeline: a module or function becomes two pure functions, `init` and `call`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax

from zeroxla.frontend.base import Tree
from zeroxla.frontend.linen import linen_functions

Init = Callable[[jax.Array, Any], tuple[Tree, Tree]]
"""(key, x) -> (params, model_state)."""
Call = Callable[..., tuple[Any, Tree]]
"""(params, model_state, x, key, *, train) -> (y, model_state)."""


@dataclasses.dataclass(frozen=True, slots=True)
class TiedLayer:
    """A layer that shares its parameters with every other tied layer of the same key.

    Attributes:
      key: the name of the parameters.
      module: a linen module, or a function of rngs that returns an nnx module. The first layer with
        the key makes the parameters.
      forward: called as `forward(module, x)` instead of `module(x)`, for example by a head that
        reads an embedding's table.
    """

    key: str
    module: Any
    forward: Callable[[Any, Any], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layer:
    """A layer as pure functions. `x` is the array or the tuple of arrays from the layer before.

    Attributes:
      name: the name of its parameters in the model's tree; a tied layer's key.
      kind: the name of the class or function that the layer was made from.
      init: makes the parameters.
      call: computes the layer.
      tied: whether other layers may have the same name.
    """

    name: str
    kind: str
    init: Init
    call: Call
    tied: bool = False


def make_layer(given: Any, index: int) -> Layer:
    """Make a layer of an entry in the user's list.

    Args:
      given: a linen module, an nnx module or a function of rngs that returns one, a function of the
        array(s) from the layer before, or a `TiedLayer`.
      index: the layer's place in the list; its parameters are called "layers_INDEX".

    Raises:
      ValueError: `given` is none of these.
    """
    tied = isinstance(given, TiedLayer)
    name = given.key if tied else f"layers_{index}"
    module, forward = (given.module, given.forward) if tied else (given, None)
    if isinstance(module, type):
        raise ValueError(f"layer {index} is the class {module.__name__}; give an instance")
    if isinstance(module, nn.Module):
        init, call, _ = linen_functions(module, _run(forward, module))
        return Layer(name=name, kind=type(module).__name__, init=init, call=call, tied=tied)
    # Imported here because importing flax.nnx takes long.
    from zeroxla.frontend.nnx import is_nnx, nnx_functions

    if is_nnx(module) or (callable(module) and _makes_module(module)):
        kinds: list[str] = []

        def make_run(made: Any) -> Callable[..., Any]:
            kinds.append(type(made).__name__)
            return _run(forward, made)

        init, call, _ = nnx_functions(module, make_run)
        return Layer(name=name, kind=kinds[0], init=init, call=call, tied=tied)
    if callable(module) and not tied:
        return _function_layer(module, name)
    raise ValueError(
        f"layer {index} is a {type(module).__name__}; a layer is a flax.linen module, "
        "`lambda rngs: nnx.Module`, a function of arrays, or a TiedLayer of a module"
    )


def _run(forward: Callable[[Any, Any], Any] | None, module: Any) -> Callable[..., Any]:
    """Return `run(module, x, train)`, which calls a module or passes it to `forward`."""
    if forward is not None:
        return lambda module, x, train: forward(module, x)
    options = _train_options(type(module).__call__)

    def run(module: Any, x: Any, train: bool) -> Any:
        return module(*_arguments(x), **{name: value(train) for name, value in options.items()})

    return run


def _function_layer(function: Callable[..., Any], name: str) -> Layer:
    """Make a layer without parameters of a function."""
    options = _train_options(function)

    def call(
        params: Tree, model_state: Tree, x: Any, key: jax.Array, *, train: bool
    ) -> tuple[Any, Tree]:
        del params, key
        told = {name: value(train) for name, value in options.items()}
        return function(*_arguments(x), **told), model_state

    kind = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    return Layer(name=name, kind=kind, init=lambda key, x: ({}, {}), call=call)


def _arguments(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _train_options(function: Callable[..., Any]) -> dict[str, Callable[[bool], bool]]:
    """Return the arguments that tell a layer whether it is trained, as functions of `train`.

    Flax layers have one of two: `train` or `deterministic`.
    """
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none to inspect
        return {}
    ways = {"train": lambda train: train, "deterministic": lambda train: not train}
    return {name: way for name, way in ways.items() if name in names}


def _makes_module(function: Callable[..., Any]) -> bool:
    """Whether a function makes a module: `rngs` is its only parameter without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    return needed == ["rngs"]
