"""The help texts of options: the strings under a dataclass's fields, as one line each."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from typing import Any

CONFIG_HELP = (
    "TOML or JSON file with options of this command, such as steps = 100; tables may group them as "
    "this help does. Flags win over the file."
)
"""The help of the flag --config."""


def groups_of(kind: type[Any]) -> dict[str, type[Any]]:
    """Return the classes of a command's groups of options, by name; none if it has no groups."""
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


def help_texts(kind: type[Any]) -> dict[str, str]:
    """Return the help of each field of a dataclass, inherited ones included."""
    texts: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        if dataclasses.is_dataclass(part):
            texts |= _own_texts(part)
    return texts


def paragraphs(text: str) -> str:
    """Return a docstring with one line for each paragraph."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in parts)


def shown(value: Any) -> str:
    """Return a default as a table shows it; "" if the help text says what the default is."""
    if value in (None, ()):
        return ""
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _own_texts(kind: type[Any]) -> dict[str, str]:
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            texts[field.target.id] = paragraphs(str(text.value.value))
    return texts
