"""`Outer`: how islands, which train on their own, exchange what they have learned."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import optax

from zeroxla.config.values import whole_number
from zeroxla.config.wire_format import WireFormat


def nesterov(rate: float = 0.7, momentum: float = 0.9) -> optax.GradientTransformation:
    """Return gradient descent with Nesterov's momentum, or without any at 0. The defaults are
    DiLoCo's outer optimizer."""
    return optax.sgd(rate, momentum=momentum or None, nesterov=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    """How islands exchange differences (DiLoCo, arXiv 2311.08105; Streaming DiLoCo, 2501.18512).

    An island trains for `every` steps by itself. Then the difference between the outer parameters,
    which all islands share, and its own ones is averaged over the islands. The outer optimizer
    takes the mean as a gradient, and each island goes on from the new outer parameters.

    The parameters are cut into `fragments`, which are exchanged at different steps of the `every`.

    Raises:
      ValueError: a value is out of range.
    """

    every: int = 100
    """Number of steps between two exchanges of a fragment (H)."""

    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=nesterov, repr=False
    )
    """Outer optimizer: any that works element by element, since it sees each fragment as a vector.
    """

    wire: WireFormat | None = None
    """Format of the differences. None sends float32."""

    error_feedback: bool = True
    """Adds to a difference what the exchange before lost by quantizing. Without a wire nothing is
    lost."""

    fragments: int | Literal["units"] = 1
    """Number of parts of equal size, exchanged one after another. 1 exchanges everything at once;
    more spread the bytes over the steps. "units" makes a part of each unit of the fetch plan: of a
    layer, if the model's layers are not scanned. Such parts differ in size."""

    delay: int = 0
    """Steps between the start of an exchange and the merge of its result. Training goes on in the
    meantime. 0 waits."""

    state: Literal["device", "host"] = "device"
    """Memory in which the outer parameters and the outer optimizer's state lie between exchanges.
    """

    mixing: float = 0.0
    """Share of an island's own parameters in those that it goes on from, in [0, 1)."""

    def __post_init__(self) -> None:
        by_number = () if self.fragments == "units" else (("fragments", 1),)
        for name, least in (("every", 1), *by_number, ("delay", 0)):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least))
        if not isinstance(self.optimizer, optax.GradientTransformation):
            raise ValueError(f"Outer(optimizer={self.optimizer!r}): give an optax transformation")
        if self.fragments != "units" and self.fragments > self.every:
            raise ValueError(
                f"Outer(fragments={self.fragments}, every={self.every}): one fragment is exchanged "
                "in a step; take at most as many fragments as steps"
            )
        if self.delay >= self.every:
            raise ValueError(
                f"Outer(delay={self.delay}, every={self.every}): an exchange ends before the next "
                f"one of the same fragment; take a delay below {self.every}"
            )
        if self.wire is not None and not isinstance(self.wire, WireFormat):
            raise ValueError(f"Outer(wire={self.wire!r}): give a WireFormat, or None for float32")
        if self.wire is not None and self.wire.rounding == "stochastic":
            raise ValueError(
                "Outer(wire=...) rounds stochastically; differences are rounded to nearest, and "
                "error_feedback carries what is lost"
            )
        if self.state not in ("device", "host"):
            raise ValueError(f'Outer(state={self.state!r}): take "device" or "host"')
        mixing: Any = self.mixing
        if not isinstance(mixing, int | float) or not 0 <= mixing < 1:
            raise ValueError(f"Outer(mixing={self.mixing!r}): take a number in [0, 1)")
        object.__setattr__(self, "mixing", float(mixing))

    @property
    def sentence(self) -> str:
        """How islands exchange, in a sentence."""
        parts = "a fragment for each unit" if self.fragments == "units" else self.fragments
        wire = "float32" if self.wire is None else self.wire.words
        return (
            f"The step trains inside zeroxla.Island: every {self.every} steps islands exchange "
            f"what has changed (outer: fragments {parts}, {wire}, merged {self.delay} steps later)."
        )

    def start_of(self, round: int) -> int:
        """Return the number of steps after which a round starts. Round r exchanges fragment
        r % fragments; the last fragment of a turn is exchanged after a multiple of `every`."""
        assert self.fragments != "units"
        turn, fragment = divmod(round, self.fragments)
        return turn * self.every + (fragment + 1) * self.every // self.fragments
