"""Activations that wait in the host's memory, compiled for H200 that nobody has to own.

A scanned GPT in bfloat16 on 2 devices, under a memory budget that lets values leave
(`Offload(activations="host")`): which copies lead to the host and back, and which matmuls run
beside them. Nothing runs.

    python benchmarks/gpu_activations.py

Exits with 1 if a target is missed; writes results/gpu_activations.json and .md. Takes about 3
minutes on 2 cores, and needs JAX's CUDA wheels, as gpu_schedule.py does. Without the wheels it says
so and exits with 0.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import Check, report, table
from jax.sharding import Mesh
from schedule import HostCopy, host_copies

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.models import GPT
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh

LENGTH, ROWS = 512, 4  # ROWS: sequences of a device
SHARE = 0.6
"""The budget's share of the temporaries that the step takes without one."""
LARGE = 2**20
"""A copy of fewer bytes takes about as long as its start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Offloaded:
    """A compiled step whose activations may wait on the host. Bytes are those of one device.

    Attributes:
      budget: the bytes that the step may take.
      total_bytes: those that it takes, by the compiler.
      host_bytes: the bytes of activations that the budget sends to the host.
      copies: the copies of the program.
      without: `total_bytes` without a budget.
    """

    budget: int
    total_bytes: int
    host_bytes: int
    copies: list[HostCopy]
    without: int


def compile_step(mesh: Mesh, **options: Any) -> tuple[Any, Any]:
    """Compile a train step for the mesh. Return the step and the program."""
    model = GPT(vocab=256, length=LENGTH, layers=4, width=4096, heads=8, scan=True, loss_chunk=0)
    config = ZeroConfig(compute_dtype="bfloat16", max_live_parameters=0, **options)
    step = zeroxla.make_step(model, mesh, optax.sgd(1e-3), config=config)
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size * ROWS, LENGTH + 1), jnp.int32)}
    return step, step.lower(step.abstract_state(batch), batch).compile()


def offloaded(mesh: Mesh) -> Offloaded:
    """Compile the step without a budget and with one, and read the copies."""
    plain = zeroxla.inspect.memory(compile_step(mesh)[1])
    budget = plain.total_bytes - int((1 - SHARE) * plain.temp_bytes)
    step, compiled = compile_step(mesh, memory=budget, offload=Offload(activations="host"))
    return Offloaded(
        budget=budget,
        total_bytes=zeroxla.inspect.memory(compiled).total_bytes,
        host_bytes=int(step.describe().memory.best.keeping.host_bytes),
        copies=host_copies(compiled.as_text()),
        without=plain.total_bytes,
    )


def make_checks(found: Offloaded) -> list[Check]:
    """Compare the program with the targets."""
    checks = [
        Check(name="bytes over the budget", value=found.total_bytes / found.budget, limit=1.0)
    ]
    for to_host, way in ((True, "to the host"), (False, "from the host")):
        large = [c for c in found.copies if c.to_host == to_host and c.num_bytes >= LARGE]
        in_loop = [c for c in large if c.in_loop]
        alone = sum(not c.matmuls for c in in_loop) / max(len(in_loop), 1)
        checks.append(Check(name=f"no copy {way} in a loop", value=float(not in_loop), limit=0))
        name = f"share of large copies {way} in a loop with no matmul beside them"
        checks.append(Check(name=name, value=alone, limit=0))
    return checks


def main() -> int:
    try:
        mesh = target_mesh(H200, {"node": 1, "device": 2})
    except WheelsMissingError as error:
        print(f"nothing measured: {error}")
        return 0
    found = offloaded(mesh)
    rows = [
        [
            "to the host" if c.to_host else "from the host",
            "loop" if c.in_loop else "outside of loops",
            f"{c.num_bytes / 1e6:.2f}",
            str(c.matmuls),
        ]
        for c in found.copies
    ]
    header = ["copy", "where", "MB", "matmuls beside it"]
    body = (
        f"A scanned GPT of 4 layers, width 4096, bfloat16, {ROWS} x {LENGTH} tokens a device, "
        "compiled ahead of time for 2 H200. Without a budget a step takes "
        f"{found.without / 1e6:.0f} MB; {found.budget / 1e6:.0f} MB are allowed, and it takes "
        f"{found.total_bytes / 1e6:.0f}, with {found.host_bytes / 1e6:.0f} MB on the host. Each "
        "copy below has a start and a done; the last column counts the matmuls that are scheduled "
        "between them. XLA takes the first or last turn out of a loop.\n\n"
        f"{table(header, rows)}"
    )
    figures = dataclasses.asdict(found)
    return report("gpu_activations", "Activations on the host", body, figures, make_checks(found))


if __name__ == "__main__":
    sys.exit(main())
