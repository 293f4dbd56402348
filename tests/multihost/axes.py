"""A sequence split over two processes: each reads the rows, and places its own part of them.

    python axes.py WAY ...

Run by both processes of a launch with two devices each; every one prints what it has found. It
trains with batches that are made in each of the ways, "placed" and "by rows".
"""

import sys

import jax
import numpy as np

NUM_STEPS, ROWS = 2, 4


def train(mesh, place):
    """Take some steps; return their losses and that of an evaluation.

    Args:
      mesh: the mesh.
      place: (step, rows, whether to train) -> a batch.
    """
    import optax
    from tools.axis_models import Series, series

    import zeroxla

    step = zeroxla.make_step(Series(), mesh, optax.sgd(0.1))
    rows = [series(ROWS, seed) for seed in range(NUM_STEPS)]
    state, losses = step.init(jax.random.key(0), place(step, rows[0], True)), []
    for each in rows:
        state, metrics = step(state, place(step, each, True))
        losses.append(float(metrics["loss"]))
    losses.append(float(step.eval(state, place(step, rows[0], False))["loss"]))
    return losses


def placed(step, rows, train):
    return step.place(rows, train=train)


def by_rows(step, rows, train):
    import zeroxla

    return zeroxla.global_batch(rows, step.mesh)


WAYS = {"placed": placed, "by rows": by_rows}


def main(ways):
    import zeroxla

    zeroxla.initialize()
    from tools.axis_models import Series, series

    mesh = zeroxla.make_mesh(context=4)
    print("part", zeroxla.process_shard(mesh), dict(mesh.shape), flush=True)
    other = zeroxla.make_mesh(nodes=1, context=4)
    try:
        zeroxla.make_step(Series(), other).place(series(ROWS, jax.process_index()))
    except ValueError as error:
        print("other rows:", str(error), flush=True)
    batch = zeroxla.make_step(Series(), mesh).place(series(ROWS))
    held = {tuple(shard.data.shape) for shard in batch["x"].addressable_shards}
    print("shards:", sorted(held), flush=True)
    starts = [shard.index[1].start or 0 for shard in batch["x"].addressable_shards]
    print("starts:", sorted(starts), flush=True)
    same = all(
        np.array_equal(shard.data, series(ROWS)[name][shard.index])
        for name, x in batch.items()
        for shard in x.addressable_shards
    )
    print("same:", same, flush=True)
    for way in ways:
        print(f"{way}:", train(mesh, WAYS[way]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
