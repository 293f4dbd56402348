"""The GPU schedule of a train step, compiled for 8 H200 that nobody has to own.

A GPT in bfloat16, unrolled and scanned, 2 nodes x 4 devices: which matmuls run while which gathers
are in flight, the compiler's temporaries, and the bytes that travel. Nothing runs.

    python benchmarks/gpu_schedule.py

Exits with 1 if a target is missed; writes results/gpu_schedule.json and results/gpu_schedule.md.
Takes 2 to 5 minutes on 2 cores. It needs JAX's CUDA wheels, which a machine without a GPU can have,
best in an environment of its own (about 1 GB more): the extra plan-gpu,

    pip install -e ".[dev,plan-gpu]"

Without the wheels it says so and exits with 0.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import Check, report, residual_bytes, table
from jax.sharding import Mesh
from schedule import Transfer, gathers

import zeroxla
from zeroxla.frontend import adapt
from zeroxla.models import GPT
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh

NODES, DEVICES = 2, 4
MESH = {"node": NODES, "device": DEVICES}
LAYERS, WIDTH, LENGTH, ROWS = 6, 1024, 128, 1  # ROWS: sequences of a device
DIRECTIONS = ("forward", "backward")
VARIANTS: dict[str, dict[str, Any]] = {
    "unrolled": {"scan": False},
    "scanned": {"scan": True},
    "scanned, bfloat16 gradients": {"scan": True, "reduce_dtype": "bfloat16"},
    "unrolled, float32": {"scan": False, "compute_dtype": "float32"},
    "scanned, float32": {"scan": True, "compute_dtype": "float32"},
    "unrolled, no prefetch": {"scan": False, "prefetch_bucket": 0},
    "scanned, no prefetch": {"scan": True, "prefetch_bucket": 0},
}
TARGETED = ("unrolled", "scanned")
WITHOUT_PREFETCH = tuple(name for name in VARIANTS if "no prefetch" in name)
MAX_UNITS = 4  # of temporaries, beside the activations kept
MAX_COMBINED = 2  # units in one collective: of two neighbours, not of all layers


def model(*, scan: bool) -> GPT:
    """Return the GPT that is compiled."""
    return GPT(vocab=256, length=LENGTH, layers=LAYERS, width=WIDTH, heads=8, scan=scan)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What was read from one compiled step; bytes are those of one device.

    Attributes:
      gathers: every all-gather.
      received_bytes: over the network in a step, by all collectives.
      temp_bytes: the compiler's temporaries.
      extra_units: temporaries beyond the activations that backward needs, over the float32 leaves
        of one unit.
      compile_s: seconds.
    """

    gathers: list[Transfer]
    received_bytes: float
    temp_bytes: int
    extra_units: float
    compile_s: float

    def next_units(self, direction: str) -> list[Transfer]:
        """The gathers of units that another unit of the same direction precedes: those in a loop
        over layers, or, where there is none, those of all layers but the direction's first."""
        mine = [g for g in self.gathers if g.direction == direction]
        looped = [g for g in mine if g.in_loop]
        first = "h_0" if direction == "forward" else f"h_{LAYERS - 1}"
        others = {f"h_{i}" for i in range(LAYERS)} - {first}
        return looped or [g for g in mine if g.serves in others]


def compile_step(mesh: Mesh, *, scan: bool, **options: Any) -> Program:
    """Compile a train step for the mesh and read its schedule."""
    config = zeroxla.ZeroConfig(**{"compute_dtype": "bfloat16", **options})
    step = zeroxla.make_step(model(scan=scan), mesh, optax.adamw(1e-3), config=config)
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size * ROWS, LENGTH + 1), jnp.int32)}
    lowered = step.lower(step.abstract_state(batch), batch)
    begin = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - begin
    temp_bytes = zeroxla.inspect.memory(compiled).temp_bytes
    return Program(
        gathers=gathers(compiled.as_text()),
        received_bytes=zeroxla.inspect.comms(compiled, mesh).total_bytes(),
        temp_bytes=temp_bytes,
        extra_units=(temp_bytes - activation_bytes(config.compute_dtype)) / (4 * unit_elements()),
        compile_s=compile_s,
    )


def unit_elements() -> int:
    """Return the elements of the leaves of one layer."""
    shapes = jax.eval_shape(adapt(model(scan=True)).init, jax.random.key(0), _rows())[0]["h"]
    return sum(x.size for x in jax.tree.leaves(shapes)) // LAYERS


@functools.cache
def activation_bytes(dtype: str) -> int:
    """Return the bytes of the activations that backward needs, for one device's rows."""
    adapted = adapt(model(scan=False))
    params = jax.eval_shape(adapted.init, jax.random.key(0), _rows())[0]
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), params)

    def pullback(params: Any, rows: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            return adapted.loss(params, {}, rows, jax.random.key(0), train=True)[0]

        return jax.vjp(loss, params)[1]

    return residual_bytes(pullback, params, _rows())


def _rows() -> dict[str, jax.ShapeDtypeStruct]:
    return {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32)}


def make_checks(name: str, program: Program, unrolled: Program) -> list[Check]:
    """Compare a program with the targets; `unrolled` says what bytes must travel."""
    checks = []
    for direction in DIRECTIONS:
        found = program.next_units(direction)
        alone = sum(g.count for g in found if not g.matmuls) if found else LAYERS
        text = f"{name}: {direction} gathers of a next unit without a matmul beside them"
        checks.append(Check(name=text, value=alone, limit=0))
    largest = max(g.result_bytes for g in program.gathers) / (2 * unit_elements())
    text = f"{name}: largest gather, in units"
    checks.append(Check(name=text, value=largest, limit=MAX_COMBINED))
    text = f"{name}: temporaries beyond the activations, in units of float32"
    checks.append(Check(name=text, value=program.extra_units, limit=MAX_UNITS))
    ratio = program.received_bytes / unrolled.received_bytes
    checks.append(Check(name=f"{name}: bytes over unrolled", value=ratio, limit=1.01))
    return checks


def row(name: str, program: Program) -> list[str]:
    """Return a program's line of the table."""
    cells = [name]
    for direction in DIRECTIONS:
        found = program.next_units(direction)
        for hop in ("node", "device"):
            beside = [str(g.matmuls) for g in found if g.hop == hop for _ in range(g.count)]
            cells.append(" ".join(beside))
    largest = max(g.result_bytes for g in program.gathers)
    cells += [f"{x / 1e6:.1f}" for x in (largest, program.received_bytes, program.temp_bytes)]
    return [*cells, f"{program.extra_units:.2f}", f"{program.compile_s:.0f}"]


def main() -> int:
    try:
        mesh = target_mesh(H200, MESH)
    except WheelsMissingError as error:
        print(f"nothing measured: {error}")
        return 0
    programs = {name: compile_step(mesh, **options) for name, options in VARIANTS.items()}
    unit, kept = unit_elements(), activation_bytes("bfloat16")
    header = ["step", *(f"{d}, hop {hop}" for d in DIRECTIONS for hop in ("node", "device"))]
    header += [
        "largest gather, MB",
        "received, MB",
        "temporaries, MB",
        "the same beyond the activations, in units",
    ]
    header += ["compilation, s"]
    body = (
        f"GPT of {LAYERS} layers, width {WIDTH}, bfloat16, AdamW, {ROWS} x {LENGTH} tokens a "
        f"device, compiled ahead of time for {NODES} nodes x {DEVICES} H200 (CUDA 13). The four "
        "columns of hops say how many matmuls are scheduled between start and done of the gathers "
        "of a next unit: one number for each layer but the direction's first, or for each turn of "
        "a loop (XLA takes the first or last turns out of a loop to begin or end what runs across "
        "turns). Figures are those of one device; MB = 10^6 bytes.\n\n"
        f"{table(header, [row(name, program) for name, program in programs.items()])}\n\n"
        f"One layer has {unit:,} elements: a unit is {4 * unit / 1e6:.1f} MB in float32, as its "
        f"gradients travel, and {2 * unit / 1e6:.1f} MB on the bfloat16 wire of its gathers. "
        f"Backward needs {kept / 1e6:.1f} MB of activations in bfloat16 (`jax.vjp`'s residuals "
        "that depend on the batch). The temporaries hold them or what they are computed from, the "
        f"float32 gradient shards of all layers ({LAYERS / (NODES * DEVICES):.2f} units), the "
        "present unit, the next one, and the gradients of one; in a loop also copies of parts of "
        "the next unit, which XLA carries from turn to turn. With those a float32 wire, which is "
        f"not among the targets below, takes {programs['scanned, float32'].extra_units:.2f} units "
        f"scanned, where {MAX_UNITS} are the bound; there a unit is also several collectives, and "
        "some of them have all the matmuls beside them and others none. Gradients of 16 bit "
        "travel by all-to-all, which XLA neither combines nor runs across turns: they take the "
        "matmuls beside which the gathers would run."
    )
    checks = [
        check
        for name in TARGETED
        for check in make_checks(name, programs[name], programs["unrolled"])
    ]
    figures = {
        "target": {"device": H200.stem, "nodes": NODES, "devices_per_node": DEVICES},
        "plugin": {name: version(name) for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt")},
        "unit_elements": unit,
        "activation_bytes": kept,
        "programs": {name: dataclasses.asdict(program) for name, program in programs.items()},
    }
    return report("gpu_schedule", "GPU schedule", body, figures, checks)


if __name__ == "__main__":
    sys.exit(main())
