"""Warnings about options that do nothing on this mesh or for this model."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import split_axes
from zeroxla.program.paths import leaf_path, paths_of
from zeroxla.wire.leaves import Layout
from zeroxla.wire.resolve import Wiring


def warn(texts: Iterable[str], *, stacklevel: int) -> None:
    """Warn with each text. `stacklevel` counts this function as 1."""
    for text in texts:
        warnings.warn(text, stacklevel=stacklevel)


def useless_on_mesh(wiring: Wiring, config: ZeroConfig, mesh: Mesh) -> Iterator[str]:
    """Yield a sentence that lists the options for which the mesh lacks an axis."""
    useless = list(wiring.without_effect)
    if config.splits is not None:
        useless += [(pin, "no such axis") for pin in config.splits.useless(split_axes(mesh))]
    if useless:
        words = "; ".join(f"{name} ({why})" for name, why in useless)
        shape = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        yield f"without effect on the mesh {shape}: {words}"


def narrowed(params: Any) -> Iterator[str]:
    """Yield a sentence if parameters are wider than their float32 masters.

    Args:
      params: the parameters that the model makes, or their shapes.
    """
    wide = [
        f"{'/'.join(path)} ({x.dtype})" for path, x in paths_of(params) if x.dtype == np.float64
    ]
    if wide:
        several = f" and {len(wide) - 3} more" if len(wide) > 3 else ""
        yield (
            f"{', '.join(wide[:3])}{several}: a step keeps and trains parameters in float32, also "
            "with jax_enable_x64; make them float32 to have the same numbers everywhere"
        )


def two_optimizers(given: optax.GradientTransformation | None, config: ZeroConfig) -> Iterator[str]:
    """Yield a sentence if `make_step` is given an optimizer, and the options name another."""
    if given is not None and config.optimizer is not None and given is not config.optimizer:
        yield (
            "make_step was given an optimizer, so config.optimizer has no effect; leave one of "
            "them out"
        )


def useless_without_stages(weights: str, num_stages: int) -> Iterator[str]:
    """Yield a sentence if an option needs stages and the mesh has none."""
    if weights != "step" and num_stages == 1:
        yield f"weights={weights!r} has no effect: the mesh has no axis `pipe`"


_WHILE_HELD: dict[str, Any] = {
    "hpz_size": 1,
    "secondary": "compute",
    "inter_node_gather": "microbatch",
    "unit_elements": None,
    "prefetch_bucket": None,
    "max_live_parameters": None,
    "max_reuse_distance": None,
}
"""The options that need leaves to be gathered more than once in a step, with their defaults."""


def useless_when_held(config: ZeroConfig, wiring: Wiring) -> Iterator[str]:
    """Yield a sentence for each option that does nothing in a pipeline with weights="step"."""
    names = [name for name, default in _WHILE_HELD.items() if getattr(config, name) != default]
    if config.weight_differences is not None and "hpz_size" in names:
        names.remove("hpz_size")  # they need it: it says where the kept copy is
    if config.offload.secondary != "none":
        names.append("offload.secondary")
    known = {name for name, _ in wiring.without_effect}
    for name in names:
        if name not in known:
            yield (
                f'{name} has no effect in a pipeline with weights="step", whose stages gather '
                'their leaves once in a step and keep them whole; make the step with weights="tick"'
                f", or leave {name} at its default"
            )


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
        largest = config.largest_persistent(sum(leaf.elements for leaf in layout))
        yield (
            f"{', '.join(config.wires)} without effect: of {len(layout.leaves)} leaves none is "
            f"quantized. {persistent} have at most persistence_threshold={largest} elements and "
            "are gathered for the whole step, "
            f"{whole} have too few to be split; others are below quantize_threshold="
            f"{config.quantize_threshold} or match `unquantized`. Lower a threshold, or leave "
            "the formats out"
        )


def useless_beside_reuse(config: ZeroConfig, layout: Layout) -> Iterator[str]:
    """Yield a sentence if secondary shards are asked for, and every leaf stays gathered anyway."""
    elements = sum(leaf.elements for leaf in layout if leaf.fetched)
    live, distance = config.max_live_parameters or 0, config.max_reuse_distance or 0
    keeps_all = live >= elements and distance >= 2 * elements
    crosses_once = config.inter_node_gather == "step" or config.weight_differences is not None
    if config.hpz_size == 1 or not elements or not keeps_all or crosses_once:
        return
    names = ["hpz_size", *(["offload.secondary"] if config.offload.secondary != "none" else [])]
    yield (
        f"{' and '.join(names)} without effect: with max_live_parameters="
        f"{config.max_live_parameters} and max_reuse_distance={config.max_reuse_distance} all "
        f"{elements} elements stay gathered from forward to backward, which gathers nothing; lower "
        "these limits, or leave the secondary shards out"
    )


def layouts_of_the_model(axes: Collection[str]) -> Iterator[str]:
    """Yield a sentence if the model gives its arrays layouts over `axes`, which a step ignores."""
    if axes:
        yield (
            "the model's own sharding annotations have no effect (axes "
            f"{', '.join(sorted(axes))}): a step splits parameters over the whole mesh, and "
            "batches by rows"
        )


def fresh_model_state(expected: Any) -> Iterator[str]:
    """Yield a sentence if a model keeps a state and was given none."""
    found = jax.tree_util.tree_leaves_with_path(expected)
    if found:
        yield (
            f"the model keeps a state between steps ({len(found)} leaves, first "
            f"{leaf_path(found[0][0])!r}), and none was given: it starts fresh, while the "
            "parameters do not; pass model_state=, the `model_state` of the state they are from"
        )
