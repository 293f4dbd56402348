"""All of zeroxla on the NVIDIA GPUs of this machine, in 10 minutes: one command for a new GPU.

The kernels against the reference, bit for bit, and their bandwidth; a `zeropp` step of a GPT
against plain `jit`; attention, generation, offload to pinned host memory, state on disk, and a
pipeline where there are two GPUs. Each part runs in a process of its own with a time limit: what
fails stops nothing else.

    python benchmarks/gpu.py [--only kernels step] [--minutes 10] [--list]

Writes results/gpu_NAME.json and results/gpu_NAME.md, NAME the GPU's. Exits with 1 if a part fails,
a bit differs or a bound is missed.

Without a GPU nothing is measured and no file is written. Every program is compiled for an H200
where the extra plan-gpu is installed, and otherwise lowered for CUDA; the table says which, and why
if one was not. It exits with 1 if a program fails. `--dry` does the same on a machine with GPUs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common import RESULTS
from gpu_parts import child
from gpu_parts.machine import Machine, ask, gpus_of_driver
from gpu_parts.place import Place
from gpu_parts.run_parts import Part, run_all
from gpu_parts.write_report import overview, write_report
from rich.console import Console

MINUTES, MINUTES_DRY = 10, 40
# Two programs give the same bits only if sums have one order, and products one algorithm.
SAME_BITS = "--xla_gpu_deterministic_ops=true"
PARTS = (
    Part(
        name="kernels",
        title="Kernels against the reference, bits",
        module="gpu_parts.kernel_bits",
        seconds=220,
    ),
    Part(
        name="bandwidth",
        title="Bandwidth of the kernels, 256 MiB",
        module="gpu_parts.bandwidth",
        seconds=70,
    ),
    Part(
        name="step",
        title="A zeropp step against plain jit, one node",
        module="gpu_parts.step",
        seconds=100,
    ),
    Part(
        name="hops",
        title="A zeropp step against plain jit, two nodes",
        module="gpu_parts.step",
        seconds=100,
        arguments=(2,),
        least_devices=4,
    ),
    Part(
        name="attention",
        title="Attention",
        module="gpu_parts.attention",
        seconds=20,
    ),
    Part(
        name="generation",
        title="Generation from the training state",
        module="gpu_parts.generation",
        seconds=60,
    ),
    Part(
        name="offload",
        title="State in pinned host memory (deterministic XLA)",
        module="gpu_parts.offload",
        seconds=30,
        xla_flags=SAME_BITS,
    ),
    Part(
        name="disk",
        title="State on disk (deterministic XLA)",
        module="gpu_parts.disk",
        seconds=30,
        xla_flags=SAME_BITS,
    ),
    Part(
        name="pipeline",
        title="A pipelined step",
        module="gpu_parts.pipeline",
        seconds=45,
        least_devices=2,
    ),
)


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    """Run the command; see this file's docstring.

    Args:
      arguments: of the command line; None takes this process's.
      parts: those that there are.

    Returns:
      The exit status.
    """
    options = _parser(parts).parse_args(arguments)
    if options.child:
        return child.run(options.child)
    if options.list:
        for part in parts:
            print(f"{part.name}: {part.title}")
        return 0
    unknown = sorted(set(options.only) - {part.name for part in parts})
    if unknown:
        known = ", ".join(part.name for part in parts)
        print(f"--only {' '.join(unknown)}: there is no such part; there are {known}")
        return 2
    chosen = [part for part in parts if not options.only or part.name in options.only]
    console = Console(highlight=False, soft_wrap=True)
    try:
        place, about = choose_place(options)
    except RuntimeError as error:
        print(error)
        return 1
    console.print(about.note, markup=False)
    minutes = options.minutes or (MINUTES if about.kind else MINUTES_DRY)
    outcomes = run_all(chosen, place, minutes=minutes, console=console)
    print()
    if not about.kind:
        print(overview(outcomes, about))
        return 0 if all(outcome.passed for outcome in outcomes) else 1
    return write_report(outcomes, about, whole=not options.only, folder=options.out)


def choose_place(options: argparse.Namespace) -> tuple[Place, Machine]:
    """Return where programs go, and the machine.

    Raises:
      RuntimeError: JAX does not start, or does not see the GPUs that the driver has.
    """
    if options.simulate is not None:
        note = f"At small sizes, on {options.simulate} simulated CPU devices: figures mean nothing."
        place = Place(kind="devices", num_devices=options.simulate, small=True, simulated=True)
        return place, Machine(note=note)
    reason = "--dry was given"
    if not options.dry:
        found = ask("look", Place(kind="devices", num_devices=1))
        if found["kind"]:
            num = options.devices or 2 ** (found["num_devices"].bit_length() - 1)
            return Place(kind="devices", num_devices=num), Machine.of(found, num)
        reason = found["reason"]
        if gpus := gpus_of_driver():
            raise RuntimeError(
                f"the driver has {gpus[0]}, and JAX does not see it: {reason}. `make gpu` installs "
                "what the driver needs; pass --dry to compile only"
            )
    num = options.devices or 1
    note = f"No GPU is used ({reason}), so nothing is measured."
    compiler = ask("can_compile", Place(kind="target", num_devices=1))
    if compiler["compiles"]:
        note += " Programs are compiled for an H200."
        return Place(kind="target", num_devices=num), Machine(note=note)
    note += f" Programs are lowered for CUDA and not compiled: {compiler['reason']}."
    return Place(kind="platform", num_devices=num), Machine(note=note)


def _parser(parts: Sequence[Part]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = ", ".join(part.name for part in parts)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help=f"these parts: {names}"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"the most that all parts take; default: {MINUTES}, and {MINUTES_DRY} without a GPU",
    )
    parser.add_argument("--list", action="store_true", help="print the parts and end")
    parser.add_argument("--devices", type=int, help="take so many devices; default: see below")
    parser.add_argument("--dry", action="store_true", help="compile or lower only, also on a GPU")
    parser.add_argument(
        "--simulate",
        type=int,
        metavar="N",
        help="run every part at a small size on N simulated CPU devices, to test this command",
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder of the result files; default: results/"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.epilog = (
        "Devices: the largest power of two that the machine has; without a GPU, the fewest that a "
        "part needs."
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
