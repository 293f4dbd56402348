"""What plan_zeropp.py compares with: the published points, the models, and the picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import RESULTS
from matplotlib.axes import Axes

from zeroxla.inspect.pictures.figures import COLORS, FRAME, INK, finish, new_figure, quiet

NODES, DEVICES_PER_NODE = 24, 16
WORLD = NODES * DEVICES_PER_NODE
LENGTH = 1024
VOCAB = 50304

SHAPES = {18: (40, 6144, 48), 49: (60, 8192, 64), 91: (72, 10240, 80), 138: (76, 12288, 96)}
"""(layers, width, heads) by billions of parameters. The paper gives the sizes; the shapes are
chosen to come to them."""

LINKS = {400: "edr-4", 100: "edr"}
"""Of machines.toml, by Gbit/s of a node: the paper switches 100 Gbit/s InfiniBand cards off."""

BASELINE, ZEROPP = "zero3", "zeropp"


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A published pair of throughputs.

    Attributes:
      gbit_per_s: of a node.
      sequences: of `LENGTH` tokens in a device's batch.
      billions: of parameters.
      baseline, zeropp: TFLOP/s of a device with ZeRO-3 and with ZeRO++.
    """

    gbit_per_s: int
    sequences: int
    billions: int
    baseline: float
    zeropp: float

    @property
    def speedup(self) -> float:
        return self.zeropp / self.baseline

    @property
    def label(self) -> str:
        return f"{self.gbit_per_s} Gbit/s, {self.sequences}K tokens, {self.billions} B"


# ZeRO++, arXiv 2306.10209: 384 V100 in 24 DGX-2.
PUBLISHED = tuple(
    Point(rate, sequences, billions, baseline, zeropp)
    for rate, sequences, pairs in (
        (400, 1, ((25, 35), (23, 36), (23, 36), (23, 36))),
        (400, 2, ((40, 53), (36, 51), (36, 51), (36, 50))),
        (100, 1, ((14, 31), (11, 22), (11, 22), (11, 22))),
        (100, 2, ((26, 46), (20, 38), (20, 38), (20, 38))),
    )
    for billions, (baseline, zeropp) in zip(SHAPES, pairs, strict=True)
)


def seconds_added(point: Point, slow: Point, num_parameters: int) -> tuple[float, float]:
    """Return what a slower link adds to a published ZeRO-3 step, and to its wire.

    Were a part of the wire's time hidden behind computation at both rates, a step would gain less
    than its wire does.

    Args:
      point, slow: of the same model and batch at two rates.
      num_parameters: of the model.

    Returns:
      Seconds of the step, by the published TFLOP/s; seconds of three hops between nodes at the
      cards' own rates.
    """
    flops = step_flops(num_parameters, point.sequences)
    step = flops / slow.baseline / 1e12 - flops / point.baseline / 1e12
    received = 3 * 2 * num_parameters * (NODES - 1) / NODES
    wire = received * 8 / 1e9 * (1 / slow.gbit_per_s - 1 / point.gbit_per_s)
    return step, wire


def step_flops(num_parameters: int, sequences: int) -> float:
    """Return FLOPs of a device's step as Megatron-DeepSpeed counts them: 2 for each parameter and
    token in forward, again where backward computes it once more, and 4 in backward."""
    return 8.0 * num_parameters * sequences * LENGTH


def draw(
    planned: Mapping[Point, tuple[float, float]], path: Path = RESULTS / "plan_zeropp.png"
) -> None:
    """Draw planned against published speed-ups and throughputs.

    Args:
      planned: TFLOP/s of ZeRO-3 and ZeRO++ by point.
      path: of the picture.
    """
    figure = new_figure(width=10, height=5)
    left, right = figure.subplots(1, 2)
    markers = {(400, 1): "o", (400, 2): "s", (100, 1): "^", (100, 2): "D"}
    for color, (group, marker) in zip(COLORS, markers.items(), strict=False):
        points = [p for p in planned if (p.gbit_per_s, p.sequences) == group]
        label = f"{group[0]} Gbit/s, {group[1]}K tokens"
        found = [planned[p] for p in points]
        style = {"marker": marker, "color": color, "linestyle": "none", "alpha": 0.8}
        ratios = [zeropp / baseline for baseline, zeropp in found]
        left.plot([p.speedup for p in points], ratios, label=label, **style)
        right.plot([p.baseline for p in points], [x for x, _ in found], **style)
        right.plot([p.zeropp for p in points], [y for _, y in found], **style, fillstyle="none")
    _frame(left, "speed-up of ZeRO++ over ZeRO-3", (1.0, 2.8), 0.25)
    _frame(right, "TFLOP/s (filled: ZeRO-3, open: ZeRO++)", (5, 70), 0.25)
    left.legend(frameon=False, fontsize=9)
    finish(figure, path)


def _frame(axes: Axes, title: str, limits: Sequence[float], band: float) -> None:
    low, high = limits
    ends = [low, high]
    axes.plot(ends, ends, color=INK, linewidth=1)
    axes.fill_between(
        ends, [x * (1 - band) for x in ends], [x * (1 + band) for x in ends], color=FRAME, alpha=0.4
    )
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_xlabel("published")
    axes.set_ylabel("planned")
    axes.set_title(f"{title}; band: {band:.0%}", loc="left", fontsize=10)
    quiet(axes)
