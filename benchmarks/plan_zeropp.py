"""What `zeroxla plan` says of the setting of the ZeRO++ paper, against what was published.

384 V100 in 24 nodes of 16, GPTs of 18 to 138 billion parameters, 1K and 2K tokens a device, 100 and
400 Gbit/s a node: 16 pairs of throughputs. One number is fitted, the efficiency of a V100, to the
32 throughputs; the speed-ups follow. Nothing is run.

    python benchmarks/plan_zeropp.py

Exits with 1 if a target is missed; writes results/plan_zeropp.json, .md and .png. Takes about 8
minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import jax
from common import Check, report, table
from plan_zeropp_data import (
    BASELINE,
    DEVICES_PER_NODE,
    LENGTH,
    LINKS,
    NODES,
    PUBLISHED,
    SHAPES,
    VOCAB,
    WORLD,
    ZEROPP,
    Point,
    draw,
    seconds_added,
    step_flops,
)
from scipy.optimize import minimize_scalar

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.mesh.machines import Device, Machines
from zeroxla.models import GPT
from zeroxla.planning.plan import Plan

MACHINES = Machines.load()
V100 = MACHINES.find_device("v100")
PRESETS = (BASELINE, ZEROPP)

Plans = Mapping[tuple[int, int, str], Plan]
"""By billions of parameters, sequences of a device, and preset."""
Planned = dict[Point, tuple[float, float]]
"""TFLOP/s of a device, of both presets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What runs beside computation.

    Attributes:
      name: in tables.
      overlaps: collectives do.
      ahead: loops gather a turn ahead.
    """

    name: str
    overlaps: bool
    ahead: bool


IN_TURN = Program(name="nothing beside computation", overlaps=False, ahead=False)
TIED = Program(name="gathers not ahead of a layer's turn", overlaps=True, ahead=False)
OURS = Program(name="gathers a turn ahead, as zeroxla on GPUs", overlaps=True, ahead=True)


def main() -> int:
    argparse.ArgumentParser(description="Plans against the ZeRO++ paper.").parse_args()
    plans = {
        (billions, sequences, preset): make_plan(billions, sequences, preset)
        for billions in SHAPES
        for sequences in (1, 2)
        for preset in PRESETS
    }
    figures: dict[str, Any] = {"efficiency": V100.efficiency, "programs": {}}
    rows = []
    for program in (IN_TURN, TIED, OURS):
        fitted = fit(plans, program)
        for efficiency in dict.fromkeys((fitted, V100.efficiency)):
            found = throughputs(plans, program, efficiency)
            errors = [abs(error(p, found[p])) for p in PUBLISHED]
            figure = {
                "median": statistics.median(errors),
                "worst": max(errors),
                "throughput": _spread(found),
            }
            print(program.name, efficiency, figure, flush=True)
            figures["programs"].setdefault(program.name, {})[f"{efficiency:.3f}"] = figure
            kind = "fitted" if efficiency == fitted else "the table's"
            shares = [f"{figure[k]:.1%}" for k in ("median", "worst", "throughput")]
            rows.append([program.name, f"{efficiency:.3f}, {kind}", *shares])
    planned = throughputs(plans, IN_TURN, V100.efficiency)
    ours = throughputs(plans, OURS, V100.efficiency)
    draw(planned)
    errors = [abs(error(p, planned[p])) for p in PUBLISHED]
    figures["points"] = [
        {**dataclasses.asdict(p), "planned": planned[p], "ours": ours[p]} for p in PUBLISHED
    ]
    fitted = float(next(iter(figures["programs"][IN_TURN.name])))
    checks = [
        Check(name="error of a speed-up, median", value=statistics.median(errors), limit=0.12),
        Check(name="error of a speed-up, worst", value=max(errors), limit=0.25),
        Check(
            name="efficiency of machines.toml, off the fitted one",
            value=abs(V100.efficiency - fitted),
            limit=0.01,
        ),
    ]
    text = body(planned, ours, rows, plans)
    return report("plan_zeropp", "Plans against the ZeRO++ paper", text, figures, checks)


def make_plan(billions: int, sequences: int, preset: str) -> Plan:
    layers, width, heads = SHAPES[billions]
    model = GPT(
        vocab=VOCAB, length=LENGTH, layers=layers, width=width, heads=heads, scan=True, remat=True
    )
    found = zeroxla.plan(
        model,
        {"node": NODES, "device": DEVICES_PER_NODE},
        {"tokens": jax.ShapeDtypeStruct((WORLD * sequences, LENGTH + 1), "int32")},
        config=getattr(ZeroConfig, preset)(compute_dtype="float16", reduce_dtype="float16"),
        device=V100,
    )
    print(f"{billions} B, {sequences}K tokens, {preset}: traced", flush=True)
    return found


def throughputs(plans: Plans, program: Program, efficiency: float) -> Planned:
    """Return what a program would reach."""
    device: Device = dataclasses.replace(V100, efficiency=efficiency, overlaps=program.overlaps)

    def reached(point: Point, preset: str) -> float:
        found = plans[point.billions, point.sequences, preset].on(
            device=device,
            links={"node": MACHINES.find_link(LINKS[point.gbit_per_s])},
            ahead=program.ahead,
        )
        return step_flops(found.num_parameters, point.sequences) / found.time.seconds / 1e12

    return {p: (reached(p, BASELINE), reached(p, ZEROPP)) for p in PUBLISHED}


def fit(plans: Plans, program: Program) -> float:
    """Return the efficiency whose 32 throughputs are nearest, by least squares of logarithms."""

    def far(efficiency: float) -> float:
        return _spread(throughputs(plans, program, efficiency))

    found = minimize_scalar(far, bounds=(0.2, 0.9), method="bounded", options={"xatol": 0.005})
    return round(float(found.x), 3)


def _spread(planned: Planned) -> float:
    """Return the root mean square of the logarithms of planned over published throughputs."""
    ratios = [(x / p.baseline, y / p.zeropp) for p, (x, y) in planned.items()]
    return math.sqrt(statistics.fmean(math.log(r) ** 2 for pair in ratios for r in pair))


def error(point: Point, planned: tuple[float, float]) -> float:
    """Return by how much a planned speed-up is off the published one."""
    baseline, zeropp = planned
    return zeropp / baseline / point.speedup - 1


def body(planned: Planned, ours: Planned, programs: list[list[str]], plans: Plans) -> str:
    rows = [
        [
            p.label,
            f"{p.baseline:g} -> {p.zeropp:g}",
            f"{planned[p][0]:.1f} -> {planned[p][1]:.1f}",
            f"{p.speedup:.2f}",
            f"{planned[p][1] / planned[p][0]:.2f}",
            f"{error(p, planned[p]):+.1%}",
            f"{ours[p][0]:.1f} -> {ours[p][1]:.1f}",
            f"{ours[p][1] / ours[p][0]:.2f}",
        ]
        for p in PUBLISHED
    ]
    added = []
    for fast, slow in zip(PUBLISHED[:8], PUBLISHED[8:], strict=True):
        num_parameters = plans[fast.billions, 1, BASELINE].num_parameters
        step, wire = seconds_added(fast, slow, num_parameters)
        name = f"{fast.billions} B, {fast.sequences}K tokens"
        added.append([name, f"{step:.1f} s", f"{wire:.1f} s", f"{step / wire:.2f}"])
    columns = (
        *("point", "published, TFLOP/s", "planned", "published speed-up", "planned", "error"),
        *("zeroxla's own program, planned", "speed-up"),
    )
    return BODY.format(
        points=table(columns, rows),
        programs=table(
            ("program", "efficiency", "median error", "worst", "throughputs, RMS"), programs
        ),
        added=table(("ZeRO-3", "a step takes longer", "its wire does", "ratio"), added),
    )


BODY = """\
384 V100 in 24 DGX-2 of 16 (NVLink 2, 150 GB/s one way), GPTs of 18, 49, 91 and 138 billion
parameters, float16, blocks computed again in backward, 1K and 2K tokens a device, 100 and 400
Gbit/s a node: the setting of ZeRO++ (arXiv 2306.10209). Planned from the trace of zeroxla's step
with `ZeroConfig.zero3` and `ZeroConfig.zeropp`; nothing was run. The paper gives sizes, not
shapes: layers and widths are chosen to come to them. TFLOP/s are 8 x parameters x tokens /
seconds, as Megatron-DeepSpeed counts a step that computes activations again; speed-ups do not
depend on it.

One number is fitted: the share of 125 TFLOP/s that a V100's products reach, to the 32 published
throughputs, by least squares of logarithms. No speed-up is fitted. Links are the cards' as NCCL
uses them (12.2 GB/s of one EDR card, 48 of four: machines.toml has the source).

{points}

![planned against published](plan_zeropp.png)

## What runs beside computation

The paper's program is DeepSpeed's, not zeroxla's: what it hides of its collectives is not in our
trace. Three programs were planned, each with an efficiency of its own:

{programs}

The table above and the targets are of the first. That choice, of one among three, was made from
data too: its throughputs come nearest, and the published times of ZeRO-3 say the same. Going from
400 to 100 Gbit/s, its steps get longer by as much as the wire's own time, or more, but for the
smallest model. A program that hid part of the wire behind its products would gain less. (This
rests on counting 8 FLOPs, recomputation included; were the published figures counted with 6, the
ratios would be three quarters of these, and a part hidden.)

{added}

DeepSpeed's developers describe prefetching that only partly overlaps with computation
(github.com/deepspeedai/DeepSpeed/pull/1170). The last columns of the first table are what
zeroxla's program, which gathers a turn ahead, would reach at the same efficiency: a prediction,
without a measurement to hold it against.

## Misses

* 100 Gbit/s, 1K tokens, 49 to 138 B: ZeRO++ is planned a fifth to a third faster than it was, and
  with it the speed-up. Its published steps lose more by the slower link than their bytes account
  for. A likely reason, which is not measured here: all-to-alls between all pairs of nodes do not
  reach the cards' rate as rings do; a plan gives both the same.
* 400 Gbit/s, 2K tokens: speed-ups are planned up to a tenth too low. Published throughputs grow
  more from 1K to 2K tokens than one efficiency for both allows.
* 18 B at 100 Gbit/s: planned up to a quarter too slow. Its steps hide something of the wire (see
  the ratios), those of the larger models nothing. The speed-ups are met all the same.
* Not modelled: the latency of a flat ring of 384 devices (zeroxla's gathers go hop by hop), and
  what DeepSpeed's host does between kernels. A second fitted number, a share of the link's rate,
  was tried and left out: it is no data of the link, and at 80 to 90 % of it the worst error
  grows.
"""


if __name__ == "__main__":
    sys.exit(main())
