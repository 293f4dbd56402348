"""Draw docs/pictures/slow_links.svg and .png: a step's time over the link between hosts.

    python docs/pictures/slow_links.py [folder]

`make peers` measured the figures; they are read from benchmarks/results/two_hosts.json.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import matplotlib
from make import DEVICE, FRAME, GRADIENT, INK, LEAF, NODE
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "two_hosts.json"
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}
# (row, name at its curve, colour, how many points the name stands above the curve's first point)
OURS = (
    ("zero3", "zeroxla: ZeRO-3", LEAF, 0),
    ("zeropp_min", "zeroxla: zeropp_min", NODE, -4),
)
PEERS = (
    ("plain jit FSDP", "JAX: jit with FSDP annotations", DEVICE, 2),
    ("PyTorch FSDP2", "PyTorch: FSDP2", GRADIENT, 2),
    ("DeepSpeed ZeRO-3", "DeepSpeed: ZeRO-3", INK, -8),
    ("DeepSpeed ZeRO++", "DeepSpeed: ZeRO++*", "#8C6D31", 4),
)


def main(folder: Path) -> None:
    matplotlib.rcParams["svg.hashsalt"] = "zeroxla"
    matplotlib.rcParams["font.size"] = 10
    rows = json.loads(RESULTS.read_text())["rows"]
    figure = Figure(figsize=(7.2, 4.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for lines, style, width in ((OURS, "-", 2.6), (PEERS, "--", 1.4)):
        for row, name, color, above in lines:
            seconds = [statistics.median(rows[row]["by_rate"][rate]["seconds"]) for rate in RATES]
            axes.plot(
                range(len(RATES)),
                seconds,
                style,
                color=color,
                linewidth=width,
                marker="o",
                markersize=3 + width,
            )
            axes.annotate(
                name,
                (0, seconds[0]),
                xytext=(-9, above),
                textcoords="offset points",
                ha="right",
                va="center",
                color=color,
                fontsize=9,
                weight="bold" if style == "-" else "normal",
            )
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
    axes.set_ylim(0.5, 20)
    axes.minorticks_off()
    axes.set_xticks(range(len(RATES)), RATES.values())
    axes.set_xlim(-0.95, len(RATES) - 0.9)
    axes.set_xlabel("link between the hosts", color=INK)
    axes.set_title("Seconds of a training step", loc="left", fontsize=11, weight="bold", color=INK)
    axes.grid(axis="y", color=FRAME, linewidth=0.5, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK)
    axes.text(
        1,
        -0.2,
        "* with a stand-in for its CUDA quantizer",
        transform=axes.transAxes,
        ha="right",
        fontsize=8,
        color=INK,
    )
    for suffix in ("svg", "png"):
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(folder / f"slow_links.{suffix}", metadata=metadata, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
