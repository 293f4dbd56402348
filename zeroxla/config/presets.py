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


FEW_STEPS = 20
"""With fewer steps between exchanges one lasts a large share of them, and `streaming` keeps a part
of what an island learns meanwhile. benchmarks/quality_islands.py has the losses of both."""


def outer_sgd(preset: str, every: int) -> dict[str, float]:
    """Return the outer optimizer of "diloco" or "streaming", as arguments of `nesterov`."""
    if preset == "diloco" or every < FEW_STEPS:
        return {"rate": 0.7, "momentum": 0.9}
    return {"rate": 1.0, "momentum": 0.8}


def streaming(every: int) -> Outer:
    """Return the options of an exchange in ten fragments. An exchange has half of the steps to the
    next one."""
    num = min(10, every)
    return Outer(
        every=every,
        optimizer=nesterov(**outer_sgd("streaming", every)),
        wire=WireFormat(bits=4, block=128, hadamard=32),
        fragments=num,
        delay=min(max(every // num // 2, 1), every - 1),
        mixing=0.5 if 1 < every < FEW_STEPS else 0.0,
    )
