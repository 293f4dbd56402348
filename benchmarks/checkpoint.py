"""What checkpoints cost: time that a step waits for a save, and host memory.

A GPT of 1 GB of parameters, float32, with AdamW a state of 3 GB: 8 layers of width 1616, scanned.
Two processes of 4 simulated devices each hold half of it. On CPUs a device's memory is the host's.

Time: with a fourth of the layers, saves with `asynchronous` on and off take turns; the step waits
from the call of `save` until it returns. Memory: each of save, restore and export in fresh
processes; the figure is the high-water mark of the resident memory (VmHWM) above what the process
had before.

    python benchmarks/checkpoint.py

Exits with 1 if a target is missed; writes results/checkpoint.json and results/checkpoint.md. Takes
about 5 minutes on 2 cores, and 7 GB of disk. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common import LENGTH, NUM_DEVICES, Check, gpt, report, table, tree_bytes

import zeroxla
from zeroxla.checkpoint.orbax_handler import BUFFER_BYTES

LAYERS, WIDTH = 8, 1616
TIME_LAYERS = 2
ROUNDS = 3
PROCESSES = 2
KINDS = ("save", "restore", "export")


def make(*, key: bool, layers: int = LAYERS) -> tuple[zeroxla.Step, Any, dict[str, Any]]:
    """Return the step, the state (or its shapes, without a key) and a batch."""
    mesh = zeroxla.make_mesh()
    model = gpt(scan=True, layers=layers, width=WIDTH)
    step = zeroxla.make_step(model, mesh, optax.adamw(1e-3))
    rows = np.zeros((NUM_DEVICES // PROCESSES, LENGTH + 1), np.int32)
    batch = zeroxla.global_batch({"tokens": rows}, mesh)
    if not key:
        return step, step.abstract_state(batch), batch
    return step, jax.block_until_ready(step.init(jax.random.key(0), batch)), batch


def resident_bytes(field: str) -> int:
    """Return VmRSS, what this process has resident, or VmHWM, the most it had."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def peak_of(action: Any) -> dict[str, float]:
    """Do something; return how far the resident memory rose above what it was."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is what there is now
    before, begin = resident_bytes("VmRSS"), time.perf_counter()
    action()
    seconds = time.perf_counter() - begin
    return {"peak_bytes": resident_bytes("VmHWM") - before, "seconds": seconds}


def measure_memory(kind: str, folder: Path) -> dict[str, float]:
    """Measure one kind in this process."""
    if kind == "export":
        target = folder / "export"
        return peak_of(lambda: zeroxla.export_params(folder / "checkpoints", target))
    step, state, _ = make(key=kind == "save")
    with zeroxla.Checkpointer(folder / "checkpoints") as checkpointer:
        if kind == "save":

            def action() -> None:
                checkpointer.save(1, state)
                checkpointer.wait()
        else:

            def action() -> None:
                jax.block_until_ready(checkpointer.restore(step).state)

        found = peak_of(action)
    leaves = [np.prod(x.shape) * 4 for x in jax.tree.leaves(state.params)]
    total = tree_bytes((state.params, state.opt_state))
    return {**found, "leaf_bytes": int(max(leaves)), "state_bytes": total}


def measure_time(folder: Path) -> dict[str, Any]:
    """Let saves of both kinds take turns; return the seconds that each blocked the step."""
    step, state, batch = make(key=True, layers=TIME_LAYERS)
    state, _ = step(state, batch)
    found: dict[str, list[float]] = {
        "asynchronous": [],
        "synchronous": [],
        "step": [],
        "beside": [],
    }
    number = 0
    for _ in range(ROUNDS):
        for kind in ("asynchronous", "synchronous"):
            with zeroxla.Checkpointer(
                folder / kind, keep=1, asynchronous=kind == "asynchronous"
            ) as checkpointer:
                number += 1
                jax.block_until_ready(state)
                begin = time.perf_counter()
                checkpointer.save(number, state)
                found[kind].append(time.perf_counter() - begin)
                begin = time.perf_counter()
                state, _ = step(state, batch)
                jax.block_until_ready(state)
                took = time.perf_counter() - begin
                found["beside" if kind == "asynchronous" else "step"].append(took)
    return found


def launched(kind: str, folder: Path, processes: int = PROCESSES) -> list[dict[str, Any]]:
    """Return what each of several fresh processes measures."""
    program = [sys.executable, __file__, "--measure", kind, "--folder", str(folder)]
    command = [
        *(sys.executable, "-m", "zeroxla", "launch", f"--nodes={processes}"),
        *(f"--devices-per-node={NUM_DEVICES // PROCESSES}", "--", *program),
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    files = [folder / f"{kind}.{number}.json" for number in range(processes)]
    return [json.loads(file.read_text()) for file in files]


def main() -> int:
    parser = argparse.ArgumentParser(description="What checkpoints cost.")
    parser.add_argument("--measure", choices=(*KINDS, "time"), help="only in this process")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.measure:
        zeroxla.initialize()
        kind, folder = options.measure, options.folder
        found = measure_time(folder) if kind == "time" else measure_memory(kind, folder)
        number = jax.process_index()
        (folder / f"{kind}.{number}.json").write_text(json.dumps(found))
        return 0

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        memory = {
            kind: launched(kind, folder, 1 if kind == "export" else PROCESSES) for kind in KINDS
        }
    with tempfile.TemporaryDirectory() as name:
        times = launched("time", Path(name))
    return write(memory, times)


def write(memory: dict[str, Any], times: list[dict[str, Any]]) -> int:
    """Write the results."""
    one = memory["save"][0]
    leaf, part = one["leaf_bytes"], one["state_bytes"] / PROCESSES
    # On CPUs a save copies nothing: the step that follows takes new memory.
    allowed = {"save": leaf, "restore": part + leaf, "export": leaf}
    lines, checks = [], []
    for kind, found in memory.items():
        peak = max(x["peak_bytes"] for x in found)
        limit = allowed[kind] + BUFFER_BYTES
        seconds = max(x["seconds"] for x in found)
        lines.append(
            [kind, len(found), f"{peak / 1e9:.2f}", f"{limit / 1e9:.2f}", f"{seconds:.1f}"]
        )
        name = f"{kind}: peak host memory of a process above what it had"
        checks.append(Check(name=name, value=peak / 1e9, limit=limit / 1e9, unit=" GB"))
    blocked = {
        kind: statistics.median(max(rounds) for rounds in zip(*(x[kind] for x in times)))
        for kind in times[0]
    }
    share = blocked["asynchronous"] / blocked["synchronous"]
    name = "asynchronous save: time that a step waits, over a synchronous one"
    checks.append(Check(name=name, value=share, limit=0.1))
    header = ["what", "processes", "peak, GB", "allowed, GB", "seconds"]
    body = (
        f"GPT of {LAYERS} layers and width {WIDTH}, {one['state_bytes'] / 1e9:.2f} GB of "
        f"parameters and AdamW, half of it in each of {PROCESSES} processes of "
        f"{NUM_DEVICES // PROCESSES} "
        "simulated devices. Peaks are above what a process had before: the state itself when it is "
        "saved, nothing of it when it is restored or exported. Allowed: the largest leaf "
        f"({leaf / 1e9:.2f} GB), {BUFFER_BYTES / 2**20:.0f} MiB on their way, and, where it is "
        f"made (restore), the process's part. Export: float32, from the checkpoint.\n\n"
        f"{table(header, lines)}\n\n"
        f"Of {TIME_LAYERS} layers a synchronous save blocks the step for "
        f"{blocked['synchronous']:.2f} s, an asynchronous one for {blocked['asynchronous']:.3f} s "
        f"({share:.1%}; medians of {ROUNDS}). The step after a synchronous save takes "
        f"{blocked['step']:.1f} s, the one beside an asynchronous one's writing "
        f"{blocked['beside']:.1f} s: on CPUs both want the same cores."
    )
    figures = {"memory": memory, "seconds": times, "share": share}
    return report("checkpoint", "What checkpoints cost", body, figures, checks)


if __name__ == "__main__":
    sys.exit(main())
