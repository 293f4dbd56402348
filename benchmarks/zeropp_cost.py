"""What each preset costs: bytes between hosts, memory of one device, time of a step.

A GPT of 6 layers and width 256 over bytes, scanned, 2 x 128 tokens a device, AdamW, on 8 simulated
devices as 2 nodes of 4, every leaf fetched by unit. Bytes come from the compiled program (16-bit
floats travel as their bits), memory is the compiler's figure in bfloat16 (its CPU scheduler without
concurrency), time is the ratio to zero3 in turns of one process, in float32: on simulated devices
there is no slow link, so that is what quantization costs.

    python benchmarks/zeropp_cost.py [--turns 15]

Exits with 1 if a target is missed; writes results/zeropp_cost.json, .md and .png. Takes about 3
minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from typing import Any

import jax
import optax
from common import (
    LENGTH,
    MEMORY_SCHEDULER,
    NUM_DEVICES,
    RESULTS,
    Check,
    alternately,
    gpt,
    random_tokens,
    report,
    start,
    table,
)
from jax.sharding import Mesh

import zeroxla
from zeroxla import ZeroConfig, inspect

ROWS = 2 * NUM_DEVICES
NODES = 2
PRESETS = ("zero3", "zeropp", "zeropp_hq", "zeropp_min")
# In units of M, the bytes of the quantized leaves in 16 bit, between hosts.
LIMITS = {"zeropp": 0.7505, "zeropp_hq": 0.7505, "zeropp_min": 0.5005}
PHASES = ("forward gather", "backward gather", "reduce")


def step_of(preset: str, mesh: Mesh, dtype: str) -> zeroxla.Step:
    options: dict[str, Any] = {"persistence_threshold": 0, "compute_dtype": dtype}
    if dtype == "bfloat16":
        options["reduce_dtype"] = dtype
    config = getattr(ZeroConfig, preset)(**options)
    model = gpt(scan=True, layers=6, width=256)
    return zeroxla.make_step(model, mesh, optax.adamw(1e-3), config=config)


def bytes_and_memory(preset: str, mesh: Mesh) -> dict[str, Any]:
    """Return what the compiled program sends between hosts, and keeps on a device."""
    step, batch = step_of(preset, mesh, "bfloat16"), random_tokens(ROWS)
    compiled = step.lower(step.abstract_state(batch), batch).compile()
    found = inspect.comms(compiled, mesh)
    inspect.plot_comms(found).savefig(RESULTS / f"zeropp_cost_{preset}.png", dpi=110)
    quantized = [math.prod(row.shape) for row in step.describe().rows if "int" in row.wires]
    in_m = 2 * sum(quantized) * (NODES - 1) / NODES
    wires = {phase: found.cross_host_bytes(phase=phase, dtype="u8") for phase in PHASES}
    return {
        "cross_host": {phase: found.cross_host_bytes(phase=phase) for phase in PHASES},
        "wires_in_m": sum(wires.values()) / in_m if in_m else 0.0,
        "other_bytes": found.cross_host_bytes() - sum(wires.values()),
        "temp_bytes": inspect.memory(compiled).temp_bytes,
        "secondary_bytes": step.describe().secondary_bytes,
    }


class Run:
    """One preset in training."""

    def __init__(self, preset: str, mesh: Mesh) -> None:
        self.step, self.batch = step_of(preset, mesh, "float32"), random_tokens(ROWS)
        self.state = self.step.init(jax.random.key(0), self.batch)

    def seconds(self) -> float:
        begin = time.perf_counter()
        self.state, _ = self.step(self.state, self.batch)
        jax.block_until_ready(jax.tree.leaves(self.state.params))
        return time.perf_counter() - begin


def step_times(mesh: Mesh, turns: int) -> dict[str, list[float]]:
    """Return seconds of steps, taken in turns."""
    runs = {preset: Run(preset, mesh) for preset in PRESETS}
    return alternately({preset: run.seconds for preset, run in runs.items()}, turns)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15, help="timed steps of each preset")
    options = parser.parse_args()
    mesh = start(flags=MEMORY_SCHEDULER)
    RESULTS.mkdir(exist_ok=True)
    sizes = {preset: bytes_and_memory(preset, mesh) for preset in PRESETS}
    times = step_times(mesh, options.turns)
    rows, checks = [], []
    for preset, found in sizes.items():
        pairs = zip(times[preset], times["zero3"], strict=True)
        ratio = statistics.median(mine / base for mine, base in pairs)
        found["step_ratio"] = ratio
        rows.append(
            (
                preset,
                *(f"{found['cross_host'][phase] / 1e6:.2f}" for phase in PHASES),
                f"{sum(found['cross_host'].values()) / 1e6:.2f}",
                f"{found['wires_in_m']:.3f} M" if found["wires_in_m"] else "-",
                f"{found['other_bytes'] / 1e6:.2f}",
                f"{found['temp_bytes'] / 1e6:.1f}",
                f"{found['secondary_bytes'] / 1e6:.2f}",
                f"{ratio:.2f}x",
            )
        )
        if preset in LIMITS:
            # Codes, and at most 4 % of steps of blocks on top.
            name = f"{preset}: quantized wires between hosts, in M, steps of blocks included"
            checks += [
                Check(name=name, value=found["wires_in_m"], limit=1.04 * LIMITS[preset]),
                Check(name=f"{preset}: step time over zero3", value=ratio, limit=1.6),
            ]
    header = (
        "preset",
        *(f"{phase}, MB" for phase in PHASES),
        "sum, MB",
        "quantized wires",
        "the rest, MB",
        "temporaries, MB",
        "secondary shards, MB",
        "step time",
    )
    pictures = "\n".join(f"![{p}: what travels](zeropp_cost_{p}.png)" for p in PRESETS)
    body = (
        f"A GPT of 6 layers and width 256, {ROWS // NUM_DEVICES} x {LENGTH} tokens a device, on "
        f"{NUM_DEVICES} simulated devices as 2 nodes of 4. Bytes that a host sends to the other in "
        "a step, and memory of one device: bfloat16. M is the bytes of the quantized leaves in 16 "
        "bit times (nodes - 1) / nodes. Step time: over zero3's, float32, median of "
        f"{options.turns} turns; there is no slow link here, so it shows what quantization costs."
        f"\n\n{table(header, rows)}\n\n{pictures}"
    )
    return report("zeropp_cost", "Cost of ZeRO++", body, {"presets": sizes, "s": times}, checks)


if __name__ == "__main__":
    sys.exit(main())
