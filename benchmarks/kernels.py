"""Speed of quantize, dequantize, swizzled_quantize and dequant_reduce, and of the rotation.

GB/s of bytes read and written, over a copy of as many bytes in the same run, over the XLA
reference, and beside the closest operations of PyTorch, bitsandbytes and CuPy where they are
installed and can use the device. Every backend that there is: "mosaic" and "triton" on NVIDIA GPUs,
"xla" everywhere. Copy and backends take turns; figures are medians over turns.

    python benchmarks/kernels.py [--quick] [--sizes 1 16 64] [--kernels quantize dequantize]

Sizes are in MiB; by default 1, 16 and 64 on a CPU, up to 1024 elsewhere. Exits with 1 if a target
is missed; writes results/kernels_DEVICE.json, .md and .png. Takes about 3 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
from types import ModuleType

if "--one-core" in sys.argv:  # before JAX counts the cores
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other libraries need memory too

import jax
from common import Check, report
from kernel_cases import (
    BLOCK,
    DEVICES,
    KERNELS,
    MIB,
    NODES,
    NUM_SOURCES,
    Case,
    Runner,
    all_cases,
    copy_of,
    median_ratio,
    num_different,
    prepare,
    take_turns,
)
from kernel_rivals import LIBRARIES, find, runners
from kernel_tables import COPY, STYLES, Row, draw, pivot
from rich.progress import Progress

PALLAS = ("mosaic", "triton")
# The share of the copy's bandwidth due on an H200 from LARGE bytes on, by kernel.
DUE = {"quantize": 0.85, "dequantize": 0.85, "swizzled_quantize": 0.85, "dequant_reduce": 0.80}
LARGE = 256 * MIB
NOISE = 1.05  # of two times of equally fast programs
ONE_CORE_MIB = 64


def backends() -> tuple[str, ...]:
    """Return the backends to try on the default device; Mosaic's need a Hopper or a later GPU."""
    device = jax.devices()[0]
    if jax.default_backend() != "gpu" or "nvidia" not in device.device_kind.lower():
        return ("xla",)
    return (*PALLAS, "xla") if float(device.compute_capability) >= 9 else ("triton", "xla")


def measure(case: Case, modules: dict[str, ModuleType], budget_s: float) -> list[Row]:
    """Return a row for each backend and each library's operation of one case.

    A row has "gb_per_s", "of_copy" (the share of the copy's bandwidth), "over_xla" (time over the
    reference's) and "different" (from the reference: bytes of wires, elements of arrays; None for
    libraries); or "error" and "fits", False where the backend does not take such a case.
    """
    work = prepare(case)
    about = {**dataclasses.asdict(case), "moved_bytes": work.moved_bytes}
    copy = Runner(name=COPY, call=copy_of(work.moved_bytes))
    reference = Runner(name="xla", call=work.on("xla"))
    expected = reference.call()
    ours, rows = [copy, reference], []
    jax.block_until_ready(copy.call())
    different = {"xla": 0}
    for backend in backends():
        if backend == "xla":
            continue
        runner = Runner(name=backend, call=work.on(backend))
        try:
            different[backend] = num_different(runner.call(), expected)
        except Exception as error:  # whatever a compiler says: the other backends go on
            fits = not isinstance(error, ValueError | NotImplementedError)
            text = str(error).split("\n")[0][:200]
            rows.append({**about, "backend": backend, "error": text, "fits": fits})
        else:
            ours.append(runner)
    groups = [ours]
    if case.kernel in ("quantize", "dequantize"):
        x = work.argument if case.kernel == "quantize" else work.on("xla")()
        for rival in runners(modules, case.kernel, x, case.bits):
            try:
                rival.wait(rival.call())
            except Exception as error:  # an operation that this device or dtype does not have
                text = str(error).split("\n")[0][:200]
                rows.append({**about, "backend": rival.name, "error": text, "fits": False})
            else:
                # Turns of their own: threads of another library may spin for a while.
                groups.append([copy, reference, rival])
    for group in groups:
        times = take_turns(group, budget_s=budget_s)
        for runner in group if group is ours else group[-1:]:
            seconds = times[runner.name]
            rows.append(
                {
                    **about,
                    "backend": runner.name,
                    "seconds": statistics.median(seconds),
                    "gb_per_s": work.moved_bytes / statistics.median(seconds) / 1e9,
                    "of_copy": median_ratio(times[COPY], seconds),
                    "over_xla": median_ratio(seconds, times["xla"]),
                    "different": different.get(runner.name),
                }
            )
    return rows


def one_core() -> float:
    """Return the GB of float32 that the reference quantizes to int8 in a second on one core, taken
    in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--one-core"], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure_one_core() -> float:
    work = prepare(Case(kernel="quantize", bits=8, dtype="float32", size=ONE_CORE_MIB * MIB))
    runner = Runner(name="xla", call=work.on("xla"))
    jax.block_until_ready(runner.call())
    seconds = take_turns([runner], budget_s=2)["xla"]
    return ONE_CORE_MIB * MIB / statistics.median(seconds) / 1e9


def make_checks(rows: list[Row], per_core: float | None) -> list[Check]:
    """Return the targets that this device has."""
    if per_core is not None:
        name = "seconds in which one core quantizes 1 GB of float32 to int8, XLA reference"
        return [Check(name=name, value=1 / per_core, limit=1, unit=" s")]
    checks = []
    failed = sum("error" in row and row["fits"] for row in rows)
    checks.append(
        Check(name="cases in which a kernel that fits does not run", value=failed, limit=0)
    )
    # For each case the kernel that zeroxla takes by itself: the first that runs.
    taken: dict[tuple, Row] = {}
    for row in rows:
        if row["backend"] in PALLAS and "error" not in row:
            taken.setdefault(tuple(row[x] for x in ("kernel", "bits", "dtype", "size")), row)
    different = sum(row["different"] for row in rows if row.get("different"))
    checks.append(
        Check(name="bytes of wires and elements that differ from XLA's", value=different, limit=0)
    )
    for kernel, due in DUE.items():
        large = [r for r in taken.values() if r["kernel"] == kernel and r["size"] >= LARGE]
        if large and "H200" in jax.devices()[0].device_kind:
            value = max(1 / row["of_copy"] for row in large)
            name = f"{kernel}: time over that of a copy, {LARGE // MIB} MiB and above"
            checks.append(Check(name=name, value=value, limit=1 / due))
    for kernel in KERNELS:
        ratios = [row["over_xla"] for row in taken.values() if row["kernel"] == kernel]
        if ratios:
            name = f"{kernel}: time over that of the XLA reference, any size"
            checks.append(Check(name=name, value=max(ratios), limit=NOISE))
    return checks


# ------------------------------------------------------------------ what is written


def body_of(rows: list[Row], sizes: list[int], notes: list[str], name: str) -> str:
    """Return what was measured, in markdown."""
    ours = [row for row in rows if row["backend"] in STYLES]
    rivals = [row for row in rows if ":" in row["backend"]]
    parts = [
        f"On {jax.devices()[0].device_kind}, blocks of {BLOCK}, the default rules (bound at 8 "
        "bits, mse at 4), normal random numbers. Size: MiB of the array that is quantized or comes "
        f"out; of the {NUM_SOURCES} sources of dequant_reduce. swizzled_quantize: {NODES} nodes x "
        f"{DEVICES} devices. rotated: hadamard=32. GB/s: bytes read and written, 10^9. The copy "
        "reads half of as many bytes and writes the other half.",
        *notes,
        f"![GB/s against size]({name}.png)",
        "GB/s, in brackets the share of the copy's:",
        pivot(ours, sizes, lambda r: f"{r['gb_per_s']:.1f} ({100 * r['of_copy']:.0f} %)"),
    ]
    kernels = [row for row in ours if row["backend"] in PALLAS]
    if kernels:
        parts += [
            "Time over the XLA reference's; how many bytes of the wire, or elements of the array, "
            "differ from the reference's:",
            pivot(kernels, sizes, lambda r: f"{r['over_xla']:.2f}x, {r['different']}"),
        ]
    if rivals:
        parts += [
            "Other libraries, GB/s as if they moved zeroxla's bytes; in brackets their time over "
            "the XLA reference's. None gives the same codes: bitsandbytes has a table of values "
            "for codes, and what is composite takes an operation a step:",
            pivot(rivals, sizes, lambda r: f"{r['gb_per_s']:.1f} ({r['over_xla']:.1f}x)"),
        ]
    errors = {
        f"{row['backend']}, {row['kernel']}: {row['error']}" for row in rows if "error" in row
    }
    if errors:
        parts.append("Not run:\n\n" + "\n".join(f"- {text}" for text in sorted(errors)))
    return "\n\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed of the quantization kernels.")
    parser.add_argument("--sizes", type=int, nargs="+", help="MiB")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=KERNELS)
    parser.add_argument("--quick", action="store_true", help="two sizes, fewer turns")
    parser.add_argument("--one-core", action="store_true", help="print this figure only")
    options = parser.parse_args()
    if options.one_core:
        print(json.dumps(measure_one_core()))
        return 0
    on_cpu = jax.default_backend() == "cpu"
    default = (1, 16, 64) if on_cpu else (1, 16, 64, 256, 1024)
    if options.quick:
        default = (1, 16) if on_cpu else (16, 256)
    sizes = [size * MIB for size in sorted(options.sizes or default)]
    # Before this process keeps the cores busy.
    per_core = one_core() if on_cpu else None

    found = {library: find(library) for library in LIBRARIES}
    modules = {library: module for library, (module, _) in found.items() if module is not None}
    notes = ["Other libraries: " + "; ".join(text for _, text in found.values()) + "."]
    if per_core is not None:
        notes.append(
            f"On one core the reference quantizes {per_core:.2f} GB of float32 a second to int8 "
            f"({ONE_CORE_MIB} MiB, a process bound to one core). Results and temporaries of 32 MiB "
            "and more are newly mapped memory at each call (glibc's malloc); page faults then take "
            "about half of the time, of the copy, too."
        )
    rows: list[Row] = []
    cases = all_cases(options.kernels, sizes)
    with Progress() as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            what = f"{case.kernel}, {case.bits} bits, {case.dtype or 'wires'}"
            progress.update(task, description=f"{what}, {case.size // MIB} MiB")
            rows += measure(case, modules, budget_s=0.1 if options.quick else 0.5)
            progress.advance(task)
    device = re.sub(r"\W+", "_", jax.devices()[0].device_kind.lower())
    name = f"kernels_{device}"
    draw(rows, sizes, f"{name}.png")
    figures = {"device": jax.devices()[0].device_kind, "gb_per_s_of_one_core": per_core}
    body = body_of(rows, sizes, notes, name)
    checks = make_checks(rows, per_core)
    return report("kernels", "Kernels", body, {**figures, "rows": rows}, checks, files=name)


if __name__ == "__main__":
    sys.exit(main())
