"""Warnings about options that do nothing on this mesh or for this model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring


def warn(texts: Iterable[str], *, stacklevel: int) -> None:
    """Warn with each text. `stacklevel` counts this function as 1."""
    for text in texts:
        warnings.warn(text, stacklevel=stacklevel)


def useless_on_mesh(wiring: Wiring, mesh: Mesh) -> Iterator[str]:
    """Yield a sentence that lists the options for which the mesh lacks an axis."""
    if wiring.without_effect:
        words = "; ".join(f"{name} ({why})" for name, why in wiring.without_effect)
        shape = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        yield f"without effect on the mesh {shape}: {words}"


def useless_without_stages(weights: str, num_stages: int) -> Iterator[str]:
    """Yield a sentence if an option needs stages and the mesh has none."""
    if weights != "step" and num_stages == 1:
        yield f"weights={weights!r} has no effect: the mesh has no axis `pipe`"


def useless_on_leaves(config: ZeroConfig, layout: Layout) -> Iterator[str]:
    """Yield a sentence for each option that touches no leaf of the model."""
    for name, unused in config.unmatched([leaf.path for leaf in layout]).items():
        yield f"{name}={unused} matches no leaf and has no effect"
    if config.offload.is_used and not any(leaf.is_split for leaf in layout):
        yield (
            f"{config.offload} without effect: each of {len(layout.leaves)} leaves has fewer "
            "elements than there are devices, and stays on all of them"
        )
    if config.wires and not any(leaf.quantized for leaf in layout):
        persistent = sum(leaf.persistent for leaf in layout)
        whole = sum(not leaf.is_split for leaf in layout if not leaf.persistent)
        yield (
            f"{', '.join(config.wires)} without effect: of {len(layout.leaves)} leaves none is "
            f"quantized. {persistent} have at most persistence_threshold="
            f"{config.persistence_threshold} elements and are gathered for the whole step, "
            f"{whole} have too few to be split; others are below quantize_threshold="
            f"{config.quantize_threshold} or match `unquantized`. Lower a threshold, or leave "
            "the formats out"
        )
