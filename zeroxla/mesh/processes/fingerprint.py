"""`fingerprint`: the versions and code hashes that all processes of a run must share."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

_PACKAGES = ("jax", "jaxlib", "flax", "optax")


@functools.cache
def fingerprint() -> dict[str, str]:
    """Return, by name, the versions of Python and packages, and hashes of zeroxla's source (kernels
    included) and of the script that runs."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    found |= {name: importlib.metadata.version(name) for name in _PACKAGES}
    found["zeroxla's source"] = _hash(_sources(Path(__file__).parents[2]))
    # Console scripts are left out: their first line names the interpreter, whose path may differ
    # between hosts.
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and script.endswith(".py"):
        found["the script"] = f"{Path(script).name} {_hash([Path(script)])}"
    return found


def _sources(root: Path) -> list[Path]:
    """Return the package's Python files, with those of the linked models and kernels."""
    folders = os.walk(root, followlinks=True)
    return sorted(
        Path(folder, name) for folder, _, names in folders for name in names if name.endswith(".py")
    )


def _hash(files: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=6)
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
