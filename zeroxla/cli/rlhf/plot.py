"""The picture of a run of `zeroxla rlhf`: reward, divergence, and the time of each phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zeroxla.rlhf.loop import PHASES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLORS = {"generate": "#0072B2", "score": "#E69F00", "train": "#009E73"}


def plot_run(lines: Sequence[dict[str, Any]], *, reward: str) -> Figure:
    """Draw the reward, the divergence and the seconds of each phase against iterations.

    Args:
      lines: the lines of metrics.jsonl.
      reward: the name of the reward.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    above, middle, below = figure.subplots(3, 1, sharex=True)
    lines = [line for line in lines if line.get("reward") is not None]
    steps = [line["step"] for line in lines]
    rewards = [line["reward"] for line in lines]
    around = [line["reward_std"] for line in lines]
    low = [x - d for x, d in zip(rewards, around)]
    high = [x + d for x, d in zip(rewards, around)]
    above.fill_between(steps, low, high, alpha=0.2, linewidth=0, label="standard deviation")
    above.plot(steps, rewards, label="mean of the responses")
    above.set_ylabel(f"reward: {reward}")
    above.legend()
    middle.plot(steps, [line["kl"] for line in lines])
    middle.set_ylabel("divergence from the\nreference, nats per token")
    # The first iteration compiles: its seconds would hide all others.
    timed = lines[1:] or lines
    seconds = [[line[f"{phase}_s"] for line in timed] for phase in PHASES]
    colors = [COLORS[phase] for phase in PHASES]
    below.stackplot([line["step"] for line in timed], seconds, labels=PHASES, colors=colors)
    below.set_ylabel("seconds")
    below.set_xlabel("iteration")
    below.legend()
    for axes in (above, middle, below):
        axes.grid(alpha=0.3)
    return figure
