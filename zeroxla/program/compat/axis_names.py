"""Other names for the axes of a mesh, as models written for `pmap` have them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zeroxla.program.compat.redirect import redirect

AxisNames = tuple[tuple[str, tuple[str, ...]], ...]
"""Pairs: a model's name, and the axes of the mesh that it stands for."""

ONE = "one"
"""The axis that stands for all axes of one device."""

_names: Any = jax.make_user_context(())
"""The names that have a meaning here. They are a part of the keys under which JAX keeps traces."""


@contextlib.contextmanager
def axes_named(names: AxisNames, own: Sequence[str] = ()) -> Iterator[None]:
    """Return a context in which JAX's collectives know other names for a mesh's axes.

    Args:
      names: the names.
      own: the mesh's own axes.

    Raises:
      ValueError: a program uses a name that has no meaning.
    """
    if names:
        _answer_to_names()
    try:
        with _names(names):
            yield
    except NameError as error:
        found = re.search(r"unbound axis name: (\w+)", str(error))
        if found is None:
            raise
        known = ", ".join(name for name, _ in names)
        if found[1] in own:
            used = next((name for name, axes in names if found[1] in axes), found[1])
            raise ValueError(
                f"the model uses the axis {used!r} where it has no meaning: only the loss of a "
                "step without stages, and the making of its parameters, know the mesh's axes; "
                "leave the collective out elsewhere"
            ) from error
        raise ValueError(
            f"the model uses the axis {found[1]!r}, as in psum(x, {found[1]!r}), and a step does "
            f"not know it{f' (it knows {known})' if known else ''}; if it stands for all devices, "
            f'pass make_step(axis_names={{{found[1]!r}: ("node", "device")}})'
        ) from error


@contextlib.contextmanager
def axes_of_one(axes: Sequence[str]) -> Iterator[str]:
    """Return a context in which a mesh's axes, and other names of them, stand for one axis.

    JAX has no rule for a `vmap` over one of several axes of an `all_gather`. So the axes of one
    device are bound as a single one.

    Args:
      axes: the mesh's axes.

    Yields:
      The name of the axis that the caller binds.
    """
    _answer_to_names()
    names = dict.fromkeys((*dict(_names.value), *axes), (ONE,))
    with _names(tuple(names.items())):
        yield ONE


@functools.cache
def _answer_to_names() -> None:
    """Let JAX's collectives look up their axis names."""

    def look_up(own: Any, *args: Any, **kwargs: Any) -> Any:
        if names := dict(_names.value):
            call = inspect.signature(own).bind(*args, **kwargs)
            call.arguments["axis_name"] = _replaced(call.arguments["axis_name"], names)
            args, kwargs = call.args, call.kwargs
        return own(*args, **kwargs)

    for function in vars(jax.lax).values():
        if inspect.isfunction(function) and "axis_name" in inspect.signature(function).parameters:
            redirect(function, look_up)


def _replaced(axes: Any, names: dict[str, tuple[str, ...]]) -> Any:
    """Return an argument `axis_name`, one name or several, in the mesh's own names."""
    several = isinstance(axes, tuple | list)
    found = [a for axis in (axes if several else (axes,)) for a in names.get(axis, (axis,))]
    if set(found) == {ONE}:
        return ONE
    return found[0] if len(found) == 1 and not several else tuple(found)
