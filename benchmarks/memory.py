"""Memory per device of a train step, from the compiler's own figures: zeroxla and plain jit FSDP.

A GPT of 101 MB in float32 (8 layers of width 512), unrolled and scanned, and the same with 16
layers; 8 simulated devices as 2 nodes of 4, 1 x 128 tokens a device, AdamW. Nothing runs: each step
is compiled for shapes, in a process of its own for each setting of XLA's CPU scheduler, as that is
a flag of the process.

Activations kept by a layer are computed apart from zeroxla: the residuals that `jax.vjp` of one
block keeps and that depend on its input.

    python benchmarks/memory.py

Exits with 1 if a target is missed; writes results/memory.json and results/memory.md. Takes about
2 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import (
    LENGTH,
    MEMORY_SCHEDULER,
    NUM_DEVICES,
    Check,
    PlainFSDP,
    gpt,
    report,
    residual_bytes,
    start,
    table,
    token_shapes,
    tree_bytes,
)

import zeroxla
from zeroxla.models.gpt_layers import Block

WIDTH = 512
LAYERS = (8, 16)
SCHEDULERS = {"memory": MEMORY_SCHEDULER, "default": ""}
# The compiler aligns buffers; beyond that, growth is exactly what it should be.
ROUNDING = 1.01


def measure() -> list[dict[str, Any]]:
    """Compile every program and return its figures in bytes a device."""
    mesh = start()
    batch = token_shapes(NUM_DEVICES)
    optimizer = optax.adamw(1e-3)
    # Every leaf is fetched and released; persistent ones stay whole by design.
    config = zeroxla.ZeroConfig(persistence_threshold=0)
    rows = []
    for scan in (False, True):
        for layers in LAYERS:
            model = gpt(scan=scan, layers=layers, width=WIDTH)
            step = zeroxla.make_step(model, mesh, optimizer, config=config)
            state = step.abstract_state(batch)
            programs = {
                "zeroxla": step.lower(state, batch),
                "plain jit": PlainFSDP(model, mesh, optimizer, state, batch).lower(),
            }
            for program, lowered in programs.items():
                used = zeroxla.inspect.memory(lowered.compile())
                rows.append(
                    {
                        "program": program,
                        "scan": scan,
                        "layers": layers,
                        "params": tree_bytes(state.params),
                        "state_shard": tree_bytes((state.params, state.opt_state)) / NUM_DEVICES,
                        "arguments": used.argument_bytes,
                        "temporaries": used.temp_bytes,
                    }
                )
    return rows


def measure_apart(flags: str) -> list[dict[str, Any]]:
    """Return `measure()` of a fresh process with these XLA flags."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    done = subprocess.run(
        [sys.executable, __file__, "--measure"],
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def block_bytes() -> tuple[int, int]:
    """Return the bytes of one block's parameters, and of the activations that its backward needs
    for one device's rows."""
    block = Block(heads=8, hidden=4 * WIDTH, layers=LAYERS[0], dropout=0.0, train=True)
    x_BLD = jax.ShapeDtypeStruct((1, LENGTH, WIDTH), jnp.float32)
    params = jax.eval_shape(lambda x: block.init(jax.random.key(0), x, None), x_BLD)

    def pullback(params: Any, x_BLD: jax.Array) -> Any:
        return jax.vjp(lambda p, x: block.apply(p, x, None)[0], params, x_BLD)[1]

    return tree_bytes(params), residual_bytes(pullback, params, x_BLD)


def find(rows: list[dict[str, Any]], program: str, *, scan: bool, layers: int) -> dict[str, Any]:
    wanted = (program, scan, layers)
    (row,) = (r for r in rows if (r["program"], r["scan"], r["layers"]) == wanted)
    return row


def make_checks(
    rows: list[dict[str, Any]], unit: int, activations: int, *, few: int, many: int
) -> list[Check]:
    """Compare the figures of the memory scheduler with the targets."""
    checks = []
    for scan, kind in ((False, "unrolled"), (True, "scanned")):
        ours, doubled = (find(rows, "zeroxla", scan=scan, layers=n) for n in (few, many))
        off = max(abs(r["arguments"] / r["state_shard"] - 1) for r in (ours, doubled))
        checks.append(Check(name=f"{kind}: arguments off state / world", value=off, limit=0.03))
        growth = (doubled["temporaries"] - ours["temporaries"]) / 1e6
        due = (many - few) * (activations + unit / NUM_DEVICES) / 1e6
        name = (
            f"{kind}: growth of temporaries from {few} to {many} layers, against activations kept "
            f"and gradient shards ({due:.2f} MB)"
        )
        checks.append(Check(name=name, value=growth, limit=due * ROUNDING, unit=" MB"))
    ours = find(rows, "zeroxla", scan=False, layers=few)
    plain = find(rows, "plain jit", scan=False, layers=few)
    ratio = ours["temporaries"] / plain["temporaries"]
    checks.append(Check(name="unrolled: temporaries over plain jit FSDP", value=ratio, limit=0.4))
    used = find(rows, "zeroxla", scan=True, layers=few)["temporaries"] / 1e6
    limit = (3 * unit + few * activations) / 1e6
    name = "scanned: temporaries, against 3 units and the activations kept"
    checks.append(Check(name=name, value=used, limit=limit, unit=" MB"))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description="Memory per device of a train step.")
    parser.add_argument("--measure", action="store_true", help="print this process's figures only")
    if parser.parse_args().measure:
        print(json.dumps(measure()))
        return 0
    if jax.__version_info__ < (0, 11):
        print(f"needs JAX 0.11 or later, this is {jax.__version__}: before, XLA on the CPU drops")
        print("the barriers that keep forward and backward gathers apart, and figures mean nothing")
        return 1
    figures = {name: measure_apart(flags) for name, flags in SCHEDULERS.items()}
    unit, activations = block_bytes()

    lines = []
    for row in figures["memory"]:
        program, scan, layers = row["program"], row["scan"], row["layers"]
        other = find(figures["default"], program, scan=scan, layers=layers)
        plain = [find(figures[s], "plain jit", scan=scan, layers=layers) for s in SCHEDULERS]
        cells = [program, "scanned" if scan else "unrolled", layers]
        cells += [f"{row[n] / 1e6:.2f}" for n in ("params", "state_shard", "arguments")]
        for used, baseline in zip((row, other), plain, strict=True):
            ratio = used["temporaries"] / baseline["temporaries"]
            cells.append(f"{used['temporaries'] / 1e6:.2f} ({ratio:.2f}x)")
        lines.append(cells)
    columns = ("step", "model", "layers", "parameters", "state / world", "arguments")
    header = (*columns, "temporaries", "temporaries, default scheduler")
    body = (
        f"GPT of width {WIDTH}, float32, AdamW, 1 x {LENGTH} tokens a device, {NUM_DEVICES} "
        "simulated devices as 2 nodes of 4, no persistent leaves. MB a device (parameters: MB in "
        "all), as the compiler plans them. Targets are held against the column `temporaries`, "
        f"taken with `{MEMORY_SCHEDULER}`; the last column is without that flag. In brackets: over "
        "plain `jit` with FSDP sharding annotations, under the same flag.\n\n"
        f"{table(header, lines)}\n\n"
        f"One block holds {unit / 1e6:.2f} MB of parameters (the unit of the scanned model); its "
        f"backward keeps {activations / 1e6:.2f} MB of activations (`jax.vjp`'s residuals that "
        "depend on its input); its gradient shard has "
        f"{unit / NUM_DEVICES / 1e6:.2f} MB."
    )
    checks = make_checks(figures["memory"], unit, activations, few=LAYERS[0], many=LAYERS[1])
    found = {"bytes": figures, "unit_bytes": unit, "activation_bytes_of_a_layer": activations}
    return report("memory", "Memory per device", body, found, checks)


if __name__ == "__main__":
    sys.exit(main())
