"""What plan_islands.py compares with: the simulated compute utilization of Streaming DiLoCo.

The figures are those of table 4 of arXiv 2501.18512. The paper describes its simulation in section
3.1 and in its appendix; `ASSUMPTIONS` says what is taken from where.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from zeroxla.config.outer import Outer
from zeroxla.planning.exchange_time import ExchangeTime, Piece

SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The shares of the time in which islands compute: the columns of the table."""

EVERY = 100
FRAGMENT_LAYERS = 3
ISLANDS = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A model of the table.

    Attributes:
      name: in the table.
      num_parameters, num_layers: its size.
      step_s: the seconds of a step, computation alone.
    """

    name: str
    num_parameters: float
    num_layers: int
    step_s: float

    @property
    def fragments(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each fragment: three, at equal distances."""
        num = self.num_layers // FRAGMENT_LAYERS
        return tuple(tuple(range(first, self.num_layers, num)) for first in range(num))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A method of the table.

    Attributes:
      name: in the table.
      every: the steps between two exchanges of a parameter; 1 for data parallelism.
      streams: whether fragments of three layers are exchanged at different steps.
      delay: the steps that an exchange may take.
      bits: bits of a parameter on the wire.
    """

    name: str
    every: int = EVERY
    streams: bool = False
    delay: int = 0
    bits: int = 16

    def exchanges(self, model: Model) -> ExchangeTime:
        """Return the exchanges of a model, layer by layer."""
        whole = (tuple(range(model.num_layers)),)
        fragments = model.fragments if self.streams else whole
        outer = Outer(every=self.every, fragments=len(fragments), delay=self.delay)
        pieces = tuple(tuple(self._piece(model, i) for i in layers) for layers in fragments)
        return ExchangeTime(outer=outer, fragments=pieces, step_s=model.step_s)

    def _piece(self, model: Model, layer: int) -> Piece:
        """Return what is exchanged of a layer: when its backward is done, and before its forward
        of a later step. A third of a step is forward."""
        share = layer / model.num_layers
        whole = model.num_parameters / model.num_layers * self.bits / 8
        return Piece(
            num_bytes=2 * (ISLANDS - 1) / ISLANDS * whole,
            ready=1 - share * 2 / 3,
            needed=share / 3,
        )


MODELS = (
    Model(name="1B", num_parameters=1e9, num_layers=24, step_s=0.1),
    Model(name="10B", num_parameters=10e9, num_layers=48, step_s=0.8),
    Model(name="100B", num_parameters=100e9, num_layers=108, step_s=4.9),
)
DATA_PARALLEL = Method(name="data parallel", every=1)
DILOCO = Method(name="DiLoCo")
STREAMING = Method(name="streaming", streams=True)
OVERLAPPED = Method(name="streaming, overlapped", streams=True, delay=1)
FOUR_BITS = Method(name="streaming, overlapped, 4 bits", streams=True, delay=1, bits=4)
METHODS = (DATA_PARALLEL, DILOCO, STREAMING, OVERLAPPED, FOUR_BITS)

PUBLISHED: Mapping[Method, Mapping[str, tuple[float, ...]]] = {
    DATA_PARALLEL: {
        "1B": (86.8, 152.6, 184.2, 222.3, 569.0),
        "10B": (104.8, 222.3, 222.3, 268.3, 471.5),
        "100B": (184.2, 323.8, 390.7, 390.7, 471.5),
    },
    DILOCO: {
        "1B": (1.4, 6.2, 13.3, 23.3, 86.8),
        "10B": (1.7, 7.5, 16.0, 33.9, 104.8),
        "100B": (3.0, 11.0, 23.3, 49.4, 184.2),
    },
    STREAMING: {
        "1B": (1.4, 5.2, 9.1, 16.0, 28.1),
        "10B": (1.7, 5.2, 9.1, 13.3, 19.3),
        "100B": (2.4, 6.2, 9.1, 11.0, 19.3),
    },
    OVERLAPPED: {
        "1B": (1.4, 4.3, 6.2, 9.1, 11.0),
        "10B": (1.7, 3.6, 5.2, 6.2, 7.5),
        "100B": (1.7, 3.6, 4.3, 5.2, 5.2),
    },
    FOUR_BITS: {
        "1B": (0.4, 0.9, 1.7, 2.0, 3.0),
        "10B": (0.4, 0.9, 1.4, 1.4, 1.7),
        "100B": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
"""Gbit/s of the link between islands, for each of `SHARES`."""

AUTHOR = "the first author's simulator, arthurdouillard.com/diloco"

ASSUMPTIONS = (
    ("steps of 0.1, 0.8 and 4.9 s; 24, 48 and 108 layers of equal size", "table 4"),
    ("1, 10 and 100 billion parameters", "the models' names in table 4"),
    ("an exchange every 100 steps, in fragments of 3 layers", "caption of table 4"),
    (
        "a fragment's layers are spread over the depth (8, 16, 36 fragments)",
        "section 2.2, appendix",
    ),
    ("the overlapped exchanges have one step (tau = 1)", "section 3.3.2: in the main experiments"),
    (
        "16 bits of a parameter, where no 4 bits are named",
        "not said with table 4; table 1 has 109 hours at 1 Gbit/s for 0.67 hours of 0.1 s steps, "
        f"which are 16 Gbit a step; {AUTHOR}, has bfloat16",
    ),
    ("4 bits have no steps beside them", "section 2.4: E3M0, a sign and three bits of exponent"),
    ("two islands, each sends 2 (n - 1) / n of the bytes", f"section 3.2; the factor: {AUTHOR}"),
    (
        "a layer is exchanged when its backward is done, and before its forward of the next step, "
        "or of the one after the delay",
        "section 3.1 and figure 3: forward, two kinds of backward and reduction of each layer; "
        "appendix: early layers' exchanges overlap with the next step's forward",
    ),
    (
        "these three parts of a layer take equally long, so that forward is a third of a step",
        f"assumed; {AUTHOR}, has the same third",
    ),
    (
        "a link serves first what is ready first, without latency",
        f"assumed, as islands do; {AUTHOR}, the same",
    ),
)
"""What is assumed, and the source."""
