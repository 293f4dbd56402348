"""Looks at the machine: the GPUs that JAX sees or why it sees none, and whether it can compile."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from gpu_parts.child import command
from gpu_parts.place import Place, one_device
from zeroxla.planning.gpu_topology import PLUGIN, WheelsMissingError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The machine that programs run on.

    Attributes:
      note: a sentence that says how its GPUs are used.
      kind: the GPU's name; "" if none is used.
      versions: of its driver and CUDA.
    """

    note: str
    kind: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, found: dict[str, Any], num_devices: int) -> Machine:
        """Return the machine that `look` found. The parts use `num_devices` of its GPUs."""
        note = (
            f"{found['num_devices']} x {found['kind']}, compute capability {found['capability']}, "
            f"{num_devices} in use; JAX takes {found['memory_bytes'] / 1e9:.1f} GB of each."
        )
        return cls(note=note, kind=found["kind"], versions=found["versions"])

    def slug(self) -> str:
        """Return the GPU's name as a part of a file's name."""
        return re.sub(r"\W+", "_", self.kind.lower()).strip("_")


LIMIT_S = 90  # for JAX to start


def ask(function: str, place: Place) -> dict[str, Any]:
    """Run `look` or `can_compile` in another process, which takes the GPU's memory and crashes
    instead of this one.

    Raises:
      RuntimeError: the process failed or did not end; the text has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.jsonl"
        line = command(__name__, function, place, out)
        try:
            done = subprocess.run(line, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"JAX did not start within {LIMIT_S} s") from None
        if done.returncode:
            raise RuntimeError(f"JAX did not start: {done.stderr.strip()[-1000:]}")
        return json.loads(out.read_text())


def can_compile(place: Place) -> Iterator[dict[str, Any]]:
    """Yield whether this environment compiles for an absent H200, and the reason if it does not."""
    try:
        one_device()
    except WheelsMissingError as error:
        yield {"compiles": False, "reason": str(error)}
    else:
        yield {"compiles": True, "reason": ""}


def look(place: Place) -> Iterator[dict[str, Any]]:
    """Yield what JAX sees in this process: the devices' kind, number, memory and versions.

    `kind` is "" where JAX sees no NVIDIA GPU, and `reason` says why.
    """
    try:
        devices = jax.devices()
    except RuntimeError as error:  # JAX was told to use GPUs, and has none
        yield {"kind": "", "reason": str(error).partition("\n")[0]}
        return
    first = devices[0]
    version = getattr(first.client, "platform_version", "").strip()
    if first.platform != "gpu" or "cuda" not in version.lower():
        has = "has" if importlib.util.find_spec(PLUGIN) else "has not"
        reason = f"JAX runs on {first.platform}; this environment {has} the package {PLUGIN}"
        yield {"kind": "", "reason": reason}
        return
    stats = first.memory_stats() or {}
    yield {
        "kind": first.device_kind,
        "reason": "",
        "num_devices": len(devices),
        "capability": str(first.compute_capability),
        "memory_bytes": stats.get("bytes_limit", 0),
        "versions": {"CUDA of JAX": " ".join(version.split()), "driver": driver()},
    }


def driver() -> str:
    """Return the version of the NVIDIA driver, as nvidia-smi gives it; "unknown" without it."""
    return (_ask_driver("--query-gpu=driver_version", "--format=csv,noheader") or ["unknown"])[0]


def gpus_of_driver() -> list[str]:
    """Return the GPUs that the driver lists, whether JAX sees them or not."""
    return [line for line in _ask_driver("-L") if line.startswith("GPU ")]


def _ask_driver(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if there is no such program or it fails."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
