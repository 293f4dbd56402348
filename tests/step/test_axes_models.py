"""Models of many kinds, split over axes: loss and gradients equal those of one device.

A row is a kind of model on a mesh of 8 devices: tensor, context and expert times node and device.
The default run has a small model on two axes; tests/step/test_axes_batches.py has it on the third
one. The slow tests have every pair of a kind, the length of an axis and the length of another, and
`-m full` has all rows.
"""

import dataclasses
import itertools
import math

import optax
import pytest
from tools.axis_models import KINDS, Kind, Series, assert_equals_whole, series
from tools.quick import covering, quick_compilation, thinned  # noqa: F401

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

    def __str__(self) -> str:
        lengths = (f"{name}{n}" for name, n in self.settings()[1:])
        return "-".join([self.kind, *lengths])


SMALL = {"series": Kind(make=Series, batch=series)}
QUICK = [Row("series", node=1, device=2, tensor=2, context=1, expert=2)]
LENGTHS = ((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2))
ROWS = [
    row
    for kind in KINDS
    for lengths in itertools.product(*LENGTHS)
    if (row := Row(kind, *lengths)).is_whole
]
PAIRWISE = [param.values[0] for param in covering(ROWS, Row.pairs) if not param.marks]
CHOSEN = thinned(QUICK, slow=PAIRWISE)
CHOSEN += [pytest.param(row, marks=pytest.mark.full) for row in ROWS if row not in PAIRWISE]


@pytest.mark.parametrize("row", CHOSEN, ids=str)
def test_gradients_equal_those_of_the_whole_model(row):
    kind = (KINDS | SMALL)[row.kind]
    mesh = zeroxla.make_mesh(nodes=row.node, **row.axes)
    batch = kind.batch(2 * row.node * row.device)
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    step = zeroxla.make_step(kind.make(), mesh, optax.sgd(0.1), config=config)
    assert_equals_whole(step, kind.make, batch)
