"""Models of many kinds, split over axes: loss and gradients equal those of one device.

A row is a kind of model on a mesh of 8 devices: tensor, context and expert times node and device.
The slow tests have every pair of a kind, the length of an axis and the length of another; the
default run has every kind but `LONG` and every length of an axis; `-m full` has all rows.
"""

import dataclasses
import itertools
import math

import optax
import pytest
from tools.axis_models import KINDS, assert_equals_whole
from tools.quick import covering, quick_compilation  # noqa: F401

import zeroxla

pytestmark = pytest.mark.usefixtures("quick_compilation")


@dataclasses.dataclass(frozen=True)
class Row:
    """A kind of models and the lengths of a mesh's axes."""

    kind: str
    node: int
    device: int
    tensor: int
    context: int
    expert: int

    @property
    def axes(self) -> dict[str, int]:
        """The axes that split the work on one row."""
        return {"tensor": self.tensor, "context": self.context, "expert": self.expert}

    @property
    def is_whole(self) -> bool:
        """Whether it takes 8 devices, and splits the work on a row."""
        split = math.prod(self.axes.values())
        return split > 1 and self.node * self.device * split == 8

    def settings(self) -> list[tuple[str, object]]:
        """Return the kind and each length above 1."""
        return [(name, x) for name, x in dataclasses.asdict(self).items() if x != 1]

    def pairs(self) -> list[object]:
        """Return the pairs of a kind and lengths."""
        return list(itertools.combinations(dataclasses.asdict(self).items(), 2))

    def cost(self) -> float:
        """Return about how long it takes: each axis is searched for, and the loss traced again."""
        searches = sum(n > 1 for n in self.axes.values())
        return searches * (3 if self.kind == "Mixtral, dense" else 1)

    def __str__(self) -> str:
        lengths = (f"{name}{n}" for name, n in self.settings()[1:])
        return "-".join([self.kind, *lengths])


LONG = ("kind", "Mixtral, dense")
"""Left to the slow tests: another kind has the same layers."""
LENGTHS = ((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2))
ROWS = [
    row
    for kind in KINDS
    for lengths in itertools.product(*LENGTHS)
    if (row := Row(kind, *lengths)).is_whole
]
PAIRWISE = [param.values[0] for param in covering(ROWS, Row.pairs) if not param.marks]
CHOSEN = covering(PAIRWISE, lambda row: {*row.settings()} - {LONG}, cost=Row.cost)
CHOSEN += [pytest.param(row, marks=pytest.mark.full) for row in ROWS if row not in PAIRWISE]


@pytest.mark.parametrize("row", CHOSEN, ids=str)
def test_gradients_equal_those_of_the_whole_model(row):
    kind = KINDS[row.kind]
    mesh = zeroxla.make_mesh(nodes=row.node, **row.axes)
    batch = kind.batch(2 * row.node * row.device)
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    step = zeroxla.make_step(kind.make(), mesh, optax.sgd(0.1), config=config)
    assert_equals_whole(step, kind.make, batch)
