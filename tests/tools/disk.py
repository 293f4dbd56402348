"""States on disk: their files, bytes that change there, and writes that fail as on a full disk."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.offload.disk.state_file import StateFile


def on_disk(tree: Any) -> list[DiskArray]:
    """Return the leaves of a tree that are on disk."""
    return [x for x in jax.tree.leaves(tree) if isinstance(x, DiskArray)]


def state_file(state: Any) -> StateFile:
    """Return the file of a state that has arrays on disk."""
    return on_disk((state.params, state.opt_state))[0].file


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@contextlib.contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Let this process write no file of more than `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
