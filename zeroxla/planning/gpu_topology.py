"""Meshes of GPUs that need not be there, for XLA to compile for, from one GPU's description."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from zeroxla.mesh.axes import NODE, PIPE
from zeroxla.mesh.machines import TARGETS

H200 = TARGETS / "h200.txtpb"

PLUGIN = "jax_cuda13_plugin"
# Unless this is set, the plugin asks for a driver and for cuDNN when JAX starts. Compiling needs
# neither.
UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


class WheelsMissingError(RuntimeError):
    """This environment cannot compile for a GPU."""


def target_mesh(target: str | Path, mesh_shape: Mapping[str, int]) -> Mesh:
    """Return a mesh of GPUs that programs can be compiled for, but not run on.

    The machine needs no GPU. It needs JAX's CUDA wheels, which the extra `plan-gpu` installs.

    Args:
      target: a file that describes one GPU, as the text of XLA's message GpuTargetConfigProto.
      mesh_shape: lengths of the axes, in the mesh's order. The devices along `device` and the axes
        after it belong to one host.

    Raises:
      ValueError: the description cannot be read, or XLA does not understand it.
      WheelsMissingError: the wheels are not installed, do not have this JAX's version, or JAX has
        started without them.

    Sets JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 in this process, which has an effect only if JAX has not
    started.
    """
    try:
        description = Path(target).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the description of a GPU, {target}, cannot be read: {error}") from error
    if importlib.util.find_spec(PLUGIN) is None:
        raise WheelsMissingError(
            f"there is no package {PLUGIN}; to compile for a GPU install the extra plan-gpu, "
            'pip install "zeroxla[plan-gpu]"'
        )
    os.environ.setdefault(UNCHECKED, "1")
    hosts = math.prod(length for axis, length in mesh_shape.items() if axis in (PIPE, NODE))
    devices = math.prod(mesh_shape.values()) // hosts
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=description,
            topology=f"1x{hosts}x{devices}",  # slices x hosts x devices
        )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if "GpuTargetConfigProto" in str(error):
            raise ValueError(
                f"XLA does not understand the description of a GPU in {target}: {error}; "
                f"{H200} is one that it does"
            ) from error
        raise WheelsMissingError(
            f"the CUDA plugin does not start ({error}); its version must be that of jax, "
            f"{jax.__version__}, and {UNCHECKED}=1 must be set before JAX starts"
        ) from error
    grid = np.array(topology.devices).reshape(tuple(mesh_shape.values()))
    return Mesh(grid, tuple(mesh_shape))
