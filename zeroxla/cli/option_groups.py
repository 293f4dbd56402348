"""Dataclasses of options in groups, which become a command's flags and JSON in a run folder."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import tyro

LARGEST = 3.4028234663852886e38
"""The largest float32: a larger number is infinite in the program."""

LARGEST_SEED = 2**32 - 1
"""The largest seed. JAX takes 32 bits of a seed, so a larger one would stand for a smaller one."""


AUTO = "auto"
_RESUME: dict[tuple[str, ...], Any] = {(): True, (AUTO,): AUTO, ("no",): False}

# `--resume`, `--resume auto`, or `--resume no`, which is also written `--no-resume`.
Resume = Annotated[
    bool | Literal["auto"],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[auto]",
        instance_from_str=lambda words: _resume(tuple(words)),
        is_instance=lambda value: value in _RESUME.values(),
        str_from_instance=lambda value: [str(value)],
    ),
]


class OptionGroups:
    """A dataclass whose fields are dataclasses of options."""

    younger_groups: ClassVar[frozenset[str]] = frozenset()
    """Groups that runs of earlier versions do not have; they then have the defaults."""

    def check_at_least(self, limits: Mapping[str, float]) -> None:
        """Check that numbers are neither too small nor infinite. Those that are None pass.

        Args:
          limits: the least value of each option, by "group.name".

        Raises:
          ValueError: a number is less, NaN, or infinite as a float32.
        """
        for path, least in limits.items():
            group, name = path.split(".")
            value = getattr(getattr(self, group), name)
            if value is not None and not value >= least:
                raise ValueError(f"{flag(name)} {value} must be at least {least}")
            if isinstance(value, float) and value > LARGEST:
                raise ValueError(f"{flag(name)} {value} must be finite in float32")

    def to_dict(self) -> dict[str, Any]:
        """Return nested plain values that JSON can hold."""
        assert dataclasses.is_dataclass(self)

        def plain(value: Any) -> Any:
            return str(value) if isinstance(value, Path) else value

        return {
            group: {name: plain(value) for name, value in options.items()}
            for group, options in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, Any]]) -> Self:
        """Make options from the result of `to_dict`. A field that is missing has its default.

        Raises:
          ValueError: there are other fields than this version has.
        """
        kinds = typing.get_type_hints(cls)
        try:
            return cls(**{group: _group(kinds[group], fields) for group, fields in values.items()})
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"the run was made by another version of zeroxla ({error}); resume it with that one"
            ) from error


class JobOptions(OptionGroups):
    """The options of a command that has runs."""

    younger_groups = frozenset({"tracking"})

    output: Any  # a group with the options run, resume, save_every and keep
    tracking: Any  # a TrackingOptions


def check_seed(seed: int) -> None:
    """Check that a seed fits.

    Raises:
      ValueError: it is negative, or has more than 32 bits.
    """
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"--seed {seed} must be between 0 and {LARGEST_SEED}")


def _resume(words: tuple[str, ...]) -> Any:
    if words not in _RESUME:
        raise ValueError(f"{' '.join(words)}: write --resume, or --resume {AUTO}")
    return _RESUME[words]


def flag(name: str) -> str:
    """Return the command-line spelling of an option."""
    return "--" + name.replace("_", "-")


def _group(kind: Any, fields: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(hints[name], value) for name, value in fields.items()})


def _value(hint: Any, value: Any) -> Any:
    """Return an option's value, of the type that its hint says, from a value of JSON."""
    if value is None:
        return None
    if Path in typing.get_args(hint):
        return Path(value)
    return tuple(value) if isinstance(value, list) else value
