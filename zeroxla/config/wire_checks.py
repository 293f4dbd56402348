"""Checks the wire options of a `ZeroConfig`: each by itself, and against the others."""

from __future__ import annotations

from typing import Any

from zeroxla.config.feedback import Feedback
from zeroxla.config.undecided import AUTO
from zeroxla.config.wire_format import WireFormat

WIRES = ("weight_wire", "gradient_wire", "inter_node_gradient_wire", "weight_differences")


def check_wires(config: Any) -> None:
    """Check the wire options of a configuration.

    Args:
      config: a `ZeroConfig`.

    Raises:
      ValueError: an option has the wrong type or value, or two options exclude each other.
    """
    for name in WIRES:
        value = getattr(config, name)
        if value is not None and not isinstance(value, WireFormat):
            raise ValueError(
                f"{name}={value!r} is no WireFormat; pass zeroxla.WireFormat(bits=8), or None for "
                "floats"
            )
    for name, words in (
        ("secondary", ("compute", "wire")),
        ("inter_node_gather", ("microbatch", "step")),
        ("inter_node_reduce", ("microbatch", "step")),
    ):
        if getattr(config, name) not in words:
            raise ValueError(f"{name}={getattr(config, name)!r}; take one of {words}")
    size = config.hpz_size
    if size not in ("node", AUTO) and (
        not isinstance(size, int) or isinstance(size, bool) or size < 1
    ):
        raise ValueError(
            f'hpz_size={size!r}; take "node", "auto", or a number of devices (1 keeps no secondary '
            "shard)"
        )
    if config.inter_node_gather == "step" and size == 1:
        raise ValueError(
            'inter_node_gather="step" keeps every secondary shard through the step, and hpz_size=1 '
            'keeps none; set hpz_size="node"'
        )
    if config.weight_differences is not None and size not in ("node", AUTO):
        raise ValueError(
            f"weight_differences needs a copy on each node, and hpz_size={size!r}; set "
            'hpz_size="node"'
        )
    if config.offload.secondary != "none" and size == 1:
        raise ValueError(
            f"Offload(secondary={config.offload.secondary!r}) is of secondary shards, and "
            'hpz_size=1 keeps none; set hpz_size="node"'
        )
    if config.offload.secondary != "none" and config.weight_differences is not None:
        raise ValueError(
            f"Offload(secondary={config.offload.secondary!r}) with weight_differences: the kept "
            "copy is the secondary shard there, and stays on the devices; leave one of them out"
        )
    if config.error_feedback is None:
        return
    if not isinstance(config.error_feedback, Feedback):
        raise ValueError(
            f"error_feedback={config.error_feedback!r}; pass zeroxla.Feedback(), or None"
        )
    if config.inter_node_reduce != "step":
        raise ValueError(
            "error_feedback remembers what one step lost on the hop over `node`, and "
            f"inter_node_reduce={config.inter_node_reduce!r} makes that hop in every micro-batch; "
            'set inter_node_reduce="step"'
        )
    if config.gradient_wire is None and config.inter_node_gradient_wire is None:
        raise ValueError(
            "error_feedback has nothing to feed back: no gradient is quantized; set gradient_wire "
            "or inter_node_gradient_wire"
        )
