"""Turns DeepSpeed's offload options into an `Offload`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zeroxla.config.offload import Offload

DEVICES = ("none", "cpu", "nvme")
_NO_PATH = "only the device nvme has a path"
_UNUSED = "only what is offloaded is updated in sub-groups, and nothing is"
_NOT_ON_HOST = "the host updates an optimizer on the device cpu, with no parameters on nvme"
_PINNED = "host memory of compiled programs is always pinned"
_ONE_RATIO = "it holds for the parameters that are offloaded, too"
# DeepSpeed's older flags, and the section that replaced each.
_FLAGS = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}
_FIELDS = {"offload_optimizer": "optimizer", "offload_param": "params"}


def offload_of(
    zero: Mapping[str, Any], ignored: dict[str, str], *, on_host: bool = False
) -> dict[str, Any]:
    """Return the option `offload`, if anything is offloaded.

    Args:
      zero: the section `zero_optimization`.
      ignored: receives the keys that have no effect, or another effect, and the reasons.
      on_host: whether the configuration asks for DeepSpeed's CPU optimizer.

    Raises:
      ValueError: DeepSpeed knows no such device, a flag contradicts its section, or there are two
        paths.
    """
    options: dict[str, Any] = {}
    paths: dict[str, str] = {}
    for section, field in _FIELDS.items():
        written = zero.get(section, {})
        place = _place(section, written, zero)
        if place == "none":
            continue
        options[field] = "disk" if place == "nvme" else "host"
        if place == "nvme":
            paths[section] = _path(section, written)
        elif "nvme_path" in written:
            ignored[f"zero_optimization.{section}.nvme_path"] = _NO_PATH
        if not written.get("pin_memory", True):
            ignored[f"zero_optimization.{section}.pin_memory"] = _PINNED
        if section == "offload_optimizer":
            found = {"ratio": written.get("ratio"), "buffers": written.get("buffer_count")}
            options.update({name: x for name, x in found.items() if x is not None})
    if options and not zero.get("cpu_offload_use_pin_memory", True):
        ignored["zero_optimization.cpu_offload_use_pin_memory"] = _PINNED
    size = zero.get("sub_group_size")
    if not options:
        if on_host:
            ignored["zero_force_ds_cpu_optimizer"] = _NOT_ON_HOST
        if size is not None:
            ignored["zero_optimization.sub_group_size"] = _UNUSED
        return {}
    if len(set(paths.values())) > 1:
        said = ", ".join(f"{section}.nvme_path={path!r}" for section, path in paths.items())
        raise ValueError(f"zero_optimization has {said}: a state has one folder; write the same")
    if paths:
        options["path"] = next(iter(paths.values()))
    if options.get("ratio", 1) < 1 and "params" in options:
        ignored["zero_optimization.offload_optimizer.ratio"] = _ONE_RATIO
    if on_host:
        if options.get("optimizer") == "host" and options.get("params") != "disk":
            options["update"] = "host"
        else:
            ignored["zero_force_ds_cpu_optimizer"] = _NOT_ON_HOST
    if size is not None:
        options["sub_group"] = max(1, size)  # with 0, as with 1, DeepSpeed updates leaf by leaf
    return {"offload": Offload(**options)}


def _path(section: str, written: Mapping[str, Any]) -> str:
    if "nvme_path" not in written:
        raise ValueError(
            f"zero_optimization.{section}.device='nvme' has no nvme_path; write the folder of a "
            "fast disk of each host"
        )
    return written["nvme_path"]


def _place(section: str, written: Mapping[str, Any], zero: Mapping[str, Any]) -> str:
    """Return the device of a section, or of the older flag that means the same.

    Raises:
      ValueError: there is no such device, or section and flag contradict each other.
    """
    dotted = f"zero_optimization.{section}.device"
    place = written.get("device", "none")
    if place not in DEVICES:
        raise ValueError(f"{dotted}={place!r} is no device of DeepSpeed's; use one of {DEVICES}")
    for flag, of in _FLAGS.items():
        if of == section and zero.get(flag):
            if "device" in written and place == "none":
                raise ValueError(f"zero_optimization.{flag}=true and {dotted}='none'; write one")
            place = "cpu" if place == "none" else place
    return place
