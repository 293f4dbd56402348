"""Bandwidth of the kernels: share of a copy's, measured, beside the predicted share."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import kernels
from common import RESULTS
from kernel_cases import BLOCK, KERNELS, MIB, NUM_SOURCES, ROTATED, Case, all_cases, prepare

from gpu_parts.findings import Finding, Program
from gpu_parts.place import Place

SIZE, SMALL_SIZE = 256 * MIB, MIB
BUDGET_S = 0.1
PREDICTED = RESULTS / "kernel_code.json"
GPUS = ("A100", "H100", "H200")


def measure(place: Place) -> Iterator[Finding]:
    """Time every kernel against a copy of as many bytes, in turns."""
    predictions = _predictions()
    for case in all_cases(KERNELS, [SMALL_SIZE if place.small else SIZE]):
        for row in kernels.measure(case, {}, budget_s=BUDGET_S):
            backend = row["backend"]
            if backend == "copy":
                continue
            name = f"{name_of(case)}, {backend}"
            if "error" in row:
                text = f"{'failed' if row['fits'] else 'not taken'}: {row['error']}"
                yield Finding(name=name, text=text, failed=row["fits"])
                continue
            text = f"{100 * row['of_copy']:.0f} % of a copy, {row['gb_per_s']:,.0f} GB/s"
            if due := predictions.get((backend, name_of(case))):
                text += f"; predicted {100 * due:.0f} %"
            if backend != "xla":
                text += f"; {row['over_xla']:.2f}x the reference's time"
            yield Finding(name=name, text=text, value=row["of_copy"])


def name_of(case: Case) -> str:
    """Return a case's name in the results of kernel_code.py."""
    kernel = case.kernel.removesuffix(ROTATED)
    if kernel == "dequant_reduce":
        return f"{kernel}, int{case.bits}, {NUM_SOURCES} sources"
    rotated = ", rotated" if case.kernel.endswith(ROTATED) else ""
    return f"{kernel}, int{case.bits}, {case.dtype}, block {BLOCK}{rotated}"


def _predictions() -> dict[tuple[str, str], float]:
    """Return the predicted shares of this process's GPU by backend and name; none for a GPU that
    has none."""
    kind = jax.devices()[0].device_kind
    everything = json.loads(PREDICTED.read_text())
    return {
        (backend, row["kernel"]): row[f"{gpu} share"]
        for backend, rows in (("mosaic", "kernels"), ("triton", "triton"))
        for row in everything[rows]
        for gpu in GPUS
        if gpu in kind and f"{gpu} share" in row
    }


def programs(place: Place) -> Iterator[Program]:
    """Yield the timed calls of float32 and of sums, on inputs of 1 MiB."""
    for case in all_cases(KERNELS, [SMALL_SIZE]):
        if case.dtype == "bfloat16":
            continue
        yield Program(name=f"{name_of(case)}, 1 MiB", lower=functools.partial(_lower, place, case))


def _lower(place: Place, case: Case) -> jax.stages.Lowered:
    work: Any = prepare(case)
    shapes = jax.eval_shape(lambda x: x, work.argument)
    return place.lower(work.call, shapes)
