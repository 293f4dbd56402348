"""The settings that a search of plans tries: presets, meshes, micro-batches, recomputation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from flax import linen

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import (
    CONTEXT,
    DEVICE,
    EXPERT,
    NODE,
    PIPE,
    SPLIT_AXES,
    TENSOR,
    lengths_beside,
)
from zeroxla.pipeline.pipeline import Pipeline

ZEROS = ("zero3", "zeropp", "zeropp_hq", "zeropp_min")
"""The presets of `ZeroConfig` that are tried. The first one needs least memory."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Settings of a training step.

    Attributes:
      zero: the name of a preset of `ZeroConfig`.
      mesh_shape: axis lengths.
      microbatches: the number of micro-batches that the batch is cut into.
      weights: whether a pipeline gathers weights once a step or in every tick; None without stages.
      remat: whether blocks are recomputed in backward; None if the model does not say.
    """

    zero: str
    mesh_shape: Mapping[str, int]
    microbatches: int
    weights: Literal["step", "tick"] | None
    remat: bool | None

    def words(self) -> list[str]:
        """Return the settings as a row of a table."""
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh_shape.items())
        remat = {None: "-", True: "yes", False: "no"}[self.remat]
        return [self.zero, axes, str(self.microbatches), self.weights or "-", remat]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variants:
    """A model with and without recomputation.

    Attributes:
      models: (the model, its pipeline or None) by whether it recomputes; None if it does not say.
      refused: reasons why there is no pipeline, each with ["pipelines"].
    """

    models: Mapping[bool | None, tuple[Any, Any]]
    refused: Mapping[str, list[str]]

    @staticmethod
    def of(model: Any, loss: Any, *, with_budget: bool = False) -> Variants:
        """Make the variants of a model; arguments as `search_plans` takes them.

        With a memory budget, which decides what is computed again, the model recomputes nothing by
        itself.
        """
        models: Mapping[Any, Any] = {None: model}
        if isinstance(model, Mapping) and with_budget:
            models = {None: model[False]}
        elif isinstance(model, linen.Module) and hasattr(model, "remat") and with_budget:
            models = {None: model.clone(remat=False)}
        elif isinstance(model, Mapping):
            models = model
        elif isinstance(model, linen.Module) and hasattr(model, "remat"):
            models = {remat: model.clone(remat=remat) for remat in (False, True)}
        refused: dict[str, list[str]] = {}

        def staged(model: Any) -> Any:
            try:
                return Pipeline.from_model(model, loss)
            except (ValueError, TypeError, NotImplementedError) as error:
                refused[str(error)] = ["pipelines"]
                return None

        made = {remat: (model, staged(model)) for remat, model in models.items()}
        return Variants(models=made, refused=refused)

    @property
    def has_pipelines(self) -> bool:
        return any(staged is not None for _, staged in self.models.values())

    def model(self, remat: bool | None, mesh_shape: Mapping[str, int]) -> Any:
        """Return the model to run on a mesh: its pipeline if the mesh has stages."""
        plain, staged = self.models[remat]
        return staged if mesh_shape.get(PIPE, 1) > 1 else plain


def axes_inside(devices: int, *, experts: bool) -> Iterator[dict[str, int]]:
    """Yield the lengths of axes that split the work on one row and divide a node, shortest first.

    Args:
      devices: the number of devices of a node.
      experts: whether the axis `expert` is tried too.
    """
    lengths = [n for n in range(1, devices + 1) if devices % n == 0]
    found = [
        {EXPERT: expert, CONTEXT: context, TENSOR: tensor}
        for expert in (lengths if experts else [1])
        for context in lengths
        for tensor in lengths
        if devices % (expert * context * tensor) == 0
    ]
    yield from sorted(found, key=lambda axes: math.prod(axes.values()))


def axes_over_nodes(nodes: int, devices: int) -> Iterator[dict[str, int]]:
    """Yield the lengths of axes that take several nodes: `context` over them, and `tensor` inside.

    Args:
      nodes, devices: the number of nodes, and of devices in each.
    """
    for several in (n for n in range(2, nodes + 1) if nodes % n == 0):
        for tensor in (n for n in range(1, devices + 1) if devices % n == 0):
            yield {CONTEXT: several * devices // tensor, TENSOR: tensor}


def meshes(
    nodes: int,
    devices: int,
    pipes: Sequence[int],
    axes: Mapping[str, int] | None = None,
) -> Iterator[dict[str, int]]:
    """Yield the meshes of a cluster, one for each number of stages that fits.

    Hosts become stages first, as in `make_mesh`.

    Args:
      nodes, devices: the number of nodes, and of devices in each.
      pipes: numbers of stages.
      axes: the lengths of axes that split the work on one row.
    """
    split = {axis: (axes or {}).get(axis, 1) for axis in SPLIT_AXES}
    for pipe in pipes:
        if nodes % pipe == 0:
            shape = {PIPE: pipe, NODE: nodes // pipe, DEVICE: devices}
        elif pipe % nodes == 0 and devices % (pipe // nodes) == 0:
            shape = {PIPE: pipe, NODE: 1, DEVICE: devices * nodes // pipe}
        else:
            continue
        try:
            shape[NODE], shape[DEVICE] = lengths_beside(shape[NODE], shape[DEVICE], split)
        except ValueError:
            continue  # a stage has too few devices for these axes
        shape |= split
        yield {axis: size for axis, size in shape.items() if axis in (NODE, DEVICE) or size > 1}


def counts_of(mesh_shape: Mapping[str, int], rows: int) -> list[int]:
    """Return the numbers of micro-batches into which the rows of a device divide, fewest first."""
    of_device = max(rows // (mesh_shape[NODE] * mesh_shape[DEVICE]), 1)
    return [m for m in range(1, of_device + 1) if of_device % m == 0]


def attempts(
    zero: str, mesh_shape: Mapping[str, int], remat: bool | None, rows: int
) -> Iterator[Choice]:
    """Yield the choices of micro-batches and weights, the fastest first if it fits.

    Args:
      zero, mesh_shape, remat: the settings that stay.
      rows: examples of a global batch.
    """
    counts = counts_of(mesh_shape, rows)
    pipe = mesh_shape.get(PIPE, 1)
    if pipe > 1:
        enough = [m for m in counts if m <= 4 * pipe]
        counts = [enough[-1], *(m for m in counts if m > 4 * pipe)]
    for weights in ("step", "tick") if pipe > 1 else (None,):
        for count in counts:
            yield Choice(
                zero=zero, mesh_shape=mesh_shape, microbatches=count, weights=weights, remat=remat
            )


def with_preset(config: ZeroConfig, zero: str) -> ZeroConfig:
    """Return the config with a preset's values of all options that any preset decides."""
    presets = {name: getattr(ZeroConfig, name)() for name in ZEROS}
    decided = {
        field.name
        for preset in presets.values()
        for field in dataclasses.fields(ZeroConfig)
        if getattr(preset, field.name) != getattr(ZeroConfig(), field.name)
    }
    return dataclasses.replace(config, **{name: getattr(presets[zero], name) for name in decided})
