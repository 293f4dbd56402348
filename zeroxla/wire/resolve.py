"""Resolves the options of wires on a mesh: which hops there are, and how each leaf travels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from zeroxla.config.feedback import Feedback
from zeroxla.config.wire_format import WireFormat
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import DEVICE, NODE, platform_of, split_axes
from zeroxla.offload.disk.desk import Desk
from zeroxla.program.random_keys import ROUNDINGS
from zeroxla.wire.bundles import ALONE_ELEMENTS
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.gather import Gathers
from zeroxla.wire.hops import Hops
from zeroxla.wire.leaves import Leaf
from zeroxla.wire.quantize import Backend
from zeroxla.wire.reduce import Reduces
from zeroxla.wire.routes import Route


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """The options of wires that have an effect on a mesh, and the collectives that they ask for.

    Attributes:
      collectives: the collectives of the mesh.
      weights: format of quantized leaves in gathers; None quantizes no leaf.
      gradients: formats of gradients on the hop over `device` and on the hop over `node`; None
        quantizes no gradient there.
      secondary: form of a quantized leaf's secondary shard; None if no secondary shard is kept.
      gathers_once: whether leaves make the outer hops once in a step, instead of in every
        micro-batch.
      differences: format of weight differences; None if leaves travel as they are.
      feedback: error feedback on the hop over `node`; None drops the error.
      without_effect: the options that change nothing on this mesh, each with the reason.
    """

    collectives: Collectives
    weights: WireFormat | None
    gradients: tuple[WireFormat | None, WireFormat | None]
    secondary: str | None
    gathers_once: bool
    differences: WireFormat | None
    feedback: Feedback | None
    without_effect: tuple[tuple[str, str], ...]

    @property
    def is_stochastic(self) -> bool:
        """Whether a format rounds stochastically."""
        formats = (self.weights, *self.gradients, self.differences)
        return any(f is not None and f.rounding == "stochastic" for f in formats)

    def key(self, key: jax.Array) -> jax.Array | None:
        """Return this device's key for stochastic rounding, derived from the key of a step or of a
        micro-batch; None if no format rounds stochastically. Call it inside `shard_map`."""
        if not self.is_stochastic:
            return None
        return jax.random.fold_in(jax.random.fold_in(key, self.collectives.number()), ROUNDINGS)

    def route(self, leaf: Leaf) -> Route:
        """Return the route of a leaf."""
        if not leaf.quantized:
            secondary = "wire" if self.secondary else None
            return Route(
                placement=leaf.placement,
                secondary=secondary,
                is_wire=leaf.is_wire,
                name=leaf.path,
            )
        as_wire = self.weights is None or self.secondary == "wire"
        return Route(
            placement=leaf.placement,
            weights=self.weights,
            gradients=self.gradients,
            values=self.weights if self.differences else None,
            differences=self.differences,
            secondary=("wire" if as_wire else "values") if self.secondary else None,
            name=leaf.path,
        )

    def secondary_bytes(self, leaf: Leaf) -> int:
        """Return the bytes of a leaf's secondary shard on one device; 0 if none is kept."""
        if self.secondary is None or not leaf.fetched:
            return 0
        return self.collectives.gathers.secondary_bytes(self.route(leaf))

    def gradient_bytes(self, leaf: Leaf) -> int:
        """Return the bytes of a leaf's float32 gradient that one device adds up over micro-batches;
        0 if the leaf is frozen."""
        if leaf.frozen:
            return 0
        if not leaf.fetched:
            return 4 * leaf.elements
        return 4 * math.prod(self.collectives.reduces.result_shape(leaf.placement))


def make_wiring(
    config: ZeroConfig,
    mesh: Mesh,
    desk: Desk | None = None,
    alone_elements: int = ALONE_ELEMENTS,
) -> Wiring:
    """Resolve the options of wires on a mesh.

    Args:
      config: the options.
      mesh: the mesh of all devices.
      desk: reads shards on disk; None if no state is on disk.
      alone_elements: a shard of at least this many elements shares no buffer with others.

    Raises:
      ValueError: hpz_size fits neither a node nor whole nodes.
    """
    nodes, devices = mesh.shape[NODE], mesh.shape[DEVICE]
    size = _hpz_size(config, nodes, devices)
    keeps = _keeps_secondary(size, nodes, devices)
    hops = Hops(
        nodes=nodes,
        devices=devices,
        hpz_size=size if keeps else devices,
        lengths=tuple((axis, mesh.shape[axis]) for axis in split_axes(mesh)),
    )
    differences = config.weight_differences if keeps else None
    on_cpu = platform_of(mesh) == "cpu"
    return Wiring(
        collectives=_collectives(config, hops, desk, alone_elements, on_cpu=on_cpu),
        weights=config.weight_wire,
        gradients=(config.gradient_wire, config.inter_node_gradient_wire or config.gradient_wire),
        secondary=config.secondary if keeps else None,
        gathers_once=keeps and (config.inter_node_gather == "step" or differences is not None),
        differences=differences,
        feedback=config.error_feedback if nodes > 1 else None,
        without_effect=tuple(_without_effect(config, nodes, devices, size)),
    )


def _collectives(
    config: ZeroConfig, hops: Hops, desk: Desk | None, alone_elements: int, *, on_cpu: bool
) -> Collectives:
    # On a mesh of CPUs the kernels are not traced beside the reference, which halves the tracing.
    backend: Backend | None = "xla" if on_cpu else None
    gathers = Gathers(
        hops=hops,
        compute_dtype=jnp.dtype(config.compute_dtype),
        wire_dtype=jnp.dtype(config.gather_dtype or config.compute_dtype),
        backend=backend,
        secondary_on_host=config.offload.secondary == "host",
        desk=desk,
        alone_elements=alone_elements,
    )
    reduces = Reduces(
        hops=hops,
        dtype=jnp.dtype(config.reduce_dtype or "float32"),
        stops_at_node=hops.nodes > 1 and _reduces_once(config),
        backend=backend,
        alone_elements=alone_elements,
    )
    return Collectives(
        gathers=gathers,
        reduces=reduces,
        ties_by_data=on_cpu,
        # XLA's CPU backend makes one collective after the other.
        exchanges_across_turns=not on_cpu,
    )


def _reduces_once(config: ZeroConfig) -> bool:
    """Return whether gradients cross nodes after the last micro-batch.

    The only micro-batch of a step sends its gradients unit by unit, while backward goes on, unless
    errors are kept: these belong to the step.
    """
    waits = config.num_micro_batches > 1 or config.error_feedback is not None
    return config.inter_node_reduce == "step" and waits


def _hpz_size(config: ZeroConfig, nodes: int, devices: int) -> int:
    """Return the option `hpz_size` as a number of devices.

    Raises:
      ValueError: it fits neither a node nor whole nodes.
    """
    size = devices if config.hpz_size == "node" else int(config.hpz_size)
    if devices % size and (size % devices or (nodes * devices) % size):
        raise ValueError(
            f"hpz_size={size} on a mesh of node={nodes}, device={devices}: a secondary group is a "
            f"divisor of a node's {devices} devices, or whole nodes that divide the {nodes}; use "
            f'one of {_sizes(nodes, devices)}, or "node"'
        )
    return size


def _keeps_secondary(size: int, nodes: int, devices: int) -> bool:
    """Return whether a secondary shard is neither the shard itself nor the whole leaf."""
    return 1 < size < nodes * devices


def _without_effect(
    config: ZeroConfig, nodes: int, devices: int, size: int
) -> Iterator[tuple[str, str]]:
    """Yield each option that changes nothing on this mesh, and why: (name, why)."""
    if config.hpz_size != 1 and not _keeps_secondary(size, nodes, devices):
        why = "one node: backward gathers inside it anyway" if size > 1 else "one device per node"
        if size > 1 and nodes > 1:
            why = "a group of all devices: a shard is its own secondary shard"
        for name, default in (
            ("hpz_size", 1),
            ("inter_node_gather", "microbatch"),
            ("secondary", "compute"),
        ):
            if getattr(config, name) != default:
                yield name, why
        if config.weight_differences is not None:
            yield "weight_differences", why
        if config.offload.secondary != "none":
            yield "offload.secondary", why
    elif config.secondary == "wire" and config.hpz_size == 1:
        yield "secondary", "hpz_size=1 keeps no secondary shard"
    elif config.secondary == "wire" and config.weight_wire is None:
        yield "secondary", "without weight_wire a secondary shard travels as it is kept"
    if nodes == 1:
        for name in ("inter_node_reduce", "inter_node_gradient_wire", "error_feedback"):
            if getattr(config, name) not in (None, "microbatch"):
                yield name, "there is no hop over `node`"
    if devices == 1 and config.gradient_wire and config.inter_node_gradient_wire:
        yield "gradient_wire", "there is no hop over `device`"


def _sizes(nodes: int, devices: int) -> list[int]:
    """Return the sizes that a secondary group can have."""
    inside = [size for size in range(1, devices + 1) if devices % size == 0]
    return inside + [devices * k for k in range(2, nodes + 1) if nodes % k == 0]
