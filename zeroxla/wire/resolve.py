"""What the options make of a mesh: which hops there are, and how each leaf travels."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import Mesh

from zeroxla.config.feedback import Feedback
from zeroxla.config.wire_format import WireFormat
from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import DEVICE, NODE, platform_of
from zeroxla.offload.disk.desk import Desk
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.leaves import Leaf
from zeroxla.wire.routes import Route

# Folded into the keys of roundings, which must not be those of dropout.
_ROUNDINGS = 0x77697265


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wiring:
    """The options of wires, after those without effect on the mesh are gone.

    Attributes:
      collectives: of the mesh.
      weights: format of gathers.
      gradients: formats of the hops over `device` and `node`.
      secondary: form of a quantized leaf's secondary shard; None if none is kept.
      gathers_once: leaves make the outer hops once in a step.
      differences: format of weight differences.
      feedback: error feedback of the hop over `node`.
      without_effect: options that change nothing on this mesh: (name, why).
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
        """Return this device's key of a step's roundings; None if none is stochastic. Inside
        `shard_map`."""
        if not self.is_stochastic:
            return None
        return jax.random.fold_in(jax.random.fold_in(key, self.collectives.rank()), _ROUNDINGS)

    def route(self, leaf: Leaf) -> Route:
        """Return how a leaf travels."""
        if not leaf.quantized:
            secondary = "wire" if self.secondary else None
            return Route(placement=leaf.placement, secondary=secondary, is_wire=leaf.is_wire)
        as_wire = self.weights is None or self.secondary == "wire"
        return Route(
            placement=leaf.placement,
            weights=self.weights,
            gradients=self.gradients,
            values=self.weights if self.differences else None,
            secondary=("wire" if as_wire else "values") if self.secondary else None,
        )

    def secondary_bytes(self, leaf: Leaf) -> int:
        """Return the bytes of a leaf's secondary shard on one device; 0 if none is kept."""
        if self.secondary is None or not leaf.fetched:
            return 0
        route = self.route(leaf)
        if self.differences is not None and leaf.quantized:
            route = dataclasses.replace(route, secondary="values")
        return self.collectives.gathers.secondary_bytes(route)

    def gradient_bytes(self, leaf: Leaf) -> int:
        """Return the bytes of the float32 gradient of a leaf that one device adds up."""
        if leaf.frozen:
            return 0
        if not leaf.fetched:
            return 4 * leaf.elements
        return 4 * math.prod(self.collectives.reduces.result_shape(leaf.placement))


def make_wiring(config: ZeroConfig, mesh: Mesh, desk: Desk | None = None) -> Wiring:
    """Resolve the options of wires on a mesh.

    Args:
      config: the options.
      mesh: of all devices.
      desk: that reads shards on disk.

    Raises:
      ValueError: hpz_size fits neither a node nor whole nodes.
    """
    nodes, devices = mesh.shape[NODE], mesh.shape[DEVICE]
    size = devices if config.hpz_size == "node" else config.hpz_size
    if devices % size and (size % devices or (nodes * devices) % size):
        raise ValueError(
            f"hpz_size={size} on a mesh of node={nodes}, device={devices}: a secondary group is a "
            f"divisor of a node's {devices} devices, or whole nodes that divide the {nodes}; use "
            f'one of {_sizes(nodes, devices)}, or "node"'
        )
    keeps = 1 < size < nodes * devices
    wired = (config.gradient_wire, config.inter_node_gradient_wire or config.gradient_wire)
    none: list[tuple[str, str]] = []
    if config.hpz_size != 1 and not keeps:
        why = "one node: backward gathers inside it anyway" if size > 1 else "one device per node"
        if size > 1 and nodes > 1:
            why = "a group of all devices: a shard is its own secondary shard"
        for name, default in (("hpz_size", 1), ("inter_node_gather", "microbatch")):
            if getattr(config, name) != default:
                none.append((name, why))
        if config.weight_differences is not None:
            none.append(("weight_differences", why))
        if config.offload.secondary != "none":
            none.append(("offload.secondary", why))
    if nodes == 1:
        for name in ("inter_node_reduce", "inter_node_gradient_wire", "error_feedback"):
            if getattr(config, name) not in (None, "microbatch"):
                none.append((name, "there is no hop over `node`"))
    if devices == 1 and config.gradient_wire and config.inter_node_gradient_wire:
        none.append(("gradient_wire", "there is no hop over `device`"))
    differences = config.weight_differences if keeps else None
    on_cpu = platform_of(mesh) == "cpu"
    return Wiring(
        collectives=Collectives.make(
            nodes=nodes,
            devices=devices,
            compute_dtype=config.compute_dtype,
            wire_dtype=config.gather_dtype or config.compute_dtype,
            reduce_dtype=config.reduce_dtype or "float32",
            hpz_size=size if keeps else devices,
            stops_at_node=config.inter_node_reduce == "step" and nodes > 1,
            # On a mesh of CPUs no kernel need be traced beside the reference: half the time.
            backend="xla" if on_cpu else None,
            firm_ties=on_cpu,
            secondary_on_host=config.offload.secondary == "host",
            desk=desk,
        ),
        weights=config.weight_wire,
        gradients=wired,
        secondary=config.secondary if keeps else None,
        gathers_once=keeps and (config.inter_node_gather == "step" or differences is not None),
        differences=differences,
        feedback=config.error_feedback if nodes > 1 else None,
        without_effect=tuple(none),
    )


def _sizes(nodes: int, devices: int) -> list[int]:
    """Return the sizes that a secondary group can have."""
    inside = [size for size in range(1, devices + 1) if devices % size == 0]
    return inside + [devices * k for k in range(2, nodes + 1) if nodes % k == 0]
