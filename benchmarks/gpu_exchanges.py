"""The exchanges and gathers of a ZeRO++ train step, compiled for 8 H200 that nobody has to own.

A GPT in bfloat16, unrolled and scanned, with the presets of ZeRO++ on 2 nodes x 4 devices: how many
exchanges a layer makes on each hop, and how many matmuls are scheduled beside each exchange and
gather. Nothing runs.

    python benchmarks/gpu_exchanges.py

Exits with 1 if a target is missed; writes results/gpu_exchanges.json and results/gpu_exchanges.md.
Takes 3 minutes on 2 cores. It needs the extra plan-gpu, like gpu_schedule.py; without it, it says
so and exits with 0.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys

import jax
import jax.numpy as jnp
import optax
from common import Check, report, table
from jax.sharding import Mesh
from schedule import Transfer, exchanges, gathers

import zeroxla
from zeroxla.models import GPT
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh

MESH = {"node": 2, "device": 4}
LAYERS, WIDTH, LENGTH, ROWS = 4, 1024, 1024, 2  # ROWS: sequences of a device
PRESETS = ("zeropp", "zeropp_hq", "zeropp_min")
LARGE = 10**6  # bytes of an exchange that must have a matmul beside it
MOST = 2  # exchanges of a layer on a hop
HOPS = ("device", "node")
WAYS = (("forward", "node"), ("forward", "device"), ("backward", "device"))
"""Directions and hops of gathers; secondary shards leave no hop over `node` in backward."""


def compiled(mesh: Mesh, preset: str, *, scan: bool) -> tuple[list[Transfer], list[Transfer]]:
    """Return the exchanges and the gathers of a step, in the order of the schedule."""
    model = GPT(vocab=512, length=LENGTH, layers=LAYERS, width=WIDTH, heads=8, scan=scan)
    config = getattr(zeroxla.ZeroConfig, preset)(compute_dtype="bfloat16")
    step = zeroxla.make_step(model, mesh, optax.adamw(1e-3), config=config)
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size * ROWS, LENGTH + 1), jnp.int32)}
    text = step.lower(step.abstract_state(batch), batch).compile().as_text()
    return exchanges(text), gathers(text)


def of_layers(found: list[Transfer], hop: str) -> list[Transfer]:
    """Return the large exchanges of layers' wires on a hop, one for each time that they run.

    The gradients of embeddings travel as floats.
    """
    mine = [x for x in found if x.hop == hop and x.dtype == "u8" and x.result_bytes >= LARGE]
    return list(itertools.chain(*([x] * x.count for x in mine)))


def matmuls(found: list[Transfer], direction: str, hop: str) -> str:
    """Return the matmuls beside each large gather of a direction and hop."""
    return " ".join(
        " ".join([str(x.matmuls)] * x.count)
        for x in found
        if (x.direction, x.hop) == (direction, hop) and x.result_bytes >= LARGE
    )


def alone(found: list[Transfer]) -> int:
    """Return how many exchanges have no matmul beside them, the first and the last one apart."""
    return sum(not x.matmuls for x in found[1:-1])


def name_of(preset: str, *, scan: bool) -> str:
    """Return the name of a step in tables."""
    return f"{preset}, {'scanned' if scan else 'unrolled'}"


def make_checks(preset: str, found: list[Transfer], *, scan: bool) -> list[Check]:
    """Return the targets of one step."""
    checks = []
    for hop in HOPS:
        mine, name = of_layers(found, hop), name_of(preset, scan=scan)
        checks += [
            Check(
                name=f"{name}: exchanges of a layer, hop {hop}",
                value=len(mine) / LAYERS,
                limit=MOST,
            ),
            Check(
                name=f"{name}: exchanges without a matmul beside them, first and last apart, "
                f"hop {hop}",
                value=alone(mine),
                limit=0,
            ),
        ]
    return checks


def main() -> int:
    """Compile, count, report."""
    try:
        mesh = target_mesh(H200, MESH)
    except WheelsMissingError as error:
        print(f"nothing measured: {error}")
        return 0
    rows, gathered, checks, figures = [], [], [], {}
    for preset, scan in itertools.product(PRESETS, (False, True)):
        found, of_weights = compiled(mesh, preset, scan=scan)
        name = name_of(preset, scan=scan)
        figures[name] = [dataclasses.asdict(x) for x in (*found, *of_weights)]
        gathered.append([name, *(matmuls(of_weights, *way) for way in WAYS)])
        cells = [name]
        for hop in HOPS:
            mine = of_layers(found, hop)
            cells += [f"{len(mine) / LAYERS:.2f}", " ".join(str(x.matmuls) for x in mine)]
        rows.append(cells)
        checks += make_checks(preset, found, scan=scan)
    header = ["step", *(f"{what}, hop {hop}" for hop in HOPS for what in ("a layer", "matmuls"))]
    body = (
        f"GPT of {LAYERS} layers, width {WIDTH}, bfloat16, AdamW, {ROWS} x {LENGTH} tokens a "
        "device, compiled ahead of time for 2 nodes x 4 H200. Exchanges of layers' wires of at "
        "least 1 MB: how many a layer, and the matmuls between the start and the done of each. "
        "Those in the body of a loop come first, then those outside, in the order of the "
        "schedule. A scanned model makes the last hop of a layer in the loop's next turn, and the "
        "loop's first turn stands before it.\n\n"
        f"{table(header, rows)}\n\n"
        "Matmuls beside each gather of at least 1 MB, in the same order:\n\n"
        f"{table(['step', *(' over '.join(way) for way in WAYS)], gathered)}\n\n"
        "XLA keeps one collective in flight and schedules from the end of a program. It gives "
        "every custom call the same cost, be it a quantizing kernel or a matmul of cuBLAS, and "
        "matmuls that it compiles itself, as all are here, the small cost of a fusion. A "
        "collective with kernels beside it then gets no matmul."
    )
    return report(
        "gpu_exchanges", "Exchanges of gradients on GPUs", body, {"exchanges": figures}, checks
    )


if __name__ == "__main__":
    sys.exit(main())
