"""What `zeroxla plan` says of memory and bytes, against XLA's GPU compiler, for 8 H200 that nobody
has to own.

GPTs in bfloat16 on 2 nodes x 4 devices: ZeRO-3 and ZeRO++, unrolled and scanned, blocks computed
again in backward or kept. Of each the plan's memory of a device and bytes of a step, from the trace
alone, stand beside those of the program that XLA compiles ahead of time. Nothing runs.

    python benchmarks/plan_compiled.py

Exits with 1 if a target is missed; writes results/plan_compiled.json and results/plan_compiled.md.
Takes about 10 minutes on 2 cores. It needs the extra plan-gpu, and without it says so and exits
with 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
from common import Check, report, table

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.inspect import format_bytes
from zeroxla.models import GPT
from zeroxla.planning.gpu_topology import H200, WheelsMissingError, target_mesh

MESH = {"node": 2, "device": 4}
LENGTH, ROWS = 512, 16
SHAPE = {"vocab": 512, "length": LENGTH, "layers": 6, "width": 1024, "heads": 8}
MEMORY, BYTES = 1.1, 1.02  # the farthest that plan and compiler may be apart, as ratios


def cases() -> dict[str, tuple[GPT, ZeroConfig]]:
    """Return (model, options) by name."""
    presets = ("zero3", "zeropp")
    models = {
        "unrolled, remat": {"scan": False, "remat": True},
        "scanned, remat": {"scan": True, "remat": True},
        "unrolled": {"scan": False},
        "scanned": {"scan": True},
    }
    return {
        f"{preset}, {name}": (
            GPT(**SHAPE, **options),
            getattr(ZeroConfig, preset)(compute_dtype="bfloat16"),
        )
        for preset in presets
        for name, options in models.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(cases()), metavar="NAME")
    only = parser.parse_args().only
    try:
        target_mesh(H200, MESH)
    except WheelsMissingError as error:
        print(f"nothing measured: {error}")
        return 0
    rows: list[list[str]] = []
    figures: list[dict[str, Any]] = []
    checks: list[Check] = []
    note = ""
    for name, (model, config) in cases().items():
        if only and name not in only:
            continue
        batch = {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), jnp.int32)}
        plan = zeroxla.plan(model, MESH, batch, config=config, device="h200", compiled=True)
        assert plan.compiled is not None
        assert plan.compiled.platform == "gpu"
        note = plan.compiled.note
        held, planned = plan.compiled.memory.total_bytes, plan.memory.total_bytes
        sent, counted = plan.compiled.comms.total_bytes(), plan.comms.total_bytes()
        ratios = planned / held, counted / sent
        print(f"{name}: memory {ratios[0]:.3f}, bytes {ratios[1]:.4f}", flush=True)
        shown = [format_bytes(x) for x in (held, plan.compiled.memory.temp_bytes, planned)]
        rows.append([name, *shown, f"{ratios[0]:.3f}", format_bytes(sent), f"{ratios[1]:.4f}"])
        figures.append(
            {
                "name": name,
                "planned": plan.memory.parts(),
                "planned_bytes": planned,
                "compiled": plan.compiled.memory.to_dict(),
                "planned_received": counted,
                "compiled_received": sent,
                "compiled_rows": [dataclasses.asdict(row) for row in plan.compiled.comms.rows],
            }
        )
        for what, ratio, limit in zip(("memory", "bytes"), ratios, (MEMORY, BYTES)):
            text = f"{what} of {name}, plan over compiler"
            checks.append(Check(name=text, value=max(ratio, 1 / ratio), limit=limit))
    if only:
        return int(not all(check.passed for check in checks))
    columns = ("configuration", "compiler", "of it temporaries", "plan", "ratio", "received")
    body = (
        f"GPT of {SHAPE['layers']} layers, width {SHAPE['width']}, bfloat16, AdamW, "
        f"{ROWS // 8} x {LENGTH} tokens a device, 2 nodes x 4 devices. {note} Memory of one "
        "device: state, batch, temporaries; bytes that it receives in a step.\n\n"
        + table((*columns, "plan over HLO"), rows)
        + "\n\n"
        + "A unit's reduction runs beside the backward of the next one, so that unit's gradients, "
        "50 MB in float32, stay for so long: the plan counts them. What is missed is what the "
        "scheduler lets run ahead beyond that while the device has room; it shows where blocks "
        "are computed again, and little else is there."
    )
    wheels = {name: version(name) for name in ("jax-cuda13-plugin", "nvidia-cuda-nvcc")}
    return report(
        "plan_compiled",
        "Plans against the GPU compiler",
        body,
        {"plugin": wheels, "rows": figures},
        checks,
    )


if __name__ == "__main__":
    sys.exit(main())
