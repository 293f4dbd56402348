"""What must be the same in all processes of a run, as short texts."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import platform
import sys
from pathlib import Path

import pallas_kernels

_PACKAGES = ("jax", "jaxlib", "flax", "optax")


@functools.cache
def fingerprint() -> dict[str, str]:
    """Return versions, and hashes of zeroxla's source, its kernels' included, and of the script
    that runs, by name."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    found |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    roots = [Path(__file__).parents[1], Path(pallas_kernels.__file__).parent]
    found["zeroxla's source"] = _hash([p for root in roots for p in sorted(root.rglob("*.py"))])
    # Not a console script: its first line names the interpreter, which may lie elsewhere there.
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and script.endswith(".py"):
        found["the script"] = f"{Path(script).name} {_hash([Path(script)])}"
    return found


def _hash(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
