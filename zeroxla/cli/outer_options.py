"""The options of an `Outer`, how islands exchange, and the `Outer` that they make."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from zeroxla.cli.option_groups import LARGEST, flag
from zeroxla.cli.wire_text import wire_fields, wire_format

if TYPE_CHECKING:
    from zeroxla.config.outer import Outer
    from zeroxla.planning.islands import Islands

_EVERY = 100
_UNITS = "units"
_PREFIX = "outer_"


@dataclass(frozen=True, kw_only=True)
class OuterOptions:
    """Islands: groups of devices that train by themselves, and exchange after many steps what has
    changed. Every flag beside --outer changes one field of its preset."""

    outer: Literal["none", "diloco", "streaming"] = "none"
    """Preset. none: no islands. diloco: all parameters at once, in float32. streaming: in 4 bits, a
    tenth at a time, while training goes on."""
    outer_every: int | None = None
    """Steps between two exchanges of a parameter. Default: 100."""
    outer_fragments: str | None = None
    """Number of parts of the parameters, which are exchanged one after another; `units` makes one
    of each unit that is gathered together. Default: 1; streaming: 10."""
    outer_delay: int | None = None
    """Steps in which an exchange goes on beside training, before its result is merged. Default: 0;
    streaming: half of the way to the next fragment."""
    outer_wire: str | None = None
    """Format of the differences, as in the group of wires. Default: none, which is float32;
    streaming: int4/128,rotated."""
    outer_error_feedback: bool = True
    """Add to a difference what the exchange before has lost by quantizing."""
    outer_learning_rate: float | None = None
    """Learning rate of the outer optimizer, which is SGD. Default: 0.7; streaming: 1, or 0.7 with
    --outer-every below 20."""
    outer_momentum: float | None = None
    """Nesterov's momentum of the outer optimizer; 0 has none. Default: 0.9; streaming: 0.8,
    or 0.9 with --outer-every below 20."""
    outer_mixing: float | None = None
    """Share of an island's own parameters in those that it goes on from after an exchange. Default:
    0; streaming with --outer-every below 20: 0.5."""
    outer_state: Literal["device", "host"] | None = None
    """Memory of the outer parameters and the outer optimizer's state. Default: device."""

    def __post_init__(self) -> None:
        if self.outer == "none":
            if given := self.given():
                raise ValueError(
                    f"{', '.join(map(flag, given))}: without effect, there are no islands; leave "
                    "out, or give --outer streaming"
                )
            return
        if self.outer_wire is not None:
            wire_fields("--outer-wire", self.outer_wire)
        every = _EVERY if self.outer_every is None else self.outer_every
        fragments, delay = self.outer_fragments, self.outer_delay
        if fragments not in (None, _UNITS) and not (fragments.isdecimal() and int(fragments)):
            raise ValueError(
                f"--outer-fragments {fragments}: give {_UNITS}, or a number of parts, 1 or more"
            )
        if fragments not in (None, _UNITS) and int(fragments) > every:
            raise ValueError(
                f"--outer-fragments {fragments} with --outer-every {every}: one fragment is "
                "exchanged in a step; take at most as many fragments as steps"
            )
        if delay is not None and delay >= every:
            raise ValueError(
                f"--outer-delay {delay} with --outer-every {every}: an exchange ends before the "
                f"next one of the same parameters; take a delay below {every}"
            )
        for name in ("outer_mixing", "outer_momentum"):
            if (value := getattr(self, name)) is not None and not 0 <= value < 1:
                raise ValueError(f"{flag(name)} {value} must be at least 0, and below 1")
        rate = self.outer_learning_rate
        if rate is not None and not 0 < rate <= LARGEST:
            raise ValueError(f"--outer-learning-rate {rate} must be above 0, and finite in float32")

    def given(self) -> list[str]:
        """Return the names of the options beside the preset that are not their defaults."""
        return [
            field.name
            for field in dataclasses.fields(OuterOptions)
            if field.name != "outer" and getattr(self, field.name) != field.default
        ]

    def make(self) -> Outer | None:
        """Return the value of `ZeroConfig.outer`.

        Raises:
          ValueError: options do not go together.
        """
        from zeroxla.config.outer import Outer  # here, because --help need not wait for JAX
        from zeroxla.config.presets import streaming

        if self.outer == "none":
            return None
        every = _EVERY if self.outer_every is None else self.outer_every
        preset = streaming(every) if self.outer == "streaming" else Outer(every=every)
        names = ("delay", "error_feedback", "state", "mixing")
        values = {name: getattr(self, _PREFIX + name) for name in names}
        given: dict[str, Any] = {n: value for n, value in values.items() if value is not None}
        if (parts := self.outer_fragments) is not None:
            given["fragments"] = parts if parts == _UNITS else int(parts)
        if self.outer_wire is not None:
            given["wire"] = wire_format("--outer-wire", self.outer_wire)
        if self.outer_learning_rate is not None or self.outer_momentum is not None:
            given["optimizer"] = self._optimizer(every)
        try:
            return dataclasses.replace(preset, **given)
        except ValueError as error:
            raise ValueError(f"--outer {self.outer} with these options: {error}") from error

    def _optimizer(self, every: int) -> Any:
        """Return the outer optimizer."""
        from zeroxla.config.outer import nesterov  # here, because --help need not wait for JAX
        from zeroxla.config.presets import outer_sgd

        flags = {"rate": self.outer_learning_rate, "momentum": self.outer_momentum}
        given = {name: value for name, value in flags.items() if value is not None}
        return nesterov(**{**outer_sgd(self.outer, every), **given})


@dataclass(frozen=True, kw_only=True)
class IslandsOptions(OuterOptions):
    """Islands: groups of devices that train by themselves, and exchange after many steps what has
    changed. Every flag beside --outer changes one field of its preset."""

    islands: int | None = None
    """Number of islands on this machine, which share out its devices; --nodes and --batch are those
    of one island. Default: none are started, and --outer needs to run inside zeroxla island or
    zeroxla launch --islands, whose number counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.islands is not None and self.islands < 1:
            raise ValueError(f"--islands {self.islands} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class PlannedIslands(OuterOptions):
    """Islands: groups of devices that train by themselves, and exchange after many steps what has
    changed. The cluster is that of one island. Every flag beside --outer changes one field of its
    preset."""

    islands: int | None = None
    """Number of islands. Default: 2."""
    island_link: str | None = None
    """Link of an island to the others: a name in the table of links, or a rate such as 100mbit.
    Default: 1gbit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.islands is not None and self.islands < 1:
            raise ValueError(f"--islands {self.islands} must be at least 1")
        given = [name for name in ("islands", "island_link") if getattr(self, name) is not None]
        if self.outer == "none" and given:
            raise ValueError(
                f"{', '.join(map(flag, given))}: without effect, there are no islands; leave out, "
                "or give --outer streaming"
            )

    def planned(self) -> Islands | None:
        """Return the islands of a plan; None without --outer."""
        from zeroxla.planning.islands import Islands  # here, because --help need not wait for JAX

        if self.outer == "none":
            return None
        usual = Islands()
        return Islands(
            num=usual.num if self.islands is None else self.islands,
            link=usual.link if self.island_link is None else self.island_link,
        )


OUTER_LEAST = {"outer.outer_every": 1, "outer.outer_delay": 0}
"""The least values of numbers in this group, for `OptionGroups.check_at_least`."""
