"""What plan_published.py compares with: training runs on H100s as others published them.

Each point has its settings and its source. Names of what a run keeps for backward are those of
`zeroxla.models.Llama`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import RESULTS

from zeroxla.inspect.pictures.figures import COLORS, FRAME, INK, finish, new_figure, quiet

EVERY_PRODUCT = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

DGX, A3, TITAN = "DGX H100", "Google A3 High", "Grand Teton"

SXM, NVL = 989e12, 835e12
"""Peaks in bfloat16 of two H100 cards, in the makers' data sheets, without sparsity."""

MACHINES: Mapping[str, Mapping[str, Any]] = {
    DGX: {},
    A3: {},
    TITAN: {
        "bytes_per_s": 2.4e12,
        "memory_bytes": 96e9,
        "flops_per_s": {"float32": (SXM + NVL) / 4, "bfloat16": (SXM + NVL) / 2},
    },
}
"""The fields in which each machine's GPU differs from the table's H100.

Grand Teton's has 96 GB of HBM2e, and 500 W instead of 700. Its peak is "between SXM and NVL", says
torchtitan's page; the middle is planned."""

LINKS = {DGX: "3200gbit", A3: "800gbit", TITAN: "3200gbit"}
"""What a node has towards others: eight cards of 400 Gbit/s, and on A3 High, as it is assumed here,
four of 200."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A published throughput.

    Attributes:
      name: in tables.
      model: the name of a preset of `zeroxla plan`.
      machine: one of `MACHINES`.
      nodes: the number of nodes of 8 GPUs.
      rows: the sequences of a GPU's batch.
      length: the tokens of a sequence.
      kept: the activations that are kept for backward; the others are computed again.
      tokens_per_s: the published tokens/s of a GPU.
      program: what ran.
      reduce_dtype: the dtype in which gradients are summed over devices.
      settings: the published words for precision, sharding and recomputation.
      source, date: where it stands, and the date or version of what stands there.
    """

    name: str
    model: str
    machine: str
    nodes: int
    rows: int
    length: int
    kept: tuple[str, ...]
    tokens_per_s: float
    settings: str
    source: str
    date: str
    program: str = "MaxText"
    reduce_dtype: str = "bfloat16"


JAX_TOOLBOX = "github.com/NVIDIA/JAX-Toolbox/blob/main/docs/frameworks/maxtext/README.md"
MAXTEXT_A3 = "github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs/gpu/a3/llama_2_7b"
TITAN_TABLE = "github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_CODE = "github.com/pytorch/torchtitan, 9dec370, torchtitan/parallelisms/parallelize_llama.py"
DGXC = "github.com/NVIDIA/dgxc-benchmarking"

# MaxText counts 6 FLOPs a parameter of a product and token, and attention without its mask: for
# Llama-2-7B at 4096 positions 6 x 6.607e9 + 12 x 32 layers x 4096 x 4096.
_FLOPS_A_TOKEN = 6 * 6.607e9 + 12 * 32 * 4096 * 4096

PUBLISHED = (
    Point(
        name="Llama-2-7B, 8 GPUs, MaxText",
        model="llama-7b",
        machine=DGX,
        nodes=1,
        rows=2,
        length=4096,
        kept=(*EVERY_PRODUCT, "attention"),
        tokens_per_s=2 * 4096 / 0.721,
        settings="BF16, FSDP 8, flash attention, remat_policy=minimal_flash, not scanned; 0.721 s",
        source=JAX_TOOLBOX,
        date="2025-08-13",
    ),
    Point(
        name="Llama-2-7B, 8 GPUs of A3, MaxText",
        model="llama-7b",
        machine=A3,
        nodes=1,
        rows=4,
        length=4096,
        kept=(*EVERY_PRODUCT, "attention"),
        tokens_per_s=492e12 / _FLOPS_A_TOKEN,
        settings="BF16, FSDP 8, flash attention, minimal_flash, not scanned; 492 TFLOP/s",
        source=MAXTEXT_A3,
        date="b6cfc15, 2026-02-06",
    ),
    Point(
        name="Llama-2-7B, 32 GPUs of A3, MaxText",
        model="llama-7b",
        machine=A3,
        nodes=4,
        rows=4,
        length=4096,
        kept=(*EVERY_PRODUCT, "attention"),
        tokens_per_s=407e12 / _FLOPS_A_TOKEN,
        settings="BF16, FSDP 8 in a node and copies between nodes, minimal_flash; 407 TFLOP/s",
        source=MAXTEXT_A3,
        date="b6cfc15, 2026-02-06",
    ),
    Point(
        name="Llama-3.1-8B, 8 GPUs, torchtitan",
        model="llama3-8b",
        machine=TITAN,
        nodes=1,
        rows=2,
        length=8192,
        kept=("q_proj", "v_proj", "gate_proj", "down_proj", "attention"),
        tokens_per_s=6667,
        settings="BF16, FSDP 8, torch.compile, selective checkpointing: every second mm is kept",
        source=f"{TITAN_TABLE}; {TITAN_CODE}",
        date="2024-12-26",
        program="torchtitan",
        reduce_dtype="float32",
    ),
    Point(
        name="Llama-3.1-8B, 128 GPUs, torchtitan",
        model="llama3-8b",
        machine=TITAN,
        nodes=16,
        rows=2,
        length=8192,
        kept=("q_proj", "v_proj", "gate_proj", "down_proj", "attention"),
        tokens_per_s=6514,
        settings="BF16, FSDP 128, torch.compile, selective checkpointing",
        source=f"{TITAN_TABLE}; {TITAN_CODE}",
        date="2024-12-26",
        program="torchtitan",
        reduce_dtype="float32",
    ),
    Point(
        name="Llama-2-70B, 64 GPUs, MaxText",
        model="llama-70b",
        machine=DGX,
        nodes=8,
        rows=2,
        length=4096,
        kept=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
        tokens_per_s=2 * 4096 / 6.999,
        settings="BF16, FSDP 64, custom remat: query, key, value, out and mlpwo kept; 6.999 s",
        source=f"{DGXC}, 143b90d, maxtext/README_70b.md and configure.sh",
        date="v25.01",
    ),
    Point(
        name="Llama-2-70B, 128 GPUs, MaxText",
        model="llama-70b",
        machine=DGX,
        nodes=16,
        rows=2,
        length=4096,
        kept=("q_proj", "k_proj", "v_proj", "o_proj", "down_proj"),
        tokens_per_s=2 * 4096 / 7.072,
        settings="BF16, FSDP 128, custom remat: query, key, value, out and mlpwo kept; 7.072 s",
        source=f"{DGXC}, 143b90d, maxtext/README_70b.md and configure.sh",
        date="v25.01",
    ),
    Point(
        name="Llama-3-70B, 128 GPUs, MaxText",
        model="llama3-70b",
        machine=DGX,
        nodes=16,
        rows=2,
        length=8192,
        kept=("q_proj", "k_proj", "v_proj"),
        tokens_per_s=2 * 8192 / 15.570,
        settings="BF16, FSDP 128, remat_policy=save_qkv_proj; 15.570 s",
        source=f"{DGXC}, 8f5cbb3, maxtext/README_70b.md and configure.sh",
        date="v25.02",
    ),
)


def draw(
    planned: Mapping[Point, float], limit: float, path: Path = RESULTS / "plan_published.png"
) -> None:
    """Draw planned against published tokens/s of a GPU, both on logarithmic scales.

    Args:
      planned: by point.
      limit: the largest error of the target, which a band shows.
      path: of the picture.
    """
    figure = new_figure(width=6.5, height=6)
    axes = figure.subplots()
    ends = (600.0, 16000.0)
    axes.fill_between(
        ends,
        [x * (1 - limit) for x in ends],
        [x * (1 + limit) for x in ends],
        color=FRAME,
        alpha=0.4,
        linewidth=0,
        label=f"within {limit:.0%}",
    )
    axes.plot(ends, ends, color=INK, linewidth=1)
    for color, (point, tokens_per_s) in zip((*COLORS, *COLORS), planned.items(), strict=False):
        axes.plot(
            point.tokens_per_s,
            tokens_per_s,
            "o" if point.machine == DGX else "s",
            color=color,
            label=point.name,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="published, tokens/s of a GPU",
        ylabel="planned",
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    quiet(axes)
    finish(figure, path)
