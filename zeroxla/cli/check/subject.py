"""The model and the batch that the command line of `zeroxla check` names."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import numpy as np
from flax import nnx

from zeroxla.cli.named_object import named_object
from zeroxla.frontend.base import AdaptsItself
from zeroxla.frontend.staged import StagedModel

ROWS = 2
"""Rows of a made batch for each device and micro-batch."""

LENGTH = 16
"""Tokens of its rows, at most; one more is the last token's target."""

_TOKENS = 16  # different tokens, if the model does not say how many it knows


def settings(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of --set: Python's own numbers, tuples, None and so on, or else text.

    Raises:
      ValueError: a word is not NAME=VALUE.

    >>> settings(["width=32", "act=relu"])
    {'width': 32, 'act': 'relu'}
    """
    found = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (equals and name.isidentifier()):
            raise ValueError(f"--set {word}: give NAME=VALUE, such as width=32")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def named_model(name: str, values: dict[str, Any]) -> tuple[Any, Any]:
    """Return the model that an object of the user's code stands for, and its batch, None if it
    brings none.

    Args:
      name: "module:name" or "file.py:name".
      values: what --set says.

    Raises:
      ValueError: there is no such object, it is no model and makes none, or it takes no such
        values.
    """
    return _model(named_object(name, "check"), name, values)


def _model(found: Any, name: str, values: dict[str, Any]) -> tuple[Any, Any]:
    if isinstance(found, type):
        return _made(found, name, values), None
    if isinstance(found, nn.Module):
        return (_called(found.clone, name, values) if values else found), None
    if isinstance(found, nnx.Module | AdaptsItself | StagedModel):
        return _as_it_is(found, name, values), None
    if isinstance(found, tuple | list) and len(found) == 2:
        first, second = found
        if callable(second) and not isinstance(second, type) and callable(first):
            return _as_it_is(tuple(found), name, values), None
        return _model(first, name, values)[0], second
    if not callable(found):
        raise ValueError(
            f"{name} is {found!r}, of type {type(found).__name__}; name a Flax module, a class of "
            "one, a pair (init, loss), or a function that returns a model"
        )
    needed = _needed(found)
    if len(needed) == 1 and needed[0] not in values:  # of an nnx module: rngs -> module
        return (functools.partial(found, **values) if values else found), None
    made = _called(found, name, values)
    if isinstance(made, type):
        raise ValueError(f"{name}() returned the class {made.__name__}; return an instance of it")
    return _model(made, f"{name}()", {})


def _made(kind: type[Any], name: str, values: dict[str, Any]) -> Any:
    """Return an instance of a class, or what `rngs` makes one with.

    Raises:
      ValueError: it is no class of a module, or needs other values.
    """
    if not issubclass(kind, nn.Module | nnx.Module):
        raise ValueError(
            f"{name} is the class {kind.__name__}, which is no Flax module; name a class of "
            "flax.linen.Module or flax.nnx.Module, or a function that returns a model"
        )
    if callable(getattr(kind, "tiny", None)):
        return _called(kind.tiny, f"{name}.tiny", values)  # pyright: ignore
    if issubclass(kind, nn.Module):
        return _called(kind, name, values)
    needed = _needed(kind.__init__)[1:]  # without self
    missing = [name for name in needed if name not in values and name != "rngs"]
    if missing:
        raise ValueError(
            f"{name} needs {', '.join(missing)}; give them with --set {missing[0]}=..."
        )
    return lambda rngs: kind(**{**values, "rngs": rngs})


def _called(make: Any, name: str, values: dict[str, Any]) -> Any:
    """Return what a function makes of the values of --set.

    Raises:
      ValueError: it takes others.
    """
    try:
        inspect.signature(make).bind(**values)
    except TypeError as error:
        given = " ".join(f"{n}={v}" for n, v in values.items()) or "nothing"
        raise ValueError(
            f"{name}{inspect.signature(make)} does not take --set {given}: {error}; change --set, "
            "or name a function that returns the model"
        ) from error
    return make(**values)


def _as_it_is(found: Any, name: str, values: dict[str, Any]) -> Any:
    if values:
        raise ValueError(
            f"--set {' '.join(values)}: {name} is made already; name its class, or a function that "
            "makes it"
        )
    return found


def _needed(function: Any) -> list[str]:
    """Return the arguments that a function cannot do without."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def named_batch(name: str) -> Any:
    """Return the batch of --batch: an object, or what a function without arguments returns.

    Raises:
      ValueError: there is no such object, or the function needs arguments.
    """
    found = named_object(name, "--batch")
    if not callable(found):
        return found
    if needed := _needed(found):
        raise ValueError(
            f"--batch {name} needs {', '.join(needed)}; name a function without arguments, or the "
            "batch itself"
        )
    return found()


def made_batch(vocabulary: int | None, context: int | None, parts: int) -> dict[str, np.ndarray]:
    """Return random tokens int32[rows, length + 1].

    Args:
      vocabulary: the number of tokens that the model knows; None if it does not say so.
      context: the longest sequence that it is meant for; None if it does not say so.
      parts: the number of devices times micro-batches.
    """
    length = min(context or LENGTH, LENGTH)
    shape = (ROWS * parts, length + 1)
    tokens = np.random.default_rng(0).integers(0, vocabulary or _TOKENS, shape, dtype=np.int32)
    return {"tokens": tokens}
