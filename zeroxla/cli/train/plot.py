"""The picture of a run of `zeroxla train`: its losses, and its model's metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zeroxla.inspect.pictures.figures import COLORS, INK, new_figure, quiet

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_run(
    lines: Sequence[dict[str, Any]],
    *,
    guess: float,
    guess_name: str,
    unit: str,
    numbers: Sequence[str] = (),
    metrics: Sequence[str] = (),
) -> Figure:
    """Draw training and validation against steps: the loss, and below it each metric.

    Args:
      lines: the lines of metrics.jsonl.
      guess: a loss to compare with.
      guess_name: words for that loss.
      unit: the unit of the loss, which is nats per unit.
      numbers: names of metrics that are numbers of any size.
      metrics: names of metrics, shares between 0 and 1.
    """
    names = (*numbers, *metrics)
    figure = new_figure(width=8, height=5 + 2 * len(names))
    ratios = [5.0, *[2.5] * len(names)]
    first, *others = figure.subplots(
        1 + len(names), sharex=True, squeeze=False, height_ratios=ratios
    )[:, 0]
    _curves(first, lines, "loss")
    label = f"{guess_name}: {guess:.3f}"
    first.axhline(guess, color=INK, linewidth=1, linestyle="--", label=label)
    first.set_title(f"Loss, nats per {unit}", fontsize=10, color=INK, loc="left")
    first.legend(frameon=False, fontsize=9)
    for axes, name in zip(others, names, strict=True):
        _curves(axes, lines, name)
        axes.set_title(name.capitalize(), fontsize=10, color=INK, loc="left")
        if name in metrics:
            axes.set_ylim(0, 1.02)
    (others or [first])[-1].set_xlabel("step", fontsize=9, color=INK)
    return figure


def _curves(axes: Any, lines: Sequence[dict[str, Any]], name: str) -> None:
    for key, label, style in (
        (name, f"training {name}", {"color": COLORS[4], "linewidth": 1}),
        (f"valid_{name}", f"validation {name}", {"color": COLORS[0], "marker": "o"}),
    ):
        points = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        if points:
            axes.plot(*zip(*points), label=label, **style)
    axes.tick_params(labelsize=9)
    quiet(axes)
