"""How fast a step's optimizer state comes from disk and goes back, against a plain copy.

A GPT of 101 million parameters, AdamW, its moments on disk. In turns, on the same disk: a step; a
plain copy of as many bytes (one thread, blocks of 8 MiB, past the page cache); and the same bytes
written and read by tensorstore, which is what else could do it: a chunk for each array, and as many
threads as it likes. The step's rate is taken from its first update to its last write: what is moved
beside the gradients comes on top. A picture shows one step: what is read, updated and written when.

    python benchmarks/offload_disk.py [--folder DIR]

`--folder` is on the disk to be measured, with 5 GB free. Exits with 1 if a target is missed; writes
results/offload_disk.json, .md and .png. Takes about 4 minutes on 2 cores; times mean something on a
quiet machine only.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import optax
import tensorstore as ts
from common import RESULTS, Check, random_tokens, report, table

import zeroxla
from zeroxla import Offload, ZeroConfig
from zeroxla.models import GPT
from zeroxla.offload.disk.block_file import BLOCK_BYTES, Access
from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.offload.disk.pages import pages

TURNS = 4
ELEMENTS = 2**22  # of an array that tensorstore moves: 16 MiB, as a shard of the model's kernels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="on the disk; default: the temporary folder")
    options = parser.parse_args()
    zeroxla.simulate(2)
    mesh = zeroxla.make_mesh(nodes=1)
    rates: dict[str, list[float]] = {"step": [], "plain copy": [], "tensorstore": []}
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        place = Offload(
            optimizer="disk", path=str(folder / "state"), sub_group=4_000_000, buffers=4
        )
        model = GPT(vocab=256, length=128, layers=8, width=1024, heads=16, scan=False)
        config = ZeroConfig(offload=place)
        step = zeroxla.make_step(model, mesh, optax.adamw(1e-4), config=config)
        batch = random_tokens(2)
        state = step.init(jax.random.key(0), batch)
        arrays = [x for x in jax.tree.leaves(state.opt_state) if isinstance(x, DiskArray)]
        state_bytes = sum(x.nbytes for x in arrays)
        blocks = arrays[0].file.blocks
        del arrays
        accesses: list[Access] = []
        for turn in range(TURNS + 1):  # the first one compiles
            state, _ = step(state, batch)
            accesses = list(blocks.accesses)
            found = {
                "step": rate_of(accesses),
                "plain copy": plain_copy(folder, state_bytes),
                "tensorstore": by_tensorstore(folder, state_bytes),
            }
            print(", ".join(f"{n} {r / 1e6:.0f} MB/s" for n, r in found.items()), flush=True)
            for kind, rate in found.items() if turn else ():
                rates[kind].append(rate)
    moved = {k: sum(x.nbytes for x in accesses if x.kind == k) for k in ("read", "write")}
    medians = {name: statistics.median(found) for name, found in rates.items()}
    share = statistics.median(
        a / b for a, b in zip(rates["step"], rates["plain copy"], strict=True)
    )
    rows = [
        [name, f"{rate / 1e6:,.0f}", f"{rate / medians['plain copy']:.2f}"]
        for name, rate in medians.items()
    ]
    zeroxla.inspect.plot_disk(state, path=RESULTS / "offload_disk.png")
    body = (
        f"GPT of 8 layers and width 1024, AdamW: moments of {state_bytes / 1e6:,.0f} MB on disk. A "
        f"step reads {moved['read'] / 1e6:,.1f} MB and writes {moved['write'] / 1e6:,.1f} MB, of "
        f"one process with 2 simulated devices. Medians of {TURNS} turns; bytes in and bytes out "
        "count both.\n\n"
        + table(("moving", "MB/s, in and out", "of the plain copy"), rows)
        + "\n\n![A step: what is read, updated and written when](offload_disk.png)"
    )
    checks = [
        Check(name="bytes read / state", value=moved["read"] / state_bytes, limit=1.05),
        Check(name="bytes written / state", value=moved["write"] / state_bytes, limit=1.05),
        Check(name="plain copy / step's rate", value=1 / share, limit=1 / 0.6),
        Check(name="share of updates with nothing moved", value=idle(accesses), limit=0.5),
    ]
    return report("offload_disk", "State on disk", body, {"rates": rates, "moved": moved}, checks)


def rate_of(accesses: Sequence[Access]) -> float:
    """Return the bytes a second from a step's first update to its last write."""
    begun = min(x.begun for x in accesses if x.kind == "update")
    ended = max(x.ended for x in accesses)
    # Of a block that is under way at the beginning the part after it.
    moved = sum(
        x.nbytes * (x.ended - max(x.begun, begun)) / (x.ended - x.begun)
        for x in accesses
        if x.kind != "update" and x.ended > begun
    )
    return moved / (ended - begun)


def idle(accesses: Sequence[Access]) -> float:
    """Return the share of the updates' time in which nothing is read or written."""
    moves = sorted((x.begun, x.ended) for x in accesses if x.kind != "update")
    total = beside = 0.0
    for update in (x for x in accesses if x.kind == "update"):
        total += update.ended - update.begun
        at = update.begun
        for begun, ended in moves:
            begun, ended = max(begun, at), min(ended, update.ended)
            if ended > begun:
                beside += ended - begun
                at = ended
    return 1 - beside / total


def plain_copy(folder: Path, nbytes: int) -> float:
    """Copy a file of so many bytes; return the bytes read and written a second."""
    flags = getattr(os, "O_DIRECT", 0)
    source, target = folder / "source", folder / "target"
    block = pages(BLOCK_BYTES)
    count = nbytes // BLOCK_BYTES
    for path in (source, target):
        if not path.exists():
            path.touch()
            fd = os.open(path, os.O_RDWR | flags)
            for i in range(count):
                os.pwrite(fd, block, i * BLOCK_BYTES)
            os.close(fd)
    read, write = os.open(source, os.O_RDONLY | flags), os.open(target, os.O_WRONLY | flags)
    begun = time.perf_counter()
    for i in range(count):
        os.preadv(read, [block], i * BLOCK_BYTES)
        os.pwrite(write, block, i * BLOCK_BYTES)
    os.fdatasync(write)
    seconds = time.perf_counter() - begun
    os.close(read)
    os.close(write)
    return 2 * count * BLOCK_BYTES / seconds


def by_tensorstore(folder: Path, nbytes: int) -> float:
    """Write and read arrays of so many bytes; return the bytes a second."""
    count = nbytes // (4 * ELEMENTS)
    data = np.random.default_rng(0).standard_normal(ELEMENTS).astype(np.float32)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder / "tensorstore")},
        "metadata": {
            "shape": [count, ELEMENTS],
            "data_type": "float32",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, ELEMENTS]}},
        },
        "create": True,
        "delete_existing": True,
        "recheck_cached_data": False,
    }
    store = ts.open(spec).result()
    begun = time.perf_counter()
    for write in [store[i].write(data) for i in range(count)]:
        write.result()
    store = ts.open({**spec, "create": False, "delete_existing": False, "open": True}).result()
    for read in [store[i].read() for i in range(count)]:
        read.result()
    return 2 * count * 4 * ELEMENTS / (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
