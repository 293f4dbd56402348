"""What `zeroxla plan` says of memory and bytes, against the compiler.

Sixteen configurations on 8 simulated devices: models, meshes, presets, accumulation, 16 bits,
recomputation, a pipeline, axes that split the work on one row, and the hybrid engine generating.
Of each the plan's memory of a device and bytes of a step, from the trace alone, stand beside those
of the compiled program. XLA schedules for memory
(xla_cpu_enable_concurrency_optimized_scheduler=false).

    python benchmarks/plan_memory.py [--only NAME ...]

Exits with 1 if a target is missed; writes results/plan_memory.json and results/plan_memory.md if
all were measured. Takes about 4 minutes on 2 cores. `tests/planning/test_memory_model.py` runs it
too.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import MEMORY_SCHEDULER, Check, report, start, table

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.inspect import comms, format_bytes, memory
from zeroxla.mesh.machines import Machines
from zeroxla.models import GPT, Llama
from zeroxla.planning.generation import Generating, GenerationPlan
from zeroxla.planning.make import plan_step
from zeroxla.planning.target import Target

SHAPE = {"vocab": 512, "length": 128, "layers": 6, "width": 256, "heads": 4}
LLAMA = {**SHAPE, "heads": 8, "kv_heads": 4, "hidden": 512}
LENGTH = 128
MAX_MEMORY, MAX_BYTES = 1.1, 1.02


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A step, or what its engine generates."""

    model: Any
    mesh: dict[str, int]
    config: ZeroConfig
    rows: int = 16
    generating: Generating | None = None


def config(preset: str = "zero3", **options: Any) -> ZeroConfig:
    return getattr(ZeroConfig, preset)(persistence_threshold=0, **options)


def cases() -> dict[str, Case]:
    """Return what is measured, by name."""
    two, one, eight = ({"node": n, "device": 8 // n} for n in (2, 1, 8))

    def gpt(
        mesh: dict[str, int] = two, rows: int = 16, *, with_: Any = None, **fields: Any
    ) -> Case:
        model = GPT(**{**SHAPE, **fields})
        return Case(model=model, mesh=mesh, config=with_ or config(), rows=rows)

    def llama(mesh: dict[str, int] = two, *, with_: Any = None) -> Case:
        return Case(model=Llama.tiny(**LLAMA), mesh=mesh, config=with_ or config())

    def generating(case: Case, tensor: int, new_tokens: int) -> Case:
        what = Generating(num_prompts=64, prompt_length=64, new_tokens=new_tokens, tensor=tensor)
        return dataclasses.replace(case, generating=what)

    bfloat16 = config(compute_dtype="bfloat16")
    return {
        "gpt": gpt(),
        "gpt, unrolled": gpt(scan=False),
        "gpt, zeropp": gpt(with_=config("zeropp")),
        "gpt, unrolled, zeropp_min": gpt(scan=False, with_=config("zeropp_min")),
        "gpt, 2 micro-batches": gpt(rows=32, with_=config(accumulate=2)),
        "gpt, bfloat16": gpt(with_=bfloat16),
        "gpt, unrolled, remat": gpt(scan=False, remat=True),
        "wider gpt, remat": gpt(width=512, heads=8, remat=True),
        "wider gpt, one node": gpt(one, rows=8, width=512, heads=8),
        "llama": llama(),
        "llama, 8 nodes": llama(eight, with_=config("zeropp")),
        "pipeline of 4 stages": Case(
            model=zeroxla.Pipeline.from_model(GPT(**{**SHAPE, "layers": 8})),
            mesh={"pipe": 4, "node": 1, "device": 2},
            config=config(accumulate=8),
            rows=32,
        ),
        "gpt, tensor 4": gpt({"node": 1, "device": 2, "tensor": 4}, rows=8),
        "gpt, context 4": gpt({"node": 1, "device": 2, "context": 4}, rows=8),
        "gpt generates": generating(gpt(with_=bfloat16, vocab=2048), tensor=4, new_tokens=64),
        "llama generates": generating(llama(), tensor=2, new_tokens=32),
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Bytes of one device: its memory, and what it receives in a step."""

    planned_bytes: int
    compiled_bytes: int
    planned_received: float
    compiled_received: float

    @property
    def of_memory(self) -> float:
        return self.planned_bytes / self.compiled_bytes

    @property
    def of_wires(self) -> float:
        return self.planned_received / self.compiled_received


def measure(case: Case) -> Figures:
    """Plan a case, and compile it."""
    shape = case.mesh
    split = {axis: n for axis, n in shape.items() if axis in ("tensor", "context", "expert")}
    mesh = zeroxla.make_mesh(
        pipe=shape.get("pipe", 1),
        nodes=shape["node"],
        devices_per_node=shape["device"] * math.prod(split.values()),
        **split,
    )
    step = zeroxla.make_step(case.model, mesh, optax.adam(1e-3), config=case.config)
    batch = {"tokens": jax.ShapeDtypeStruct((case.rows, LENGTH + 1), jnp.int32)}
    state = step.abstract_state(batch)
    if case.generating is not None:
        return measure_generation(step, case.generating)
    machines = Machines.load()
    links = dict.fromkeys(("pipe", "node", "device", *split), machines.find_link("memory"))
    target = Target(device=machines.find_device("cpu"), links=links, mesh_shape=shape)
    found = plan_step(step, batch, target)
    compiled = step.lower(state, batch).compile()
    return Figures(
        planned_bytes=found.memory.total_bytes,
        compiled_bytes=memory(compiled).total_bytes,
        planned_received=found.comms.total_bytes(),
        compiled_received=comms(compiled, mesh).total_bytes(),
    )


def measure_generation(step: zeroxla.Step, generating: Generating) -> Figures:
    """Plan what a hybrid engine holds while it generates, and compile that; of what it sends there
    is no plan."""
    found = GenerationPlan.of(step, generating)
    engine = zeroxla.HybridEngine(step, tensor=generating.tensor)
    lowered = engine.lower(
        generating.num_prompts, generating.prompt_length, max_new_tokens=generating.new_tokens
    )
    held = memory(lowered.compile()).total_bytes + found.state_bytes
    return Figures(
        planned_bytes=found.total_bytes,
        compiled_bytes=held,
        planned_received=0.0,
        compiled_received=0.0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(cases()), metavar="NAME")
    only = parser.parse_args().only
    start(flags=MEMORY_SCHEDULER)
    rows, figures, checks = [], [], []
    for name, case in cases().items():
        if only and name not in only:
            continue
        found = measure(case)
        print(f"{name}: memory {found.of_memory:.3f}", end="", flush=True)
        shown = [format_bytes(x) for x in (found.compiled_bytes, found.planned_bytes)]
        row = [name, " x ".join(map(str, case.mesh.values())), *shown, f"{found.of_memory:.3f}"]
        checks.append(check(f"memory of {name}, plan over compiler", found.of_memory, MAX_MEMORY))
        if case.generating is None:
            print(f", bytes {found.of_wires:.4f}", end="")
            row += [format_bytes(found.compiled_received), f"{found.of_wires:.4f}"]
            checks.append(check(f"bytes of {name}, plan over HLO", found.of_wires, MAX_BYTES))
        print()
        rows.append(row + ["-"] * (7 - len(row)))
        figures.append({"name": name, **dataclasses.asdict(found)})
    if only:
        return int(not all(c.passed for c in checks))
    columns = ("configuration", "mesh", "compiler", "plan", "ratio", "received", "plan over HLO")
    body = (
        "GPTs of 6 to 8 layers and widths of 256 and 512, Llamas of 6 layers, Adam, sequences of "
        f"{LENGTH} tokens, 8 simulated devices. Memory of one device: state, batch, temporaries; "
        "bytes that it receives in a step. The last two rows are `HybridEngine.generate`: 64 "
        "prompts of 64 tokens, tensor 4 and 2, beside the training state.\n\n"
        + table(columns, rows)
    )
    return report("plan_memory", "Plans against the compiler", body, {"rows": figures}, checks)


def check(name: str, ratio: float, limit: float) -> Check:
    """Return the target that a ratio is near 1, either way."""
    return Check(name=name, value=max(ratio, 1 / ratio), limit=limit)


if __name__ == "__main__":
    sys.exit(main())
