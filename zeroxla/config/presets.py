"""The options that the presets of `ZeroConfig` set."""

from __future__ import annotations

from typing import Any

from zeroxla.config.outer import Outer, nesterov
from zeroxla.config.wire_format import WireFormat

ZEROPP: dict[str, Any] = {
    "gather_dtype": "bfloat16",
    "reduce_dtype": "bfloat16",
    "weight_wire": WireFormat(bits=8),
    "hpz_size": "node",
}
TWO_LEVELS: dict[str, Any] = {
    "gradient_wire": WireFormat(bits=8, block=128, hadamard=32),
    "inter_node_gradient_wire": WireFormat(bits=4, block=128, hadamard=32),
}
DIFFERENCES: dict[str, Any] = {
    "weight_differences": WireFormat(bits=4, block=128),
    "inter_node_reduce": "step",
    "secondary": "wire",
}


OUTER_SGD = {
    "diloco": {"rate": 0.7, "momentum": 0.9},
    "streaming": {"rate": 1.0, "momentum": 0.8},
}
"""The outer optimizer of each preset with islands, as arguments of `nesterov`. That of `streaming`
gave the lowest loss of those that benchmarks/quality_islands.py tries."""


def streaming(every: int) -> Outer:
    """Return the options of an exchange in ten fragments. An exchange has half of the steps to the
    next one."""
    num = min(10, every)
    return Outer(
        every=every,
        optimizer=nesterov(**OUTER_SGD["streaming"]),
        wire=WireFormat(bits=4, block=128, hadamard=32),
        fragments=num,
        delay=min(max(every // num // 2, 1), every - 1),
    )
