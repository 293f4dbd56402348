"""`Pins`: what a user says about a model's leaves and arrays, by the paths of the leaves."""

from __future__ import annotations

import dataclasses

from zeroxla.config.splits import SplitPin, Splits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pins:
    """Matches pins with leaves.

    Attributes:
      splits: what the user says.
      paths: the paths of the leaves.
    """

    splits: Splits
    paths: tuple[str, ...]

    def of_leaves(self, axis: str) -> list[tuple[str, SplitPin | None]]:
        """Return for each leaf its path, and the pin that matches it on an axis.

        Raises:
          ValueError: a pin matches no leaf, or two that contradict each other match one.
        """
        pins = self.splits.pins("leaves", axis)
        for pin in pins:
            if not any(map(pin.finds, self.paths)):
                raise ValueError(
                    f"{pin} matches no leaf; there are {_some(self.paths)}. Correct the "
                    "expression, or leave the pin out"
                )
        return [(path, _one([pin for pin in pins if pin.finds(path)], path)) for path in self.paths]


def _one(pins: list[SplitPin], path: str) -> SplitPin | None:
    for other in pins[1:]:
        if other.dim != pins[0].dim:
            raise ValueError(
                f"{pins[0]} and {other} both match the leaf {path!r}; make one of the expressions "
                "narrower"
            )
    return pins[0] if pins else None


def _some(paths: tuple[str, ...]) -> str:
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(map(repr, paths[:4])) + more
