"""What offload moves, and what it costs, on 8 simulated devices.

A GPT of 6 layers, AdamW: the state on the devices, the optimizer's state in host memory or on disk,
and all of it. Bytes are those of live arrays, by memory kind, of one device, and of a device's part
of the arrays in the file; the peak of a device's memory is the plan's, which knows memories by the
program's types (the compiler's figures for CPUs do not). Times are medians of steps in turns. The
CPU backend has one memory under both names, so its times say what the moves cost in copies of main
memory, not over a bus; `zeroxla.plan` says that for an H100, below.

    python benchmarks/offload.py

Exits with 1 if a target is missed; writes results/offload.json and results/offload.md. Takes about
3 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common import Check, report, start, table

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.inspect import format_bytes
from zeroxla.models import GPT
from zeroxla.offload.memory_kinds import Place, place_of

SHAPE = {"vocab": 512, "length": 128, "layers": 6, "width": 512, "heads": 8}
ROWS, STEPS = 16, 7
PLACES = {
    "on the devices": Offload(),
    "optimizer in host memory": Offload(optimizer="host"),
    "half of the optimizer's state": Offload(optimizer="host", ratio=0.5),
    "optimizer and parameters": Offload(optimizer="host", params="host"),
    "optimizer, updated on the host": Offload(optimizer="host", update="host"),
    "optimizer on disk": Offload(optimizer="disk", path="unused", sub_group=1_000_000),
    "optimizer on disk, parameters in host memory": Offload(
        optimizer="disk", params="host", path="unused", sub_group=1_000_000
    ),
    "optimizer and parameters on disk": Offload(
        optimizer="disk", params="disk", path="unused", sub_group=1_000_000
    ),
}
OFFLOADED = (
    0.0,
    2 / 3,
    1 / 3,
    1.0,
    2 / 3,
    2 / 3,
    1.0,
    1.0,
)  # shares of Adam's state and its master


def main() -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder))


def measure(folder: Path) -> int:
    mesh = start()
    tokens = np.random.default_rng(0).integers(0, 512, (ROWS, SHAPE["length"] + 1))
    batch = {"tokens": tokens.astype(np.int32)}
    steps: dict[str, Any] = {}
    states: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {name: [] for name in PLACES}
    losses: dict[str, list[float]] = {name: [] for name in PLACES}
    for name, place in PLACES.items():
        path = None if place.path is None else str(folder / name.replace(" ", "-"))
        config = ZeroConfig(offload=dataclasses.replace(place, path=path))
        steps[name] = zeroxla.make_step(GPT(**SHAPE), mesh, optax.adamw(1e-3), config=config)
        states[name] = steps[name].init(jax.random.key(0), batch)
    for _ in range(STEPS):
        for name in PLACES:
            begin = time.perf_counter()
            states[name], metrics = steps[name](states[name], batch)
            losses[name].append(float(metrics["loss"]))
            seconds[name].append(time.perf_counter() - begin)
            print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    first = next(iter(PLACES))
    whole = held(states[first], "device")
    usual = statistics.median(seconds[first][1:])
    rows, figures, checks = [], [], []
    for (name, place), share in zip(PLACES.items(), OFFLOADED, strict=True):
        here, there, disk = (held(states[name], place) for place in ("device", "host", "disk"))
        ratio = statistics.median(seconds[name][1:]) / usual
        plan = zeroxla.plan(
            GPT(**SHAPE), dict(mesh.shape), batch, config=ZeroConfig(offload=place), device="h100"
        )
        moves = [plan.time.busy_s.get(lane, 0.0) for lane in ("host", "disk")]
        rows.append(
            [
                name,
                *map(format_bytes, (here, there, disk, plan.memory.total_bytes)),
                f"{ratio:.2f}",
                *(f"{seconds:.3g}" for seconds in moves),
            ]
        )
        peak = plan.memory.total_bytes
        sizes = {"device": here, "host": there, "disk": disk, "peak": peak}
        figures.append({"name": name, **sizes, "time": ratio})
        off = abs((whole - here) / whole - share)
        slack = 0.1 if 0 < place.ratio < 1 else 0.01  # leaves are offloaded whole
        checks.append(Check(name=f"share moved, {name}: error", value=off, limit=slack))
        pairs = zip(losses[name], losses[first], strict=True)
        error = max(abs(a - b) / b for a, b in pairs)
        limit = 1e-5 if place.update == "host" else 0  # the host rounds otherwise
        checks.append(Check(name=f"relative error of losses, {name}", value=error, limit=limit))
    columns = (
        *("state", "device memory", "host memory", "disk", "peak of the device", "step, ratio"),
        *("planned, H100: to the host, s", "to one NVMe disk, s"),
    )
    parameters = sum(x.size for x in jax.tree.leaves(states[first].params))
    body = (
        f"GPT of 6 layers and width 512, {parameters:,} parameters, AdamW, {ROWS} x 128 tokens, 8 "
        f"simulated devices as 2 x 4; bytes of one device, medians of {STEPS - 1} steps in turns."
        "\n\n" + table(columns, rows)
    )
    return report("offload", "State in host memory and on disk", body, {"rows": figures}, checks)


def held(state: zeroxla.TrainState, place: Place) -> int:
    """Return the bytes of the state that one device has in a place."""
    arrays = jax.tree.leaves((state.params, state.opt_state))
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in arrays
        if place_of(x) == place
    )


if __name__ == "__main__":
    sys.exit(main())
