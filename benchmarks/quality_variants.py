"""The configurations that benchmarks/quality.py trains, in the order in which it does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from zeroxla import Feedback, WireFormat, ZeroConfig

# Every leaf is fetched, as in a model that needs ZeRO-3; one this small would stay whole.
_ALL = {"persistence_threshold": 0}
_SIXTEEN_BIT = {"gather_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
_TWO_LEVELS = {
    "gradient_wire": WireFormat(bits=8, block=128, hadamard=32),
    "inter_node_gradient_wire": WireFormat(bits=4, block=128, hadamard=32),
}
_INT4 = WireFormat(bits=4)
_STOCHASTIC = WireFormat(bits=4, rounding="stochastic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One configuration.

    Attributes:
      name: in tables and file names.
      says: what it is.
      config: its options.
      mesh: nodes and devices per node.
      bar: the largest mean relative difference of its loss to zero3's, where one is set.
      seeds: how many times it is trained.
    """

    name: str
    says: str
    config: ZeroConfig
    mesh: tuple[int, int] = (2, 4)
    bar: float | None = None
    seeds: int = 1


def _preset(make: Callable[..., ZeroConfig] = ZeroConfig, **options: Any) -> ZeroConfig:
    return make(**{**_ALL, **options})


VARIANTS = (
    Variant(name="zero3", says="float32 wires", config=_preset(), seeds=8),
    Variant(
        name="null",
        says="zero3 on 4 nodes of 2: another order of the same sums",
        config=_preset(),
        mesh=(4, 2),
        seeds=3,
    ),
    Variant(
        name="qwz+hpz",
        says="weights in 8 bits, backward gathers inside the node",
        config=_preset(weight_wire=WireFormat(bits=8), hpz_size="node"),
        bar=0.001,
        seeds=3,
    ),
    Variant(name="zeropp", says="the preset", config=_preset(ZeroConfig.zeropp), seeds=8),
    Variant(
        name="zeropp_hq",
        says="the preset",
        config=_preset(ZeroConfig.zeropp_hq),
        bar=0.0024,
        seeds=8,
    ),
    Variant(
        name="zeropp_min",
        says="the preset",
        config=_preset(ZeroConfig.zeropp_min),
        bar=0.004,
        seeds=8,
    ),
    Variant(name="16 bit", says="zero3, all wires bfloat16", config=_preset(**_SIXTEEN_BIT)),
    Variant(
        name="qgz int4",
        says="gradients in 4 bits on both hops, weights in float32",
        config=_preset(gradient_wire=_INT4),
    ),
    Variant(
        name="qgz int4, DeepSpeed's step",
        says="as before, with DeepSpeed's rule for the step",
        config=_preset(gradient_wire=WireFormat(bits=4, scale="deepspeed")),
    ),
    Variant(
        name="qgz int4, stochastic",
        says="as before, rounded stochastically",
        config=_preset(gradient_wire=_STOCHASTIC),
    ),
    Variant(
        name="two levels",
        says="gradients in 8 bits inside the node and 4 between nodes, rotated",
        config=_preset(**_TWO_LEVELS),
    ),
    Variant(
        name="two levels, error feedback",
        says="as before, with error feedback on the hop between nodes",
        config=_preset(**_TWO_LEVELS, inter_node_reduce="step", error_feedback=Feedback()),
    ),
    Variant(
        name="weights int4",
        says="weights in 4 bits, as they are",
        config=_preset(weight_wire=_INT4, hpz_size="node"),
    ),
    Variant(
        name="weight differences",
        says="weights as 4-bit differences between nodes, in 8 bits inside",
        config=_preset(
            weight_wire=WireFormat(bits=8),
            hpz_size="node",
            weight_differences=WireFormat(bits=4, block=128),
        ),
    ),
)
