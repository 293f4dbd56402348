"""Writes that fail as on a full disk."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Let this process write no file of more than `num_bytes`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
