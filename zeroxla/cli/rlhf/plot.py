"""The picture of a run of `zeroxla rlhf`: reward, divergence, and the time of each phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zeroxla.inspect.pictures.figures import COLORS, INK, new_figure, quiet
from zeroxla.rlhf.loop import PHASES

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_run(lines: Sequence[dict[str, Any]], *, reward: str) -> Figure:
    """Draw the reward, the divergence and the seconds of each phase against iterations.

    Args:
      lines: the lines of metrics.jsonl.
      reward: the name of the reward.
    """
    figure = new_figure(width=8, height=8)
    above, middle, below = figure.subplots(3, 1, sharex=True)
    lines = [line for line in lines if line.get("reward") is not None]
    steps = [line["step"] for line in lines]
    rewards = [line["reward"] for line in lines]
    around = [line["reward_std"] for line in lines]
    low = [x - d for x, d in zip(rewards, around)]
    high = [x + d for x, d in zip(rewards, around)]
    color = COLORS[0]
    above.fill_between(
        steps, low, high, color=color, alpha=0.2, linewidth=0, label="standard deviation"
    )
    above.plot(steps, rewards, color=color, label="mean of the responses")
    middle.plot(steps, [line["kl"] for line in lines], color=color)
    # The first iteration compiles: its seconds would hide all others.
    timed = lines[1:] or lines
    seconds = [[line[f"{phase}_s"] for line in timed] for phase in PHASES]
    steps = [line["step"] for line in timed]
    below.stackplot(steps, seconds, labels=PHASES, colors=COLORS[: len(PHASES)])
    below.set_xlabel("iteration", fontsize=9, color=INK)
    titles = {
        above: f"Reward: {reward}",
        middle: "Divergence from the reference, nats per token",
        below: "Seconds by phase",
    }
    for axes, title in titles.items():
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.tick_params(labelsize=9)
        quiet(axes)
    for axes in (above, below):
        axes.legend(frameon=False, fontsize=9)
    return figure
