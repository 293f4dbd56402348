"""The context in which models are traced for a mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from zeroxla.program.compat import cudnn
from zeroxla.program.compat.axis_names import AxisNames, axes_named
from zeroxla.program.compat.layouts import layouts_ignored


@contextlib.contextmanager
def mesh_context(mesh: jax.sharding.Mesh, axis_names: AxisNames = ()) -> Iterator[set[str]]:
    """Return a context for tracing a program that runs on `mesh`.

    In it `mesh` replaces the mesh that the user has set, if there is one; a model's own layouts are
    ignored, see `layouts_ignored`; and cuDNN is asked for the mesh's devices, see
    `cudnn.for_devices_of`.

    Args:
      mesh: the mesh.
      axis_names: other names of its axes, see `axes_named`.

    Yields:
      The names of the axes in those layouts.
    """
    users = jax.sharding.get_abstract_mesh()
    replaces = not users.empty and users != mesh.abstract_mesh
    with (
        jax.set_mesh(mesh) if replaces else contextlib.nullcontext(),
        cudnn.for_devices_of(mesh),
        axes_named(axis_names, mesh.axis_names),
        layouts_ignored() as found,
    ):
        yield found
