"""What does not go yet with axes that split the work on one row."""

from __future__ import annotations

from collections.abc import Collection

from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import split_axes


def check_axes(mesh: Mesh, config: ZeroConfig) -> None:
    """Check that the options go with the mesh's axes.

    Raises:
      NotImplementedError: they do not.
    """
    axes = split_axes(mesh)
    if not axes:
        return
    names = ", ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
    offload = config.offload
    if offload.params == "disk":
        raise NotImplementedError(
            f"Offload(params='disk') on a mesh with {names}: shards on disk are read unit by unit, "
            "and leaves are dealt to these axes before; use 'host', or leave out the axes"
        )


def check_overwritten(mesh: Mesh, overwritten: Collection[int]) -> None:
    """Check that no leaf of the model state is overwritten with its gradient.

    Raises:
      NotImplementedError: one is, and the mesh splits the work on a row.
    """
    if overwritten and split_axes(mesh):
        raise NotImplementedError(
            f"the model's fp8 scales are overwritten with their gradients, which a mesh with the "
            f"axes {', '.join(split_axes(mesh))} would sum; leave out these axes"
        )
