"""Stores whole arrays as a state does: checked, cast, padded and split, one leaf at a time."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zeroxla.config.wire_format import WireFormat
from zeroxla.frontend.lora.at_rest import as_wires
from zeroxla.frontend.lora.uses import DenseLeaf
from zeroxla.mesh.axes import world_size
from zeroxla.mesh.batches import put_key
from zeroxla.mesh.placement import Placement, place
from zeroxla.mesh.processes.together import together
from zeroxla.offload.disk.disk_array import DiskArray, in_memory
from zeroxla.offload.memory_kinds import put, to_device
from zeroxla.step.state import host_leaf

WireOf = tuple[DenseLeaf, WireFormat]
"""A dense leaf of a frozen base, and the format in which it is stored."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredLeaf:
    """A leaf that a state stores, and the shape of the whole array that it is made of.

    Attributes:
      name: its name, `a/b/c`.
      shape: the shape of the whole array.
      dtype: the dtype in which it is stored.
      placement: how it is stored.
      sharding: its sharding on the mesh, memory included. For a leaf on disk it is that of the
        array that is written.
      wire: how floats become a wire, for a leaf that is stored as one; None for others.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    placement: Placement
    sharding: NamedSharding
    wire: WireOf | None = None

    @property
    def words(self) -> str:
        """The dtype and the shape of the whole array."""
        return f"{'float32' if self.wire else self.dtype}{list(self.shape)}"

    def misfit(self, x: Any) -> str | None:
        """Say in which way a whole array is not this leaf's; None if it is, or is a function.

        The array of another state fits with its padding, and a wire fits a leaf stored as one.
        """
        if callable(x):
            return None
        x = as_array(x)
        leaf = self._made_of(x)
        if leaf._takes(x.dtype) and (tuple(x.shape) == leaf.shape or _is_padded(x, leaf.shape)):
            return None
        return f"is {x.dtype}{list(x.shape)}, and the model has {leaf.words}"

    def store(self, source: Any, *, donate: bool) -> jax.Array:
        """Return a whole array as the state stores it. All processes must call this.

        Args:
          source: the array, or a function without arguments that returns it.
          donate: the memory of a JAX array may be used, or freed.

        Raises:
          ValueError: it does not fit.

        Cost: memory for the whole array. Of an array that can be read in parts, such as
        `np.memmap`, each process reads only its own.
        """
        mesh = self.sharding.mesh
        assert isinstance(mesh, Mesh)
        given, is_new = together(f"leaf {self.name}", lambda: self._brought(source, mesh))
        leaf = self._made_of(given)
        is_stored = leaf._is_stored(given)
        if not is_stored or not (is_new or (donate and given is source)):
            if given.shape != leaf.shape and not is_stored and not is_new:
                _check_padding(self.name, given, leaf.shape)
            given = _stored(
                given,
                shape=leaf.shape,
                dtype=leaf.dtype,
                wire=leaf.wire,
                placement=leaf.placement,
                sharding=leaf.sharding,
            )
        given.block_until_ready()  # the next leaf waits until this one's temporaries are freed
        if donate and isinstance(source, jax.Array) and given is not source:
            source.delete()
        return given

    def _brought(self, source: Any, mesh: Mesh) -> tuple[jax.Array, bool]:
        """Return the whole array, split over the mesh in some way, and whether it was made here.

        Waits for no other process.
        """
        x = source() if callable(source) else source
        is_new = isinstance(x, DiskArray)
        x = in_memory(x) if is_new else as_array(x)
        if (words := self.misfit(x)) is not None:
            raise ValueError(f"the leaf {self.name} {words}; give the model's own")
        if jnp.issubdtype(self.dtype, jax.dtypes.prng_key):
            return put_key(jnp.copy(x), mesh), True
        leaf = self._made_of(x)
        if isinstance(x, jax.Array):
            if _is_on(x, mesh):
                return x, is_new
            x = _on_host(self.name, x)
            if x.shape != leaf.shape:
                _check_padding(self.name, x, leaf.shape)
        placement, sharding, dtype = leaf.placement, leaf.sharding, leaf.dtype
        if leaf.wire is not None:
            placement = place(leaf.shape, world_size(mesh), skip=leaf.wire[0].layer_dims)
            sharding, dtype = placement.sharding(mesh), np.dtype(np.float32)
        part = functools.partial(_part, x, placement, dtype)
        return jax.make_array_from_callback(placement.stored_shape, sharding, part), True

    def _made_of(self, x: Any) -> StoredLeaf:
        """Return the leaf as it is made of this array: of a wire by itself."""
        if self.wire is None or x.dtype != jnp.uint8:
            return self
        return dataclasses.replace(self, shape=self.placement.shape, wire=None)

    def _takes(self, dtype: Any) -> bool:
        if self.wire is not None or jnp.issubdtype(self.dtype, jnp.floating):
            return jnp.issubdtype(dtype, jnp.floating)
        return jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) == self.dtype

    def _is_stored(self, x: jax.Array) -> bool:
        """Return whether an array has the form that the state stores."""
        same = x.shape == self.placement.stored_shape and x.dtype == self.dtype
        return same and self.wire is None and x.sharding.is_equivalent_to(self.sharding, x.ndim)


def as_array(x: Any) -> Any:
    """Return anything that has a shape and a dtype of NumPy's as it is, and others as NumPy
    arrays."""
    try:
        is_array = isinstance(x, jax.Array) or (np.dtype(x.dtype), tuple(x.shape))
    except (AttributeError, TypeError):
        is_array = False
    return x if is_array else np.asarray(x)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "wire", "placement", "sharding"))
def _stored(
    x: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype: np.dtype,
    wire: WireOf | None,
    placement: Placement,
    sharding: NamedSharding,
) -> jax.Array:
    """Return an array on the mesh in its stored form, in new memory."""
    values = to_device(x)[tuple(map(slice, shape))]  # without padding
    if wire is not None:
        values = as_wires(values.astype(jnp.float32), *wire)
    return put(placement.stored(values.astype(dtype)), sharding)


def _part(
    x: Any, placement: Placement, dtype: np.dtype, index: tuple[slice, ...] | None
) -> np.ndarray:
    """Return a part of a stored array, in new memory: elements of the whole array, then zeros."""
    assert index is not None
    bounds = [s.indices(n) for s, n in zip(index, placement.stored_shape, strict=True)]
    values = np.zeros([stop - start for start, stop, _ in bounds], dtype)
    pairs = zip(bounds, placement.shape, strict=True)
    inside = tuple(slice(min(a, n), min(b, n)) for (a, b, _), n in pairs)
    values[tuple(slice(s.stop - s.start) for s in inside)] = x[inside]
    return values


def _is_on(x: jax.Array, mesh: Mesh) -> bool:
    """Return whether an array is on the devices of a mesh, in their order."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return False
    return list(sharding.mesh.devices.flat) == list(mesh.devices.flat)


def _on_host(name: str, x: jax.Array) -> np.ndarray:
    """Return an array of other devices whole, on this host.

    Raises:
      ValueError: this process holds only a part of it.
    """
    if x.is_fully_replicated:
        x = x.addressable_data(0)
    if x.is_fully_addressable:
        return host_leaf(x, Placement(shape=x.shape))
    raise ValueError(
        f"the leaf {name} is split over devices of other processes, in another order than the "
        "step's mesh; split it over the step's mesh, or give whole arrays in each process"
    )


def _is_padded(x: Any, shape: tuple[int, ...]) -> bool:
    """Return whether an array is one of this shape with the padding that its split needs: of one
    dim, to the next multiple of the number of its parts."""
    if not isinstance(x, jax.Array | DiskArray) or x.ndim != len(shape) or not x.size:
        return False
    differing = [d for d, n in enumerate(shape) if x.shape[d] != n]
    if len(differing) != 1:
        return False
    (d,) = differing
    parts = x.shape[d] // x.sharding.shard_shape(x.shape)[d]
    return x.shape[d] == -(-shape[d] // parts) * parts


def _check_padding(name: str, x: jax.Array | np.ndarray, shape: tuple[int, ...]) -> None:
    """Check that an array has only zeros beyond a shape. If it is on the mesh, all processes must
    call this.

    Raises:
      ValueError: there is another number, so that this is no padding.
    """
    if isinstance(x, np.ndarray):
        num_beyond = np.count_nonzero(x) - np.count_nonzero(x[tuple(map(slice, shape))])
    else:
        num_beyond = int(_num_beyond(x, shape))
    if num_beyond:
        raise ValueError(
            f"the leaf {name} is {x.dtype}{list(x.shape)}, and the model has {list(shape)}; what "
            "is beyond it is not the zeros of padding: give the model's own"
        )


@functools.partial(jax.jit, static_argnums=1)
def _num_beyond(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = to_device(x)
    return jnp.count_nonzero(x) - jnp.count_nonzero(x[tuple(map(slice, shape))])
