"""Devices and links as data. The figures stand in machines.toml, each with its source."""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

TABLE = Path(__file__).with_name("machines.toml")
TARGETS = Path(__file__).with_name("targets")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A link between devices.

    Attributes:
      name: the entry's name in the table.
      bytes_per_s: bandwidth in one direction.
      latency_s: latency of one message.
      of: owner of such a link: each device, or each node, whose devices then share it.
      source: where the figures come from.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    of: Literal["device", "node"]
    source: str

    def __post_init__(self) -> None:
        if not (self.bytes_per_s > 0 and self.latency_s >= 0):
            raise ValueError(
                f"the link {self.name!r} has bytes_per_s={self.bytes_per_s} and "
                f"latency_s={self.latency_s}; give more than 0, and 0 or more"
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A kind of device.

    Attributes:
      name, label: the entry's name in the table, and a name for people.
      kind: the start of JAX's name for the device; empty if JAX has none.
      flops_per_s: peak FLOP/s of dense matrix products, by the dtype of their operands.
      memory_bytes, bytes_per_s: size and bandwidth of the device's own memory.
      usable: the share of a GPU's memory that JAX takes for a process, 0.75 unless
        XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. Of other devices it takes what it needs.
      link: name of the link to the other devices of its node.
      host_link: name of the link to its host's memory.
      host_bytes_per_s: bandwidth of the host's memory, which the devices of a node share.
      platform: the platform that the compiler targets.
      compute_capability: NVIDIA's number for what a GPU can do, such as "9.0", which JAX asks about
        before it takes cuDNN's attention; empty for other devices.
      efficiency: share of `flops_per_s` that a training step's products reach. On a CPU it is also
        the share of `bytes_per_s`: its cores copy as they compute, and devices share them.
      overlaps: whether collectives run beside computation.
      target: path of a file that describes a GPU to XLA, to compile for it; empty if there is none.
        Paths in zeroxla's table are relative to the folder targets/, paths in a user's table to the
        table's own folder.
      source: where the figures come from.
    """

    name: str
    label: str
    kind: str = ""
    flops_per_s: Mapping[str, float]
    memory_bytes: float
    bytes_per_s: float
    usable: float = 0.75
    link: str
    host_link: str = "pcie4"
    host_bytes_per_s: float = 409.6e9
    platform: Literal["gpu", "tpu", "cpu"]
    compute_capability: str = ""
    efficiency: float
    overlaps: bool = True
    target: str = ""
    source: str

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "bytes_per_s", "host_bytes_per_s", "efficiency"):
            if not getattr(self, name) > 0:
                raise ValueError(
                    f"the device {self.name!r} has {name}={getattr(self, name)}; give more than 0"
                )
        if not 0 < self.usable <= 1:
            raise ValueError(
                f"the device {self.name!r} has usable={self.usable}; give the share of its memory "
                "that JAX takes, above 0 and at most 1"
            )
        if "float32" not in self.flops_per_s or min(self.flops_per_s.values()) <= 0:
            raise ValueError(
                f"the device {self.name!r} has flops_per_s={dict(self.flops_per_s)}; give float32, "
                "and what else it has, each more than 0"
            )
        if self.target and self.platform != "gpu":
            raise ValueError(
                f"the device {self.name!r} has target={self.target!r} and platform="
                f"{self.platform!r}; only GPUs are described so"
            )

    def rate(self, dtype: str) -> float:
        """Return the FLOP/s that products of a dtype reach. A dtype that the device lacks has the
        rate of float32."""
        return self.efficiency * self.flops_per_s.get(dtype, self.flops_per_s["float32"])

    @property
    def has_attention(self) -> bool:
        """Whether cuDNN has a kernel of attention for the device: a GPU with bfloat16, as NVIDIA's
        from Ampere on."""
        return self.platform == "gpu" and "bfloat16" in self.flops_per_s

    @property
    def usable_bytes(self) -> float:
        """The bytes of the device's memory that a program may hold."""
        return self.memory_bytes * (self.usable if self.platform == "gpu" else 1.0)

    @property
    def memory_rate(self) -> float:
        """The rate in bytes/s at which a step reads and writes the device's memory."""
        return self.bytes_per_s * (self.efficiency if self.platform == "cpu" else 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Machines:
    """Tables of devices and links."""

    devices: Mapping[str, Device]
    links: Mapping[str, Link]

    @staticmethod
    def load(path: str | Path | None = None) -> Machines:
        """Read zeroxla's tables, and a user's file, whose entries replace ours of the same name.

        Raises:
          ValueError: the file cannot be read, or an entry lacks a field, has a wrong value, or
            names an unknown link.
        """
        found = _read(TABLE)
        if path is not None:
            more = _read(Path(path))
            found = Machines({**found.devices, **more.devices}, {**found.links, **more.links})
        for device in found.devices.values():
            found.find_link(device.link)
            found.find_link(device.host_link)
        return found

    def find_device(self, name: str) -> Device:
        """Return a device by its name.

        Raises:
          ValueError: there is no such device; the message offers the nearest names.
        """
        known = {key.lower(): device for key, device in self.devices.items()}
        if (found := known.get(name.lower())) is None:
            raise ValueError(f"there is no device {name!r}; {_nearest(name, self.devices)}")
        return found

    def of_kind(self, kind: str) -> Device | None:
        """Return the device whose `kind` begins JAX's name; of several, the one with the longest
        `kind`."""
        found = [d for d in self.devices.values() if d.kind and kind.startswith(d.kind)]
        return max(found, key=lambda device: len(device.kind), default=None)

    def find_link(self, name: str) -> Link:
        """Return a link by its name, or make one from a rate such as "100gbit" or "2.5gbit". The
        devices of a node share a link that is made from a rate.

        Raises:
          ValueError: there is no such link; the message offers the nearest names.
        """
        known = {key.lower(): link for key, link in self.links.items()}
        if (found := known.get(name.lower())) is not None:
            return found
        rate = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([gm])bit(?:/s)?", name.lower())
        if rate is None:
            hint = _nearest(name, self.links)
            raise ValueError(f"there is no link {name!r}; {hint}, or a rate such as 100gbit")
        bits = float(rate[1]) * {"g": 1e9, "m": 1e6}[rate[2]]
        return Link(
            name=name.lower(),
            bytes_per_s=bits / 8,
            latency_s=20e-6,
            of="node",
            source="its rate; the latency is assumed",
        )


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    words = "did you mean " + " or ".join(near) + "? " if near else ""
    return f"{words}there are {', '.join(sorted(known))}"


def _read(path: Path) -> Machines:
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"the machines of {path} cannot be read: {error}") from error
    if unknown := set(table) - {"devices", "links"}:
        raise ValueError(f"{path} has the tables {sorted(unknown)}; there are devices and links")

    folder = TARGETS if path == TABLE else path.parent

    def entries(kind: Any, group: str) -> dict[str, Any]:
        found = {}
        for name, fields in table.get(group, {}).items():
            if target := fields.get("target"):
                fields = {**fields, "target": str(folder / str(target))}
            try:
                found[name] = kind(name=name, **fields)
            except TypeError as error:
                raise ValueError(f"{group}.{name} of {path}: {error}") from error
        return found

    return Machines(entries(Device, "devices"), entries(Link, "links"))
