"""The configurations that benchmarks/quality_islands.py trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import optax
from quality_training import LENGTH

from zeroxla import Outer, ZeroConfig
from zeroxla.cli.data.text import VOCABULARY

BAR = 0.005
EVERY = 50  # H of the variants that are judged
LONG_MODEL = {"vocab": VOCABULARY, "length": LENGTH, "layers": 2, "width": 64, "heads": 4}
LONG_BATCH = 32
LONG_SWEEP = (
    ("streaming", 1.0, 0.9, 0.5),
    ("streaming", 1.0, 0.5, 0.5),
    ("streaming", 1.0, 0.8, 0.5),
    ("streaming", 0.7, 0.9, 0.5),
    ("streaming", 0.7, 0.9, 0.0),
    ("streaming", 0.7, 0.8, 0.0),
    ("diloco", 1.0, 0.5, 0.0),
    ("diloco", 1.0, 0.8, 0.0),
)
LONG_SWEEP_OF_4 = (("streaming", 0.7, 0.9, 0.5), ("streaming", 0.7, 0.9, 0.0))
"""The same with 4 islands."""
SWEEP = (  # outer rate, momentum, mixing
    ("diloco", 1.0, 0.0, 0.0),
    ("streaming", 1.0, 0.0, 0.5),
    ("diloco", 0.7, 0.5, 0.0),
    ("streaming", 0.7, 0.5, 0.5),
    ("streaming", 1.0, 0.9, 0.5),
    ("streaming", 0.7, 0.9, 0.0),
    ("streaming", 0.7, 0.9, 0.5),
    ("diloco", 1.0, 0.5, 0.0),
    ("diloco", 0.7, 0.8, 0.0),
    ("streaming", 1.0, 0.8, 0.5),
    ("diloco", 0.7, 0.9, 0.5),
)
"""Other outer optimizers: they are printed, and no target judges them."""
SWEEP_AT_10 = (
    ("streaming", 1.0, 0.8, 0.0),
    ("streaming", 1.0, 0.5, 0.0),
    ("streaming", 1.0, 0.0, 0.0),
    ("streaming", 1.0, 0.8, 0.5),
)
"""The same with H = 10."""
CURVE_EVERY = (10, 30, 100)
CURVE_BITS = (32, 8, 4)
"""Bits of the curve. There is no column of 2 bits: `WireFormat` has codes of 8 and of 4 bits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One configuration.

    Attributes:
      name: in tables and file names.
      says: what it is.
      config: its options.
      islands: how many islands train; 0 trains one step without islands.
      parts: without islands, trains on one such part of the devices and of each batch's rows.
      inner: the optimizer of the steps.
      bar: the largest mean relative difference of its loss to its base, where one is set.
      seeds: how many times it is trained.
    """

    name: str
    says: str
    config: ZeroConfig
    islands: int = 0
    parts: int = 1
    inner: Literal["adamw", "muon"] = "adamw"
    bar: float | None = None
    seeds: int = 3

    @property
    def base(self) -> str:
        """The name of the variant without islands that has the same optimizer."""
        return "zero3" if self.inner == "adamw" else "zero3, muon"


def _preset(make: Callable[..., ZeroConfig] = ZeroConfig, **options: Any) -> ZeroConfig:
    """Return a preset in which every leaf is fetched, as in a model that needs ZeRO-3."""
    return make(**{"persistence_threshold": 0, **options})


def curve_name(every: int, bits: int) -> str:
    """Return the name of a point of the curve."""
    return f"H={every}, {bits} bits"


def _point(every: int, bits: int) -> Variant:
    """Return a point of the curve: the preset for this H with another wire."""
    preset = ZeroConfig.streaming(every=every).outer
    assert preset is not None
    assert preset.wire is not None
    wire = None if bits == 32 else dataclasses.replace(preset.wire, bits=bits, scale=None)
    outer: Outer = dataclasses.replace(preset, wire=wire)
    return Variant(
        name=curve_name(every, bits),
        says=f"`streaming` with {'float32' if wire is None else wire.words}",
        config=_preset(outer=outer),
        islands=2,
        seeds=1,
    )


def sweep_name(
    preset: str, rate: float, momentum: float, mixing: float, islands: int = 2, every: int = EVERY
) -> str:
    """Return the name of a variant of the sweep."""
    steps = "" if every == EVERY else f", H={every}"
    mixed = f", mixing {mixing:g}" if mixing else ""
    several = "" if islands == 2 else f", {islands} islands"
    return f"{preset}, outer rate {rate:g}, momentum {momentum:g}{mixed}{several}{steps}"


def _swept(
    preset: str, rate: float, momentum: float, mixing: float, islands: int = 2, every: int = EVERY
) -> Variant:
    """Return a preset with another outer optimizer."""
    config = _preset(getattr(ZeroConfig, preset), every=every)
    optimizer = optax.sgd(rate, momentum=momentum, nesterov=True) if momentum else optax.sgd(rate)
    assert config.outer is not None
    outer = dataclasses.replace(config.outer, optimizer=optimizer, mixing=mixing)
    return Variant(
        name=sweep_name(preset, rate, momentum, mixing, islands, every),
        says="another outer optimizer",
        config=dataclasses.replace(config, outer=outer),
        islands=islands,
        seeds=1,
    )


_DILOCO = _preset(ZeroConfig.diloco, every=EVERY)
_STREAMING = _preset(ZeroConfig.streaming, every=EVERY)

JUDGED = (
    Variant(name="zero3", says="no islands", config=_preset()),
    Variant(name="diloco, 2 islands", says="the preset", config=_DILOCO, islands=2),
    Variant(name="streaming, 2 islands", says="the preset", config=_STREAMING, islands=2, bar=BAR),
    Variant(name="streaming, 4 islands", says="the preset", config=_STREAMING, islands=4, bar=BAR),
)
MUON = (
    Variant(name="zero3, muon", says="no islands, Muon inside", config=_preset(), inner="muon"),
    Variant(
        name="diloco, muon",
        says="2 islands, Muon inside",
        config=_DILOCO,
        islands=2,
        inner="muon",
    ),
    Variant(
        name="streaming, muon",
        says="2 islands, Muon inside",
        config=_STREAMING,
        islands=2,
        inner="muon",
    ),
)
CURVE = tuple(_point(every, bits) for every in CURVE_EVERY for bits in CURVE_BITS)
ALONE = tuple(
    Variant(
        name=f"one of {parts} islands alone",
        says=f"1/{parts} of the rows, and no exchange",
        config=_preset(),
        parts=parts,
        seeds=1,
    )
    for parts in (2, 4)
)
SWEPT = (
    *(_swept(*values) for values in SWEEP),
    *(_swept(*values, every=10) for values in SWEEP_AT_10),
)
LONG_SWEPT = (
    *(_swept(*values) for values in LONG_SWEEP),
    *(_swept(*values, islands=4) for values in LONG_SWEEP_OF_4),
)
VARIANTS: tuple[Variant, ...] = (*JUDGED, *ALONE, *SWEPT, *LONG_SWEPT, *MUON, *CURVE)
