"""Optimizers that multiply whole matrices: a step whose matrices have owners, over plain jit FSDP.

Muon (optax.contrib.muon) on a GPT of 12 layers of width 128, and Shampoo on one of 8 layers of
width 64, unrolled and scanned, on 8 simulated devices as 2 nodes of 4. Both programs start from the
same state and take the same batches in turns, in one process. From compiled programs:

* FLOPs of the update that one device computes: products, and factorizations by the usual counts.
  They are shares of what plain jit computes on one device, without sharding. They are counted in
  the update compiled by itself, because XLA's CPU backend forgets the scopes of products. A loop
  that runs as often as its owner has matrices counts for each device that often.
* bytes that one device receives for the update in a step.

After 20 steps the losses and the parameters must agree. The time of a step is a ratio of medians
in one run.

    python benchmarks/owners.py [--steps 20]

Exits with 1 if a target is missed; writes results/owners.json and results/owners.md. Takes about
15 minutes on 2 cores, most of it compilation.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import LENGTH, NUM_DEVICES, Check, PlainFSDP, gpt, random_tokens, report, start, table
from jax.sharding import Mesh
from owners_flops import flops_by_device

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from tools.matrix_optimizers import shampoo

import zeroxla
from zeroxla.program.shapes import shapes_of

SCOPE = "update"


def dims_of(params: Any) -> Any:
    """Return Muon's dims: the layers of a scanned leaf are matrices of their own."""
    found = {2: optax.contrib.MuonDimensionNumbers(0, 1)}
    found[3] = optax.contrib.MuonDimensionNumbers(1, 2)

    def of_leaf(path: Any, x: Any) -> Any:
        # A scanned bias or scale is no matrix.
        is_matrix = re.search("kernel|embedding", jax.tree_util.keystr(path))
        return found.get(x.ndim) if is_matrix else None

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def scoped(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return an optimizer whose update is in a scope, for the baseline."""

    def update(*args: Any, **options: Any) -> Any:
        with jax.named_scope(SCOPE):
            return optimizer.update(*args, **options)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def muon() -> optax.GradientTransformation:
    return optax.contrib.muon(0.01, muon_weight_dimension_numbers=dims_of)


CASES = {
    "Muon, unrolled": (muon, {"scan": False, "layers": 12, "width": 128}),
    "Muon, scanned": (muon, {"scan": True, "layers": 12, "width": 128}),
    "Shampoo, unrolled": (lambda: shampoo(0.01), {"scan": False, "layers": 8, "width": 64}),
}


def alone(update: Any, args: Any) -> str:
    """Return the compiled program of an update alone, its arrays split as a step has them."""
    shardings = jax.tree.map(lambda x: getattr(x, "sharding", None), (args[0], args[1]))
    program = jax.jit(lambda *args: update(*args)[:2], out_shardings=shardings)
    return program.lower(*args).compile().as_text() or ""


def plain_update(optimizer: optax.GradientTransformation, args: Any) -> str:
    """Return the same of plain jit, for shapes of parameters, state and gradients."""

    def update(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return alone(update, args)


class Ours:
    """A zeroxla run: each call takes a step and returns the loss."""

    def __init__(self, step: zeroxla.step.step.Step, state: Any, batch: Any) -> None:
        self.step, self.batch = step, batch
        self.state = jax.tree.map(jnp.copy, state)

    def __call__(self) -> float:
        self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(metrics["loss"])

    def params(self) -> Any:
        return zeroxla.full_params(self.state)


class Plain:
    """A plain jit FSDP run from a copy of a state."""

    def __init__(self, fsdp: PlainFSDP, state: Any, batch: Any) -> None:
        self.fsdp, self.batch = fsdp, batch
        self._params, self._opt_state = fsdp.place(state)
        self._key = jax.device_put(state.key, fsdp.shapes[3].sharding)

    def __call__(self) -> float:
        rows = jax.tree.map(
            lambda x, like: jax.device_put(x, like.sharding), self.batch, self.fsdp.shapes[2]
        )
        self._params, self._opt_state, loss = self.fsdp.train(
            self._params, self._opt_state, rows, self._key
        )
        jax.block_until_ready(self._params)
        return float(loss)

    def params(self) -> Any:
        return jax.device_get(self._params)


def measure(name: str, mesh: Mesh, num_steps: int) -> dict[str, Any]:
    """Return the figures of one case."""
    make, shape = CASES[name]
    model, batch = gpt(**shape), random_tokens(2 * NUM_DEVICES)
    step = zeroxla.make_step(model, mesh, make())
    state = step.init(jax.random.key(0), batch)
    fsdp = PlainFSDP(model, mesh, scoped(make()), state, batch)
    programs = step.programs
    shapes = step.abstract_state(batch)
    owners = step.describe().owners
    args = shapes.params, shapes.opt_state, shapes.params
    scalars = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.float32)
    plan = programs.owned_update_of(shapes).plan(*args, *scalars)[2]
    assert plan is not None
    assert owners is not None
    compiled = step.lower(shapes, batch).compile()
    ours = flops_by_device(alone(programs.owned_update_of(shapes), (*args, *scalars)), plan)
    plain_text = fsdp.lower().compile().as_text() or ""
    params, opt_state = fsdp.shapes[:2]
    split = params, opt_state, params
    plain = flops_by_device(plain_update(make(), split), None)
    one_device = flops_by_device(plain_update(make(), shapes_of(split)), None)
    comms = zeroxla.inspect.comms(compiled, mesh, while_trips=1)
    received = sum(row.received_bytes for row in comms.rows if row.phase == "owners")
    by_xla = sum(
        row.received_bytes
        for row in zeroxla.inspect.comms(plain_text, mesh, while_trips=1).rows
        if row.phase == SCOPE
    )
    matrices = {
        v
        for t in plan.turns
        for turn in t
        for g in turn.groups
        for p in g.pieces
        for v in (*p.reads, *p.results)
        if v.aval.size >= NUM_DEVICES
    }
    shards = sum(v.aval.size * v.aval.dtype.itemsize for v in matrices) / NUM_DEVICES

    runs: dict[str, Any] = {"zeroxla": Ours(step, state, batch), "plain": Plain(fsdp, state, batch)}
    times: dict[str, list[float]] = {kind: [] for kind in runs}
    losses: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(num_steps):
        for kind, run in runs.items():
            begin = time.perf_counter()
            losses[kind].append(run())
            times[kind].append(time.perf_counter() - begin)
    first, second = (np.array(losses[kind]) for kind in runs)
    return {
        "flops": {
            **{"busiest": max(ours), "planned": owners.device_flops},
            **{"plain jit": max(plain), "one device": max(one_device)},
        },
        "flops_ratio": max(ours) / max(one_device),
        "plain_flops_ratio": max(plain) / max(one_device),
        "received_bytes": received,
        "plain_received_bytes": by_xla,
        "shard_bytes": shards,
        "bytes_ratio": received / (shards / 2),
        "loss_error": float(np.max(np.abs(first / second - 1))),
        "params_error": _distance(runs["zeroxla"].params(), runs["plain"].params()),
        "step_ratio": statistics.median(
            a / b for a, b in list(zip(*times.values(), strict=True))[2:]
        ),
        "times_s": times,
    }


def _distance(found: Any, expected: Any) -> float:
    """Return the relative distance of all parameters together."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True))
    apart = sum(float(np.sum(np.square(np.float64(a) - np.float64(b)))) for a, b in pairs)
    return math.sqrt(apart / sum(float(np.sum(np.square(np.float64(b)))) for _, b in pairs))


def main() -> int:
    parser = argparse.ArgumentParser(description="Updates whose matrices have owners.")
    parser.add_argument("--steps", type=int, default=20, help="steps of each program")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), help="cases")
    options = parser.parse_args()
    mesh = start()
    figures, lines, checks = {}, [], []
    for name in options.only:
        found = figures[name] = measure(name, mesh, options.steps)
        lines.append(
            [
                name,
                f"{8 * found['flops_ratio']:.2f}/8, {8 * found['plain_flops_ratio']:.2f}/8",
                f"{found['bytes_ratio']:.2f}",
                f"{found['plain_received_bytes'] / found['received_bytes']:.1f}x",
                f"{found['loss_error']:.1e}, {found['params_error']:.1e}",
                f"{found['step_ratio']:.2f}x",
            ]
        )
        limits = {
            "FLOPs of the update on the busiest device, over all": ("flops_ratio", 1.3 / 8),
            "bytes received, over the matrices' shards": ("bytes_ratio", 2.2),
            "relative error of a loss": ("loss_error", 1e-5),
            "relative error of the parameters": ("params_error", 1e-5),
            "step time over plain jit's": ("step_ratio", 1.0),
        }
        checks += [
            Check(name=f"{name}: {what}", value=found[key], limit=limit)
            for what, (key, limit) in limits.items()
        ]
    header = [
        *(
            "optimizer",
            "FLOPs of the update a device, with plain jit",
            "bytes received, of the shards",
        ),
        *("plain jit's bytes", "errors of losses and parameters", "step time, of plain jit's"),
    ]
    body = (
        "Muon trains a GPT of 12 layers of width 128, Shampoo one of 8 layers of width 64. Both "
        f"compute in float32 on 2 x {LENGTH} tokens a device; the {NUM_DEVICES} devices are "
        "simulated, as 2 nodes of 4.\n\n"
        "* FLOPs: the update on the busiest device, divided by the whole update under plain jit on "
        "one device. The second figure is the same for plain jit with shardings.\n"
        "* Bytes: what a device receives when arrays go to their owners and results come back. 2 "
        "is the size of all its shards of these arrays and results.\n"
        f"* Errors: relative to plain jit, after {options.steps} steps.\n"
        "* Times: each turn gives a ratio, and the median of these is shown. Only ratios carry "
        "over to other machines.\n\n"
        "FLOPs and bytes are read from compiled programs.\n\n"
        f"{table(header, lines)}"
    )
    return report("owners", "Owners of matrices", body, {"cases": figures}, checks)


if __name__ == "__main__":
    sys.exit(main())
