"""Layers of a pipeline: modules and functions, each as two pure functions of the array(s) that the
one before it returned."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from flax import nnx

from zeroxla.frontend.base import Tree
from zeroxla.frontend.linen import linen_functions
from zeroxla.frontend.nnx import nnx_functions

Init = Callable[[jax.Array, Any], tuple[Tree, Tree]]
Call = Callable[..., tuple[Any, Tree]]


@dataclasses.dataclass(frozen=True, slots=True)
class TiedLayer:
    """A layer whose parameters are those of every other one with its key.

    Attributes:
      key: names the parameters.
      module: a linen module, or a function of rngs that returns an nnx module; that of the first
        layer with the key makes the parameters.
      forward: called as `forward(module, x)` in the place of `module(x)`: the head that reads an
        embedding's table, for one.
    """

    key: str
    module: Any
    forward: Callable[[Any, Any], Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layer:
    """A layer.

    Attributes:
      name: of its parameters in the tree of the model; that of a tied layer is its key.
      kind: the type of what it was made of.
      init: (key, x) -> (params, model_state).
      call: (params, model_state, x, key, *, train) -> (y, model_state).
      tied: whether others may have the same name.
    """

    name: str
    kind: str
    init: Init
    call: Call
    tied: bool = False


def make_layer(what: Any, index: int) -> Layer:
    """Turn what a user gives as a layer into one.

    Args:
      what: a linen module, an nnx module or a function of rngs that returns one, a function of the
        array(s) before it, or a `TiedLayer`.
      index: of the layer: its parameters are called "layers_INDEX".

    Raises:
      ValueError: it is none of these.
    """
    tied = isinstance(what, TiedLayer)
    name = what.key if tied else f"layers_{index}"
    module, forward = (what.module, what.forward) if tied else (what, None)
    if isinstance(module, type):
        raise ValueError(f"layer {index} is the class {module.__name__}; give an instance")
    if isinstance(module, nn.Module):
        init, call = linen_functions(module, _run(forward, module))
        return Layer(name=name, kind=type(module).__name__, init=init, call=call, tied=tied)
    if isinstance(module, nnx.Module) or (callable(module) and _makes_module(module)):
        kinds: list[str] = []

        def make_run(made: nnx.Module) -> Callable[..., Any]:
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
    """Return `run(module, x, train)`."""
    if forward is not None:
        return lambda module, x, train: forward(module, x)
    options = _train_options(type(module).__call__)

    def run(module: Any, x: Any, train: bool) -> Any:
        return module(*_arguments(x), **{name: value(train) for name, value in options.items()})

    return run


def _function_layer(function: Callable[..., Any], name: str) -> Layer:
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
    """Return how a layer wants to be told whether it is trained: Flax has two ways."""
    try:
        names = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none to inspect
        return {}
    ways = {"train": lambda train: train, "deterministic": lambda train: not train}
    return {name: way for name, way in ways.items() if name in names}


def _makes_module(function: Callable[..., Any]) -> bool:
    """Whether a function is one of rngs: its one parameter without a default has that name."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p.name for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
    return needed == ["rngs"]
