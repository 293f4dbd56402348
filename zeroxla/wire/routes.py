"""Routes: the form in which each leaf travels, and the part of it that a device holds on the way.

At every moment a leaf is in one of these forms:

    shard    the stored shard: float32 in leaf layout, the split dim 1/world long (uint8 if the leaf
             itself is stored as a wire)
    wire     the secondary shard in the form in which it travels: for a quantized leaf
             uint8[*layers, shards, bytes], one wire for each shard (of each layer); for any other
             leaf its bits in leaf layout
    values   the secondary shard of a quantized leaf in the compute dtype, in leaf layout
    coded    those values as they travel on: uint8[*layers, 1, bytes], one wire (of each layer)
    ticket   the stand-in for a shard on disk; see `offload/disk/tickets.py`
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from zeroxla.config.wire_format import WireFormat
from zeroxla.mesh.placement import Placement
from zeroxla.offload.disk.tickets import is_ticket
from zeroxla.offload.memory_kinds import to_device, to_host

Form = Literal["shard", "wire", "values", "coded", "ticket"]
AS_STORED = "as stored"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LeafSource:
    """The array that a leaf is gathered from.

    Attributes:
      array: this device's part of the leaf.
      form: its form; see the head of this file.
      copy: the secondary shard that the state keeps, in the form of values. Beside a shard it is
        as earlier steps have sent it, and the outer hops carry the difference of the shard to its
        part of the copy. Beside a secondary shard it is up to date. None sends the shard itself.
      key: the key of stochastic rounding for the outer hops. None takes the key of the gather.
    """

    array: jax.Array
    form: Form = dataclasses.field(default="shard", metadata={"static": True})
    copy: jax.Array | None = None
    key: jax.Array | None = None

    @staticmethod
    def stored(array: jax.Array) -> LeafSource:
        """Return the source for a stored leaf, or for the ticket of one."""
        return LeafSource(array, "ticket" if is_ticket(array) else "shard")

    @property
    def is_shard(self) -> bool:
        """Whether the leaf has made no hop yet."""
        return self.form in ("shard", "ticket")

    @property
    def is_encoded(self) -> bool:
        """Whether the array is in the form in which it travels."""
        return self.form in ("wire", "coded")

    def on_device(self) -> LeafSource:
        """Return the source in device memory."""
        return dataclasses.replace(self, array=to_device(self.array))

    def on_host(self) -> LeafSource:
        """Return the source in host memory."""
        return dataclasses.replace(self, array=to_host(self.array))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """How one leaf travels.

    Attributes:
      placement: how it is stored.
      weights: the format of its gathers. None means the plain wire dtype.
      gradients: the formats of its gradient on the hop over `device` and on the hop over `node`.
        None means the plain reduce dtype.
      values: the format in which values of the secondary shard travel on. None means the compute
        dtype.
      differences: the format of differences to a kept copy. None if no copy is kept.
      secondary: the form in which its secondary shard is kept from forward to backward. None keeps
        none. "wire" keeps values that travel on in a format of their own in the form "coded".
      is_wire: whether the leaf is stored as a wire. Its bytes then travel unchanged.
      name: the leaf's path, for the scopes that profiles show.
    """

    placement: Placement
    weights: WireFormat | None = None
    gradients: tuple[WireFormat | None, WireFormat | None] = (None, None)
    values: WireFormat | None = None
    differences: WireFormat | None = None
    secondary: Literal["wire", "values"] | None = None
    is_wire: bool = False
    name: str = dataclasses.field(default="", compare=False)

    @property
    def keeps_coded(self) -> bool:
        """Whether values of its secondary shard are kept as they travel on, beside its copy."""
        return self.values is not None and self.secondary == "wire"

    @property
    def words(self) -> str:
        """Return the names of the formats of weights and gradient hops, for tables."""
        if self.is_wire:
            return AS_STORED
        names = [f.words if f else "float" for f in (self.weights, *self.gradients)]
        if len(set(names)) == 1:
            return names[0]
        return f"{names[0]}, gradient {' / '.join(dict.fromkeys(names[1:]))}"

    def of_differences(self) -> Route:
        """Return the route of the leaf's difference to its copy. Its layers share a wire."""
        placement = dataclasses.replace(self.placement, layer_dims=())
        return Route(placement=placement, weights=self.differences, secondary="values")

    def unstack(self, dim: int) -> Route:
        """Return the route of a slice along `dim`, a scanned leaf's layer dim."""
        return dataclasses.replace(self, placement=self.placement.unstack(dim))

    def layers(self, source: LeafSource, dim: int) -> LeafSource:
        """Return `source` with the layer dim `dim` first, for a loop to slice."""
        in_wires = source.form == "coded" or (source.form == "wire" and self.weights is not None)
        axis = self.placement.layer_dims.index(dim) if in_wires else dim
        # A loop slices host memory in place along the first dim, so nothing is transposed there.
        source = source.on_device() if axis else source
        return LeafSource(jnp.moveaxis(source.array, axis, 0), source.form)
