"""Options of a command line, read by tyro into a command's dataclass.

tyro reads a copy of the dataclass: its fields have the texts and the forms that --help shows, and
no checks. The command's own dataclass, which checks its values, is made afterwards, so that an
error of a check is printed like every other error of the command.
"""

from __future__ import annotations

import dataclasses
import difflib
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from zeroxla.cli.errors import UsageError
from zeroxla.cli.option_groups import flag
from zeroxla.cli.option_help import CONFIG_HELP, groups_of, help_texts, paragraphs

_T = TypeVar("_T")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Other names of choices."""
_WORDS: dict[Any, str] = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


def read_options(
    command: str, arguments: Sequence[str], kind: type[_T], default: _T | None = None
) -> _T:
    """Return the options that a command line gives; a word that is none ends the program.

    Args:
      command: the command's name, for help and errors.
      arguments: the words after the command.
      kind: the dataclass of the command's options; its docstrings are the help.
      default: values of the options that the command line leaves out. None means the defaults of
        `kind`.

    Raises:
      UsageError: values do not go together.
      SystemExit: with status 0 after --help, and 2 after an option or a value that cannot be read.
    """
    arguments = _with_choices(arguments, kind)
    # The options' groups order the help; as prefixes of every flag they would be noise.
    read: Any = tyro.cli(
        _shown(kind, default),
        # This flag takes a word, so tyro does not make its opposite.
        args=["--resume=no" if word == "--no-resume" else word for word in arguments],
        prog=f"zeroxla {command}",
        description=_description(kind),
        config=(tyro.conf.OmitArgPrefixes,),
    )
    groups = groups_of(kind)
    try:
        return kind(
            **{
                field.name: _plain(getattr(read, field.name), groups.get(field.name))
                for field in dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
            }
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _with_choices(arguments: Sequence[str], kind: type[Any]) -> list[str]:
    """Return a command line in which short names of choices are written out.

    Raises:
      UsageError: a value is none of the choices of its option. tyro would list them as a set, in
        another order each time.
    """
    hints = [typing.get_type_hints(x) for x in groups_of(kind).values() or [kind]]
    known = {flag(name): sorted(_choices(hint)) for own in hints for name, hint in own.items()}
    choices = {name: found for name, found in known.items() if found}
    words = list(arguments)
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        name = flag(name[2:]) if name.startswith("--") else ""
        if name not in choices or (not equals and i + 1 == len(words)):
            continue
        value = value if equals else words[i + 1]
        value = SHORT.get(value, value)
        if value not in choices[name] and not value.startswith("--"):
            nearest = difflib.get_close_matches(value, choices[name], n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            raise UsageError(f"{name} {value}: give one of {', '.join(choices[name])}{hint}")
        if equals:
            words[i] = f"{name}={value}"
        else:
            words[i + 1] = value
    return words


def _choices(hint: Any) -> tuple[str, ...]:
    """Return the choices of an option; none if it takes other values, too."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint, *more = (x for x in typing.get_args(hint) if x is not type(None))
        if more:
            return ()
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def _description(kind: type[Any]) -> str:
    """Return a command's docstring in lines; tyro would join lines that are not indented."""
    width = min(shutil.get_terminal_size().columns, 100)
    parts = paragraphs(kind.__doc__ or "").split("\n\n")
    return "\n\n".join(
        textwrap.fill(part, width, initial_indent="  ", subsequent_indent="  ") for part in parts
    )


def _plain(value: Any, kind: Callable[..., Any] | None) -> Any:
    return value if kind is None else kind(**vars(value))


def _shown(kind: type[Any], default: Any) -> type[Any]:
    """Return the dataclass that tyro reads: that of a command, or of one of its groups."""
    hints = typing.get_type_hints(kind, include_extras=True)
    groups, texts = groups_of(kind), help_texts(kind)
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(kind):
        value = _default(field) if default is None else getattr(default, field.name)
        if field.name in groups:
            needed = value is dataclasses.MISSING  # the group has a positional argument
            own = _shown(groups[field.name], None if needed else value)
            whole = dataclasses.field() if needed else dataclasses.field(default_factory=own)
            fields.append((field.name, own, whole))
            continue
        text = texts.get(field.name, "")
        hint = hints[field.name]
        hint = Annotated[hint, _argument(field.name, hint, value, text)]
        if value is dataclasses.MISSING:
            fields.append((field.name, hint, dataclasses.field()))
        else:
            fields.append((field.name, hint, dataclasses.field(default=value)))
    if groups:
        hint = Annotated[Path | None, _argument("config", Path | None, None, CONFIG_HELP)]
        fields.append(("config", hint, dataclasses.field(default=None)))
    made = dataclasses.make_dataclass(kind.__name__, fields, kw_only=True, frozen=True)
    made.__doc__ = paragraphs(kind.__doc__ or "")
    return made


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _argument(name: str, hint: Any, value: Any, text: str) -> Any:
    """Return how tyro shows an option: an optional number as INT, and no default that is none."""
    positional = repeated = False
    while typing.get_origin(hint) is Annotated:
        hint, *more = typing.get_args(hint)
        positional = positional or tyro.conf.Positional in more
        repeated = repeated or tyro.conf.UseAppendAction in more
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        each = [x for x in typing.get_args(hint) if x is not type(None)]
        hint = each[0] if len(each) == 1 else hint
    if positional:
        metavar = name.upper()
    elif typing.get_origin(hint) is typing.Literal:
        metavar = "{" + ",".join(map(str, typing.get_args(hint))) + "}"
    elif typing.get_origin(hint) is tuple:
        word = _WORDS[typing.get_args(hint)[0]]
        metavar = word if repeated else f"[{word} ...]"
    else:
        metavar = _WORDS.get(hint)
    hidden = value is dataclasses.MISSING or value in (None, ())
    return tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint="" if hidden else None)
