"""`TrainState`: everything that training keeps between steps."""

from __future__ import annotations

import dataclasses
from ast import literal_eval
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zeroxla.frontend.base import Containers
from zeroxla.frontend.complex_leaves import join_complex
from zeroxla.mesh.placement import Placement
from zeroxla.mesh.relayout import whole
from zeroxla.offload.disk.disk_array import DiskArray
from zeroxla.program.paths import Path
from zeroxla.wire.wire_state import WireState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LossScale:
    """Dynamic loss scale and the count of skipped steps.

    Attributes:
      scale: float32 scalar; 1 unless the model computes in float16.
      good_steps: int32, number of finite steps since the scale last changed; -1 if the scale is not
        in use.
      skipped: int32, number of steps whose update was dropped because a gradient was not finite.
    """

    scale: jax.Array
    good_steps: jax.Array
    skipped: jax.Array

    @staticmethod
    def create(scale: float | None) -> LossScale:
        """Return the scale before the first step. None means that losses are not scaled."""
        return LossScale(
            scale=jnp.float32(1.0 if scale is None else scale),
            good_steps=jnp.int32(-1 if scale is None else 0),
            skipped=jnp.zeros((), jnp.int32),
        )

    def entered(self, scale: float | None) -> LossScale:
        """Return what a step uses, if the state may come from a step of another dtype.

        A scale that was not in use starts from `scale`. None means that losses are not scaled.
        """
        start = dataclasses.replace(LossScale.create(scale), skipped=self.skipped)
        if scale is None:
            return start
        in_use = self.good_steps >= 0
        return jax.tree.map(lambda mine, new: jnp.where(in_use, mine, new), self, start)

    def after(self, finite: jax.Array, *, window: int | None) -> LossScale:
        """Return the scale for the next step: halved after a non-finite one, doubled after
        `window` finite ones, within [2^-14, 2^24]. With None it stays as it is."""
        skipped = self.skipped + jnp.where(finite, 0, 1)
        if window is None:
            return dataclasses.replace(self, skipped=skipped)
        good = jnp.where(finite, self.good_steps + 1, 0)
        grown = jnp.where(good >= window, self.scale * 2, self.scale)
        scale = jnp.clip(jnp.where(finite, grown, self.scale / 2), 2.0**-14, 2.0**24)
        good = jnp.where(good >= window, 0, good)
        return LossScale(scale=scale, good_steps=good, skipped=skipped)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """The training state: a pytree of global arrays on the mesh.

    Attributes:
      step: int32 scalar, number of completed steps, skipped ones included.
      params: the float32 master of each leaf, split according to its placement, padding included. A
        frozen leaf that is stored as a wire has its bytes here, uint8.
      opt_state: the optimizer's state, each array placed by its own shape.
      model_state: the model's other collections (batch statistics, ...), whole on every device.
      key: typed PRNG key from which every step derives its own.
      loss_scale: see `LossScale`.
      wire_state: kept copies and errors that wire formats need in the next step. None if they need
        none.
      placements: the placements of params and opt_state, in the order of their leaves (static).
      indices: the paths of names in params that are whole numbers or tuples in the model itself
        (static).
      containers: the lists and tuples in which the model has its parameters (static).
    """

    step: jax.Array
    params: Any
    opt_state: Any
    model_state: Any
    key: jax.Array
    loss_scale: LossScale
    wire_state: WireState | None = None
    placements: tuple[tuple[Placement, ...], tuple[Placement, ...]] = dataclasses.field(
        default=((), ()), metadata={"static": True}
    )
    indices: tuple[Path, ...] = dataclasses.field(default=(), metadata={"static": True})
    containers: Containers | None = dataclasses.field(default=None, metadata={"static": True})


def check_is_state(state: Any, *, whole: bool = False) -> None:
    """Check that `state` is a TrainState that holds arrays.

    Args:
      state: the state.
      whole: look at every array, and not at the first alone, which any step takes with the others.

    Raises:
      ValueError: it is something else, or an earlier step has taken its memory.
    """
    if not isinstance(state, TrainState):
        raise ValueError(
            f"the state is a {type(state).__name__}, not a TrainState; make it with step.init"
        )
    # Some releases of JAX crash on such arrays.
    looked_at = jax.tree.leaves(state) if whole else [state.step]
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in looked_at):
        raise ValueError(
            "the state was deleted by the step that it was given to, which took its memory; go on "
            "with the state that the step returned"
        )


def light(state: TrainState) -> TrainState:
    """Return a state without its optimizer state, for programs that do not need it."""
    return dataclasses.replace(state, opt_state=None)


def natural(stored: Any, placements: tuple[Placement, ...]) -> Any:
    """Return a pytree of stored arrays without their padding."""
    leaves, tree = jax.tree.flatten(stored)
    return tree.unflatten([p.natural(x) for p, x in zip(placements, leaves, strict=True)])


def stored(naturals: Any, placements: tuple[Placement, ...]) -> Any:
    """Return a pytree of natural arrays with the padding of their placements."""
    leaves, tree = jax.tree.flatten(naturals)
    return tree.unflatten([p.stored(x) for p, x in zip(placements, leaves, strict=True)])


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """Return the sharding of every array of a state (or of its shapes)."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    params, opt_state = (
        jax.tree.unflatten(jax.tree.structure(tree), [p.sharding(mesh) for p in placements])
        for tree, placements in zip((state.params, state.opt_state), state.placements, strict=True)
    )
    wires = state.wire_state
    if wires is not None:
        specs = wires.specs(state.placements[0])
        wires = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
    rest = dataclasses.replace(state, wire_state=None)
    shardings = jax.tree.map(lambda _: everywhere, rest)
    return dataclasses.replace(shardings, params=params, opt_state=opt_state, wire_state=wires)


def full_params(state: TrainState) -> Any:
    """Return the parameters whole, in natural shapes, as float32 NumPy arrays on this host. Complex
    parameters are complex64, wires of a frozen base uint8.

    They are nested dicts with the model's own keys, so that `{"params": full_params(state)}` are
    the variables of a linen module, and `nnx.update(module, full_params(state))` fills an nnx
    module: items of lists have whole numbers there. Those of a pair `(init, loss)` lie in the
    lists, tuples and dicts that `init` made, so that `loss` takes them.

    Cost: the model in host memory, once; leaves are assembled one at a time. In a run of several
    processes all must call this, and each holds the model. Every device then holds each leaf for a
    moment, and a host receives the parts that it lacks once (with several stages on a host, once
    for each).

    Raises:
      ValueError: it is no state, or a step has taken its memory.
    """
    check_is_state(state)
    leaves, tree = jax.tree.flatten(state.params)
    whole = tree.unflatten([host_leaf(x, p) for x, p in zip(leaves, state.placements[0])])
    return as_in_model(whole, state)


def as_in_model(tree: Any, state: TrainState) -> Any:
    """Return a tree like a state's parameters with the keys and containers of the model itself, and
    with its complex leaves.

    Args:
      tree: nested dicts with strings as keys.
      state: the state.
    """
    indices = state.indices

    def converted(part: Any, path: Path) -> Any:
        if not isinstance(part, dict):
            return part
        inner = {name: converted(x, (*path, name)) for name, x in part.items()}
        return {literal_eval(n) if (*path, n) in indices else n: x for n, x in inner.items()}

    tree = join_complex(tree)
    if state.containers is not None:
        return state.containers.filled(tree)
    return converted(tree, ()) if indices else tree


def host_leaf(x: jax.Array | DiskArray, placement: Placement) -> np.ndarray:
    """Return a leaf whole, in its natural shape, on this host; all processes must call this.

    Cost: the leaf in host memory, and a copy of one shard. JAX arrays cache the NumPy copies that
    are made from them. To avoid that, NumPy reads another array over the same buffer.
    """
    if isinstance(x, DiskArray):
        x = x.read().result()
    if not x.is_fully_addressable:
        return np.asarray(whole(x))[tuple(slice(n) for n in placement.shape)]
    natural = np.empty(placement.shape, x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            inside = [slice(*s.indices(n)) for s, n in zip(shard.index, natural.shape)]
            data = shard.data
            other = jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
            part = np.asarray(other)
            natural[tuple(inside)] = part[tuple(slice(s.stop - s.start) for s in inside)]
    return natural
