"""A model whose training state is larger than the memory that its process may have.

A GPT of 403 million parameters with AdamW has 4.8 GB of float32 master and moments. It takes three
steps in a process that a control group holds to 4 GiB, its page cache included, with all of that on
disk; and the same steps without a limit, in memory. Linux and root are needed; both versions of
control groups will do.

    python benchmarks/offload_limit.py [--folder DIR]

`--folder` is on the disk to be used, with 10 GB free. Exits with 1 if a target is missed; writes
results/offload_limit.json and .md. Takes about 8 minutes on 2 cores, and 9 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import Check, report, table

GROUPS = Path("/sys/fs/cgroup")
LIMIT_BYTES = 4 * 2**30
STEPS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="on the disk; default: the temporary folder")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        take_steps(options.inside)
        return 0
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        limited = measured(folder, LIMIT_BYTES)
    free = measured("", None)
    rows = [
        ["on disk, at most 4 GiB", *row(limited)],
        ["in memory", *row(free)],
    ]
    state_bytes = free["state_bytes"]
    body = (
        f"GPT of 32 layers and width 1024, {free['parameters']:,} parameters, AdamW, 2 x 64 "
        f"tokens, 2 simulated devices of one process, {STEPS} steps. Its state, master and "
        f'moments, has {state_bytes / 1e9:.2f} GB. "Held" is what the kernel counted at most of '
        "the process's group, page cache included, or the largest resident size.\n\n"
        + table(("training", "held at most, GB", "on disk, GB", "seconds a step", "losses"), rows)
    )
    checks = [
        Check(name="held at most, GB", value=limited["held"] / 1e9, limit=LIMIT_BYTES / 1e9),
        Check(name="limit / bytes of the state", value=LIMIT_BYTES / state_bytes, limit=1),
        Check(
            name="losses that differ",
            value=sum(a != b for a, b in zip(limited["losses"], free["losses"], strict=True)),
            limit=0,
        ),
    ]
    figures = {"limited": limited, "free": free}
    return report("offload_limit", "More state than memory", body, figures, checks)


def row(found: dict) -> list[str]:
    return [
        f"{found['held'] / 1e9:.2f}",
        f"{found['disk_bytes'] / 1e9:.2f}",
        f"{found['seconds'][-1]:.0f}",
        ", ".join(f"{x:.4f}" for x in found["losses"]),
    ]


def measured(folder: str, limit: int | None) -> dict:
    """Run the steps in a process of their own; return what it says and how much it held."""
    group = None if limit is None else Group.make(limit)
    try:
        child = subprocess.Popen(
            [sys.executable, __file__, "--inside", folder],
            # Else glibc keeps what arrays of up to 32 MB leave, and holds up to twice as much.
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)},
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=None if group is None else group.enter,
        )
        assert child.stdout is not None
        threading.Thread(target=print_progress, args=(child,), daemon=True).start()
        for line in child.stdout:
            if line.startswith("{"):
                found = json.loads(line)
            else:
                print(line, end="", flush=True)
        if child.wait() != 0:
            raise RuntimeError(f"the training ended with {child.returncode}; see above")
        return {**found, "held": found["resident"] if group is None else group.peak()}
    finally:
        if group is not None:
            group.remove()


def print_progress(child: subprocess.Popen) -> None:
    begun = time.monotonic()
    while child.poll() is None:
        time.sleep(20)
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)


class Group:
    """A control group with a limit of memory."""

    def __init__(self, folder: Path, limit: str, peak: str) -> None:
        self._folder, self._limit, self._peak = folder, limit, peak

    @staticmethod
    def make(limit: int) -> Group:
        name = f"zeroxla-{os.getpid()}"
        if (GROUPS / "cgroup.controllers").exists():
            group = Group(GROUPS / name, "memory.max", "memory.peak")
        else:
            names = "memory.limit_in_bytes", "memory.max_usage_in_bytes"
            group = Group(GROUPS / "memory" / name, *names)
        try:
            group._folder.mkdir()
            (group._folder / group._limit).write_text(str(limit))
        except OSError as error:
            raise SystemExit(
                f"no control group can be made here ({error}); run it as root"
            ) from None
        return group

    def enter(self) -> None:
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int:
        return int((self._folder / self._peak).read_text())

    def remove(self) -> None:
        self._folder.rmdir()


def take_steps(folder: str) -> None:
    """Take the steps, and print what came of it; inside the group."""
    import zeroxla

    zeroxla.simulate(2)
    import jax
    import numpy as np
    import optax

    from zeroxla import Offload, ZeroConfig
    from zeroxla.models import GPT

    place = Offload()
    if folder:
        place = Offload(optimizer="disk", params="disk", path=folder, sub_group=4_000_000)
    model = GPT(vocab=256, length=64, layers=32, width=1024, heads=16, scan=False)
    step = zeroxla.make_step(
        model, zeroxla.make_mesh(nodes=1), optax.adamw(1e-4), config=ZeroConfig(offload=place)
    )
    tokens = np.random.default_rng(0).integers(0, 256, (2, 65)).astype(np.int32)
    state = step.init(jax.random.key(0), {"tokens": tokens})
    print("  the state is made", flush=True)
    losses, seconds = [], []
    for _ in range(STEPS):
        begun = time.perf_counter()
        state, metrics = step(state, {"tokens": tokens})
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - begun)
        print(f"  loss {losses[-1]:.4f} after {seconds[-1]:.0f} s", flush=True)
    leaves = jax.tree.leaves((state.params, state.opt_state))
    status = Path("/proc/self/status").read_text()
    said = {
        "losses": losses,
        "seconds": seconds,
        "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
        "state_bytes": sum(x.nbytes for x in leaves),
        "disk_bytes": sum(x.stat().st_size for x in Path(folder).glob("*")) if folder else 0,
        "resident": 1024 * int(status.partition("VmHWM:")[2].split()[0]),
    }
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    sys.exit(main())
