"""Our rows of two_hosts.py: presets of zeroxla, plain jit FSDP, and a step that sends nothing."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from common import PlainFSDP
from jax.sharding import Mesh, PartitionSpec
from peers import task

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.frontend import adapt
from zeroxla.inspect import comms
from zeroxla.models import GPT

OPTIMIZER = optax.adamw(task.LEARNING_RATE, weight_decay=task.WEIGHT_DECAY)
# Unrolled, as PyTorch's: each block is a unit.
MODEL = GPT(
    vocab=task.VOCAB,
    length=task.LENGTH,
    layers=task.LAYERS,
    width=task.WIDTH,
    heads=task.HEADS,
    scan=False,
)

StepFunction = Callable[[Any], float]
"""One step on a global batch, rows over all devices; returns the mean loss, of a host at least."""

ALONE = "nothing sent"
PLAIN = "plain jit FSDP"

# Every leaf is sharded, as FSDP2 and the peers' ZeRO-3 have it here.
ALL_SHARDED = {"persistence_threshold": 0}
_SIXTEEN_BIT = {"gather_dtype": "bfloat16", "reduce_dtype": "bfloat16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A way of training.

    Attributes:
      name: in orders and tables.
      description: in a line.
      config: of zeroxla's; None: not zeroxla.
      sharded: no device keeps the whole state.
      ideal: what a host must send in a step, in units of M, the bytes of the parameters in float32;
        None where it is the program's own figure.
    """

    name: str
    description: str
    config: ZeroConfig | None = None
    ideal: float | None = None
    sharded: bool = True


# A gather or a reduce-scatter sends half of M from each of two hosts.
ROWS = {
    row.name: row
    for row in (
        Row(
            name=ALONE,
            description="each device trains its own copy, without communication",
            ideal=0,
            sharded=False,
        ),
        Row(name=PLAIN, description="one jax.jit over sharded arrays"),
        Row(
            name="zero3",
            description="ZeroConfig.zero3()",
            config=ZeroConfig.zero3(**ALL_SHARDED),
            ideal=1.5,
        ),
        Row(
            name="zero3, hpZ",
            description="backward gathers inside the host",
            config=ZeroConfig.zero3(**ALL_SHARDED, hpz_size="node"),
            ideal=1.0,
        ),
        Row(
            name="zero3, 16 bit",
            description="all wires bfloat16",
            config=ZeroConfig.zero3(**ALL_SHARDED, **_SIXTEEN_BIT),
            ideal=0.75,
        ),
        Row(
            name="zeropp",
            description="ZeroConfig.zeropp(): 8-bit weights, hpZ, 4-bit gradients",
            config=ZeroConfig.zeropp(**ALL_SHARDED),
        ),
        Row(
            name="zeropp, small units",
            description="the same, a third of a block gathered and reduced at once",
            config=ZeroConfig.zeropp(**ALL_SHARDED, unit_elements=600_000),
        ),
        Row(
            name="zeropp_hq",
            description="ZeroConfig.zeropp_hq(): gradients in 8 bit inside, rotated 4 between",
            config=ZeroConfig.zeropp_hq(**ALL_SHARDED),
        ),
        Row(
            name="zeropp_min",
            description="ZeroConfig.zeropp_min(): weights as 4-bit differences besides",
            config=ZeroConfig.zeropp_min(**ALL_SHARDED),
        ),
    )
}


def program_bytes(name: str, mesh: Mesh) -> float:
    """Return what the program of a row sends from one host to the other in a step.

    Args:
      name: of the row.
      mesh: any of the same shape; simulated devices will do.
    """
    rows = task.WORLD * task.SEQUENCES
    batch = {"tokens": jax.ShapeDtypeStruct((rows, task.LENGTH + 1), jnp.int32)}
    config = ROWS[name].config
    if name == ALONE:
        return 0.0
    step = _make_step(config, mesh)
    state = step.abstract_state(batch)
    if config is None:  # its collectives are the compiler's
        program = PlainFSDP(MODEL, mesh, OPTIMIZER, state, batch).lower().compile()
    else:
        program = step.lower(state, batch)
    return comms(program, mesh).cross_host_bytes()


def make_step(name: str, mesh: Mesh, batch: Any) -> StepFunction:
    """Return the step function of a row; it holds the model and the optimizer."""
    if name == ALONE:
        return _Alone(mesh)
    config = ROWS[name].config
    step = _make_step(config, mesh)
    state = step.init(jax.random.key(0), batch)
    return Ours(step, state) if config else _Plain(mesh, state, batch)


def _make_step(config: ZeroConfig | None, mesh: Mesh) -> zeroxla.Step:
    return zeroxla.make_step(
        MODEL, mesh, OPTIMIZER, config=config or ZeroConfig.zero3(**ALL_SHARDED)
    )


class Ours:
    def __init__(self, step: zeroxla.Step, state: zeroxla.TrainState) -> None:
        self._step, self._state = step, state

    def __call__(self, batch: Any) -> float:
        self._state, metrics = self._step(self._state, batch)
        jax.block_until_ready(self._state)
        return float(metrics["loss"])


class _Plain:
    def __init__(self, mesh: Mesh, state: zeroxla.TrainState, batch: Any) -> None:
        fsdp = PlainFSDP(MODEL, mesh, OPTIMIZER, state, batch)
        self._train, self._key = fsdp.train, state.key
        self._params, self._opt_state = fsdp.place(state)

    def __call__(self, batch: Any) -> float:
        trained = self._train(self._params, self._opt_state, batch, self._key)
        self._params, self._opt_state, loss = jax.block_until_ready(trained)
        return float(loss)


class _Alone:
    def __init__(self, mesh: Mesh) -> None:
        adapted = adapt(MODEL)
        # The copies of all devices lie one behind the other, along the first dim.
        every = PartitionSpec(("node", "device"))

        def init(batch: Any) -> Any:
            params, _ = adapted.init(jax.random.key(0), batch)
            return jax.tree.map(jnp.atleast_1d, (params, OPTIMIZER.init(params)))

        def train(state: Any, batch: Any) -> Any:
            # Only the optimizer's count is a scalar.
            params, opt_state = jax.tree.map(lambda x: x[0] if x.shape == (1,) else x, state)

            def loss(params: Any) -> jax.Array:
                return adapted.loss(params, {}, batch, jax.random.key(0), train=True)[0]

            value, grads = jax.value_and_grad(loss)(params)
            updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
            state = (optax.apply_updates(params, updates), opt_state)
            return jax.tree.map(jnp.atleast_1d, state), value[None]

        def over_devices(fun: Any, ins: Any, outs: Any, **options: Any) -> Any:
            mapped = jax.shard_map(fun, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
            return jax.jit(mapped, **options)

        self._init = over_devices(init, every, every)
        self._train = over_devices(train, every, every, donate_argnums=0)
        self._state: Any = None

    def __call__(self, batch: Any) -> float:
        if self._state is None:
            self._state = self._init(batch)
        self._state, losses = jax.block_until_ready(self._train(self._state, batch))
        return statistics.fmean(float(s.data[0]) for s in losses.addressable_shards)
