"""What `zeroxla plan` says of memory and bytes, against the compiler.

Twelve configurations on 8 simulated devices: models, meshes, presets, accumulation, 16 bits,
recomputation, a pipeline. Of each the plan's memory of a device and bytes of a step, from the trace
alone, stand beside those of the compiled program. XLA schedules for memory
(xla_cpu_enable_concurrency_optimized_scheduler=false).

    python benchmarks/plan_memory.py

Exits with 1 if a target is missed; writes results/plan_memory.json and results/plan_memory.md.
Takes about 3 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import MEMORY_SCHEDULER, Check, report, start, table

import zeroxla
from models import GPT, Llama
from zeroxla import ZeroConfig
from zeroxla.inspect import comms, format_bytes, memory
from zeroxla.planning.machines import Machines
from zeroxla.planning.plan import plan_step
from zeroxla.planning.target import Target

SHAPE = {"vocab": 512, "length": 128, "layers": 6, "width": 256, "heads": 4}
LLAMA = {**SHAPE, "heads": 8, "kv_heads": 4, "hidden": 512}
LENGTH = 128


def config(preset: str = "zero3", **options: Any) -> ZeroConfig:
    return getattr(ZeroConfig, preset)(persistence_threshold=0, **options)


def cases() -> dict[str, tuple[Any, dict[str, int], ZeroConfig, int]]:
    """Return (model, mesh, options, rows) by name."""
    two = {"node": 2, "device": 4}
    wide = {**SHAPE, "width": 512, "heads": 8}
    pipeline = zeroxla.Pipeline.from_model(GPT(**{**SHAPE, "layers": 8}))
    return {
        "gpt": (GPT(**SHAPE), two, config(), 16),
        "gpt, unrolled": (GPT(**SHAPE, scan=False), two, config(), 16),
        "gpt, zeropp": (GPT(**SHAPE), two, config("zeropp"), 16),
        "gpt, unrolled, zeropp_min": (GPT(**SHAPE, scan=False), two, config("zeropp_min"), 16),
        "gpt, 2 micro-batches": (GPT(**SHAPE), two, config(accumulate=2), 32),
        "gpt, bfloat16": (GPT(**SHAPE), two, config(compute_dtype="bfloat16"), 16),
        "gpt, unrolled, remat": (GPT(**SHAPE, scan=False, remat=True), two, config(), 16),
        "wider gpt, remat": (GPT(**wide, remat=True), two, config(), 16),
        "wider gpt, one node": (GPT(**wide), {"node": 1, "device": 8}, config(), 8),
        "llama": (Llama.tiny(**LLAMA), two, config(), 16),
        "llama, 8 nodes": (Llama.tiny(**LLAMA), {"node": 8, "device": 1}, config("zeropp"), 16),
        "pipeline of 4 stages": (
            pipeline,
            {"pipe": 4, "node": 1, "device": 2},
            config(accumulate=8),
            32,
        ),
    }


def main() -> int:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    start(flags=MEMORY_SCHEDULER)
    machines = Machines.load()
    rows, figures, checks = [], [], []
    for name, (model, shape, options, num_rows) in cases().items():
        mesh = zeroxla.make_mesh(
            pipe=shape.get("pipe", 1), nodes=shape["node"], devices_per_node=shape["device"]
        )
        step = zeroxla.make_step(model, mesh, optax.adam(1e-3), config=options)
        batch = {"tokens": jax.ShapeDtypeStruct((num_rows, LENGTH + 1), jnp.int32)}
        links = dict.fromkeys(("pipe", "node", "device"), machines.find_link("memory"))
        target = Target(device=machines.find_device("cpu"), links=links, mesh_shape=shape)
        found = plan_step(step, batch, target)
        compiled = step.lower(step.abstract_state(batch), batch).compile()
        held, sent = memory(compiled).total_bytes, comms(compiled, mesh).total_bytes()
        figure = {
            "name": name,
            "planned_bytes": found.memory.total_bytes,
            "compiled_bytes": held,
            "planned_received": found.comms.total_bytes(),
            "compiled_received": sent,
        }
        of_memory, of_wires = found.memory.total_bytes / held, found.comms.total_bytes() / sent
        print(f"{name}: memory {of_memory:.3f}, bytes {of_wires:.4f}", flush=True)
        axes = " x ".join(map(str, shape.values()))
        shown = [format_bytes(x) for x in (held, found.memory.total_bytes)]
        rows.append([name, axes, *shown, f"{of_memory:.3f}", format_bytes(sent), f"{of_wires:.4f}"])
        figures.append(figure)
        checks += [
            Check(
                name=f"memory of {name}, plan over compiler",
                value=max(of_memory, 1 / of_memory),
                limit=1.1,
            ),
            Check(
                name=f"bytes of {name}, plan over HLO",
                value=max(of_wires, 1 / of_wires),
                limit=1.02,
            ),
        ]
    columns = ("configuration", "mesh", "compiler", "plan", "ratio", "received", "plan over HLO")
    body = (
        "GPTs of 6 to 8 layers and widths of 256 and 512, Llamas of 6 layers, Adam, sequences of "
        f"{LENGTH} tokens, 8 simulated devices. Memory of one device: state, batch, "
        "temporaries; bytes that it receives in a step.\n\n" + table(columns, rows)
    )
    return report("plan_memory", "Plans against the compiler", body, {"rows": figures}, checks)


if __name__ == "__main__":
    sys.exit(main())
