"""Peak host memory while a model is initialised on 8 simulated devices.

GPTs whose state (parameters and AdamW, float32) is 3 GB: 8 layers of width 1616, scanned and
unrolled. Simulated devices share the host's memory, so the process holds the whole state, once. The
figure is the high-water mark of the process's resident memory (VmHWM) after `step.init`, with
nothing subtracted: Python, JAX and the compiler are in it. Each measurement is a fresh process.

    python benchmarks/init_memory.py

Exits with 1 if a target is missed; writes results/init_memory.json and results/init_memory.md.
Takes about 1 minute on 2 cores. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import optax
from common import (
    MEMORY_SCHEDULER,
    NUM_DEVICES,
    Check,
    gpt,
    report,
    start,
    table,
    token_shapes,
    tree_bytes,
)

import zeroxla

LAYERS, WIDTH = 8, 1616
ALLOWED_BYTES = 0.5e9
SCHEDULERS = {"memory": MEMORY_SCHEDULER, "default": ""}


def measure(*, scan: bool) -> dict[str, float]:
    """Initialise the model in this process and return bytes and seconds."""
    mesh = start()
    batch = token_shapes(NUM_DEVICES)
    model = gpt(scan=scan, layers=LAYERS, width=WIDTH)
    step = zeroxla.make_step(model, mesh, optax.adamw(1e-3))
    key = jax.block_until_ready(jax.random.key(0))
    before = peak_bytes()
    begin = time.perf_counter()
    state = jax.block_until_ready(step.init(key, batch))
    seconds = time.perf_counter() - begin
    return {
        "state_bytes": tree_bytes((state.params, state.opt_state)),
        "before_bytes": before,
        "peak_bytes": peak_bytes(),
        "seconds": seconds,
    }


def peak_bytes() -> int:
    """Return the most memory that this process ever had resident."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def measure_apart(flags: str, *, scan: bool) -> dict[str, float]:
    """Return `measure()` of a fresh process with these XLA flags."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    done = subprocess.run(
        [sys.executable, __file__, "--measure", "scanned" if scan else "unrolled"],
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description="Peak host memory of step.init.")
    parser.add_argument("--measure", choices=("scanned", "unrolled"), help="only in this process")
    kind = parser.parse_args().measure
    if kind is not None:
        print(json.dumps(measure(scan=kind == "scanned")))
        return 0

    figures, lines, checks = {}, [], []
    for scan, kind in ((True, "scanned"), (False, "unrolled")):
        for scheduler, flags in SCHEDULERS.items():
            found = measure_apart(flags, scan=scan)
            figures[f"{kind}, {scheduler} scheduler"] = found
            state, before, peak = (found[f"{n}_bytes"] for n in ("state", "before", "peak"))
            above = (peak - state) / 1e9
            gigabytes = (f"{x / 1e9:.2f}" for x in (state, before, peak))
            cells = [*gigabytes, f"{above:.2f}", f"{found['seconds']:.0f}"]
            lines.append([kind, scheduler, *cells])
            if scheduler == "memory":
                name = f"{kind}: peak above the state"
                limit = ALLOWED_BYTES / 1e9
                checks.append(Check(name=name, value=above, limit=limit, unit=" GB"))
    header = ["model", "scheduler", "state", "before init", "peak", "peak - state", "seconds"]
    body = (
        f"GPT of {LAYERS} layers and width {WIDTH}, AdamW, {NUM_DEVICES} simulated devices as 2 "
        "nodes of 4, in one process that holds all their shards. GB resident; nothing is "
        "subtracted: `before init` is what Python and JAX had used by then. Targets are held "
        f"against the rows `memory`, taken with `{MEMORY_SCHEDULER}`.\n\n{table(header, lines)}"
    )
    title = "Peak host memory while initialising"
    return report("init_memory", title, body, figures, checks)


if __name__ == "__main__":
    sys.exit(main())
