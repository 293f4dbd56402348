"""The rows, and what a host should send in a step of each.

In units of M, the bytes of the parameters in float32. The ranks form a ring in their order: of its
WORLD edges one leads out of each host. In a ring all-gather, or reduce-scatter, of M each edge
carries M less the share of one rank. An all-reduce is both. Gloo has no reduce-scatter: it makes an
all-reduce of it, and lets go of what was not asked for.
"""

from __future__ import annotations

import dataclasses

from peers import task

FLAT = 1 - 1 / task.WORLD
"""A gather, or a reduce-scatter, of M over all ranks: 3/4 M."""

BETWEEN = 1 - 1 / task.HOSTS
"""One between hosts only, each rank of a host with its share of M: 1/2 M."""

INT8, INT4 = 1 / 4, 1 / 8
"""Of float32. The blocks' own steps add 2 % at 4 bit, and less than 0.1 % at 8."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A way of training.

    Attributes:
      name: in orders.
      label: in tables.
      engine: of worker.py.
      description: in a line.
      sharded: no rank keeps the whole state.
      ideal: what a host sends in a step, if no collective moves more than it must.
      over_gloo: the same with Gloo's reduce-scatter.
    """

    name: str
    label: str
    engine: str
    description: str
    ideal: float
    over_gloo: float
    sharded: bool = True

    @property
    def ideal_bytes(self) -> float:
        return self.ideal * 4 * task.num_parameters()

    @property
    def over_gloo_bytes(self) -> float:
        return self.over_gloo * 4 * task.num_parameters()


ROWS = {
    row.name: row
    for row in (
        Row(
            name="alone",
            label="PyTorch, nothing sent",
            sharded=False,
            engine="torch",
            description="each rank trains its own copy, without communication",
            ideal=0,
            over_gloo=0,
        ),
        Row(
            name="ddp",
            label="PyTorch DDP",
            sharded=False,
            engine="torch",
            description="DistributedDataParallel: nothing is sharded",
            ideal=2 * FLAT,  # all-reduce of the gradients
            over_gloo=2 * FLAT,
        ),
        Row(
            name="fsdp2",
            label="PyTorch FSDP2",
            engine="torch",
            description="fully_shard over all ranks",
            ideal=2 * FLAT + FLAT,  # gathers in forward and backward, reduce-scatter
            over_gloo=2 * FLAT + 2 * FLAT,
        ),
        Row(
            name="hsdp",
            label="PyTorch HSDP",
            engine="torch",
            description="fully_shard inside a host, a replica on each host",
            # Gathers and the reduce-scatter stay in the host; then an all-reduce of the shares.
            ideal=2 * BETWEEN,
            over_gloo=2 * BETWEEN,
        ),
        Row(
            name="zero3",
            label="DeepSpeed ZeRO-3",
            engine="zero3",
            description="DeepSpeed ZeRO-3",
            ideal=2 * FLAT + FLAT,  # as fsdp2
            over_gloo=2 * FLAT + 2 * FLAT,
        ),
        Row(
            name="zero3_hpz",
            label="DeepSpeed ZeRO-3, hpZ",
            engine="zero3_hpz",
            description="DeepSpeed ZeRO-3 with hpZ",
            ideal=FLAT + FLAT,  # the gather in backward stays in the host
            over_gloo=FLAT + 2 * FLAT,
        ),
        Row(
            name="zeropp",
            label="DeepSpeed ZeRO++",
            engine="zeropp",
            description="DeepSpeed ZeRO++ (qwZ, hpZ, qgZ), a stand-in for its quantizer",
            # Gather in int8 in forward; gradients summed inside the host, then all-to-all in int4
            # between hosts, each rank with its share. Biases and norms, reduced in float32, and
            # what Gloo adds to each of some 180 small collectives make it 0.7 MB more.
            ideal=FLAT * INT8 + BETWEEN * INT4,
            over_gloo=FLAT * INT8 + BETWEEN * INT4,
        ),
    )
}
"""By name, in the order of tables. Each sends in every step."""

DILOCO = Row(
    name="diloco",
    label="PyTorch DiLoCo",
    engine="torch",
    description="DDP inside each host, between hosts an all-reduce of what they have changed",
    sharded=False,
    ideal=2 * BETWEEN / task.EVERY,  # each rank of a host all-reduces its share
    over_gloo=2 * BETWEEN / task.EVERY,
)
"""Sends once in task.EVERY steps."""

ALL_ROWS = {**ROWS, DILOCO.name: DILOCO}
