"""Checks what docs/data.md says of rows: memory, resuming, packing, several processes.

- A JSONL file of 2 GB is opened, and batches are drawn from it, in a process whose data segment may
  not grow beyond 1 GB (RLIMIT_DATA: private writable memory). The largest resident memory is read
  from the system at the end (VmHWM), libraries and mapped files included.
- A process that draws packed and unpacked batches is killed (SIGKILL) at 10 random moments, and
  goes on from the position that it saved last. Every batch that any of the processes made is
  compared with the batches of a process that nothing killed.
- Rows with lengths from lognormal distributions are packed, in windows of several sizes, and with
  the first-fit packer of grain.
- The parts that 1, 2 and 4 processes make are put together and compared.

    python benchmarks/data_rows.py [--folder DIR] [--gigabytes 2]

`--folder` has room for the file. Exits with 1 if a target is missed; writes results/data_rows.json
and .md. Takes about 10 minutes on 2 cores. No times are measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import Check, report, table
from data_rows_files import stream_of, write_conversations
from data_rows_packing import PACKED_LENGTH, PACKED_ROWS, measure_fill

from zeroxla.cli.data.packing import WINDOW, packed_batches
from zeroxla.cli.data.row_batches import row_batches
from zeroxla.cli.data.row_files import RowFiles

LIMIT_BYTES = 10**9
KILLS = 10
SAVED_EVERY = 3  # batches
NUM_BATCHES = 60  # of each kind, of the process that is killed
LENGTH, BATCH = 256, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="for the files; default: the temporary folder")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the large file")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        PARTS[options.part](options.file)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        memory = measure_memory(folder, options.gigabytes)
        print(memory, flush=True)
        resumed = measure_resuming(folder)
        print(resumed, flush=True)
        processes = measure_processes(folder)
        print(processes, flush=True)
        fills = measure_fill(folder)
    rows = [[name, *(f"{fill:.2%}" for fill in found.values())] for name, found in fills.items()]
    body = (
        f"**Memory.** A process may take {LIMIT_BYTES / 1e9:.0f} GB (RLIMIT_DATA). It opens a "
        f"JSONL file of {memory['file_bytes'] / 1e9:.2f} GB with {memory['rows']:,} conversations, "
        f"and draws {memory['batches']} batches. Its largest resident memory is "
        f"{memory['peak_bytes'] / 1e6:.0f} MB. Before it opens the file it has "
        f"{memory['begin_bytes'] / 1e6:.0f} MB: Python, JAX and grain as libraries.\n\n"
        f"**Resuming.** Killed {resumed['kills']} times; {resumed['made']} batches were made in "
        f"all, {resumed['different']} of them different from the uninterrupted run's "
        f"{resumed['compared']}.\n\n"
        f"**Processes.** {processes['compared']} batches, packed and unpacked, were put together "
        f"from the parts of 2 and of 4 processes. {processes['different']} of them differ from the "
        "batches of one process.\n\n"
        f"**Packing.** Share of the {PACKED_LENGTH} inputs of a sequence that are no padding, over "
        f"{PACKED_ROWS} sequences: rows in windows, best-fit decreasing; and grain's first-fit "
        "packer.\n\n" + table(["lengths", *next(iter(fills.values()))], rows)
    )
    checks = [
        Check(
            name="largest resident memory",
            value=memory["peak_bytes"] / 1e6,
            limit=LIMIT_BYTES / 1e6,
            unit=" MB",
        ),
        Check(name="batches that differ after a kill", value=resumed["different"], limit=0),
        Check(name="batches that differ by processes", value=processes["different"], limit=0),
        *(
            Check(
                name=f"padding, {name}",
                value=100 * (1 - found[f"windows of {WINDOW}"]),
                limit=2,
                unit=" %",
            )
            for name, found in fills.items()
        ),
    ]
    figures = {"memory": memory, "resumed": resumed, "processes": processes, "fill": fills}
    return report("data_rows", "Rows of training data", body, figures, checks)


def measure_memory(folder: Path, gigabytes: float) -> dict[str, Any]:
    """Open a large file under a limit of memory."""
    path = folder / "large.jsonl"
    write_conversations(path, gigabytes * 1e9, words=800)
    found = json.loads(call("memory", path, limit=True))
    path.unlink()
    return found


def part_memory(path: Path) -> None:
    begin = peak_bytes()
    stream = stream_of([path], 2048)
    batches = iter(row_batches(stream, batch=16))
    for _ in range(50):
        next(batches)
    rows: RowFiles = stream.sources[0].rows
    found = {
        "file_bytes": path.stat().st_size,
        "rows": len(rows) + rows.num_valid,
        "batches": 50,
        "begin_bytes": begin,
        "peak_bytes": peak_bytes(),
    }
    print(json.dumps(found), flush=True)


def measure_resuming(folder: Path) -> dict[str, Any]:
    """Kill a process at random moments; compare all batches that were made."""
    path = folder / "small.jsonl"
    write_conversations(path, 3e5, words=60)
    expected: dict[str, str] = {}
    for line in call("draw", path).split():
        key, _, digest = line.partition("=")
        expected[key] = digest
    forget(path)
    generator = random.Random(1)
    kills, made = 0, []
    while True:
        process = start("draw", path)
        # In the middle of its batches: some time after the first one is there.
        lines, output = [], process.stdout
        assert output is not None
        stop_after = generator.randrange(1, 2 * NUM_BATCHES // KILLS + SAVED_EVERY)
        for line in output:
            lines.append(line.strip())
            if kills < KILLS and len(lines) == stop_after:
                time.sleep(generator.uniform(0, 0.02))
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
        lines += [line.strip() for line in output]
        process.wait()
        made += [line for line in lines if "=" in line]
        if process.returncode == 0:
            break
    assert {line.partition("=")[0] for line in made} == set(expected)
    different = sum(expected[line.partition("=")[0]] != line.partition("=")[2] for line in made)
    return {
        "kills": kills,
        "made": len(made),
        "compared": len(expected),
        "different": different,
    }


def part_draw(path: Path) -> None:
    """Draw batches of both kinds in turn, from the saved position on; print their hashes."""
    saved = path.with_suffix(".position")
    stream = stream_of([path], LENGTH)
    kinds = {
        "unpacked": iter(row_batches(stream, batch=BATCH)),
        "packed": iter(packed_batches(stream, batch=BATCH, window=64)),
    }
    first = 0
    if saved.exists():
        position = json.loads(saved.read_text())
        first = position["done"]
        for name, batches in kinds.items():
            batches.set_state(position[name])
    for done in range(first, NUM_BATCHES):
        for name, batches in kinds.items():
            print(f"{name}/{done}={digest_of(next(batches))}", flush=True)
        if (done + 1) % SAVED_EVERY == 0:
            states = {name: batches.get_state() for name, batches in kinds.items()}
            new = saved.with_suffix(".new")
            new.write_text(json.dumps({"done": done + 1, **states}))
            new.replace(saved)
    for batches in kinds.values():
        batches.close()


def forget(path: Path) -> None:
    path.with_suffix(".position").unlink()


def measure_processes(folder: Path) -> dict[str, int]:
    """Compare the parts of 2 and 4 processes, put together, with the batches of one."""
    path = folder / "small.jsonl"
    compared = different = 0
    for make in (row_batches, packed_batches):
        whole = list(first_of(make, path, 0, 1))
        for count in (2, 4):
            parts = [list(first_of(make, path, index, count)) for index in range(count)]
            for i, batch in enumerate(whole):
                joined = {k: np.concatenate([part[i][k] for part in parts]) for k in batch}
                compared += 1
                different += digest_of(joined) != digest_of(batch)
    return {"compared": compared, "different": different}


def first_of(make: Callable[..., Any], path: Path, index: int, count: int) -> Iterator[Any]:
    """Yield the first batches of one process."""
    stream = stream_of([path], LENGTH)
    batches = iter(make(stream, batch=BATCH, shard_index=index, shard_count=count))
    for _ in range(40):
        yield next(batches)
    batches.close()


def digest_of(batch: dict[str, np.ndarray]) -> str:
    """Return a hash of a batch."""
    digest = hashlib.blake2b(digest_size=16)
    for name, x in sorted(batch.items()):
        digest.update(f"{name} {x.shape} {x.dtype}".encode())
        digest.update(np.ascontiguousarray(x).data)
    return digest.hexdigest()


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    status = Path("/proc/self/status").read_text()
    return next(int(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith("VmHWM"))


def start(part: str, path: Path, *, limit: bool = False) -> subprocess.Popen[str]:
    """Start a part of this program in a process of its own."""

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))

    return subprocess.Popen(
        [sys.executable, __file__, "--part", part, "--file", str(path)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=confine if limit else None,
    )


def call(part: str, path: Path, *, limit: bool = False) -> str:
    """Run a part of this program to its end; return what it printed."""
    process = start(part, path, limit=limit)
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"the part {part} ended with status {process.returncode}")
    return printed


PARTS: dict[str, Callable[[Path], None]] = {"memory": part_memory, "draw": part_draw}

if __name__ == "__main__":
    sys.exit(main())
