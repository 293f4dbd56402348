"""An island of two processes.

    python islands.py ROUNDS SLOT FOLDER

Run by every process of a launch; the coordinator is in the environment. It trains until round
ROUNDS was closed and four rounds with another island were, and prints what it has.
"""

import sys
import time
from pathlib import Path

import numpy as np

MOST_STEPS = 3000


def outer():
    import zeroxla

    return zeroxla.Outer(
        every=2, fragments=2, delay=1, wire=zeroxla.WireFormat(bits=4, block=64, hadamard=32)
    )


def main():
    num_rounds, slot, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    import jax
    import optax

    import zeroxla
    from zeroxla.step.islands.local_rows import local_rows

    zeroxla.initialize()
    from tools.islands import KEY, MODEL, batches, part  # It starts JAX.

    mesh = zeroxla.make_mesh(nodes=2)
    config = zeroxla.ZeroConfig(outer=outer(), persistence_threshold=0)
    step = zeroxla.make_step(MODEL, mesh, optax.adam(1e-2), config=config)
    index, count = zeroxla.process_shard(mesh)

    def own(batch):
        return zeroxla.global_batch(part(part(batch, slot, 2), index, count), mesh)

    rows, seen, together = batches(8), {}, 0
    with zeroxla.Island(step, slot=slot) as island:
        state = island.init(KEY, own(rows[0]))
        first, done = state.round, 0
        while done < MOST_STEPS and (min(state.versions) < num_rounds or together < 4):
            time.sleep(0.05)
            state, metrics = island(state, own(rows[done % 8]))
            done += 1
            together += metrics.get("outer_islands", 0) == 2
            for p, (fragment, version) in enumerate(zip(state.outer, state.versions, strict=True)):
                seen[f"{p}/{version}"] = local_rows(fragment.copy)
        time.sleep(1)
    np.savez(folder / f"{slot}.{jax.process_index()}.npz", **seen)
    print(f"first: {first}", flush=True)
    print(f"together: {together}", flush=True)
    whole = zeroxla.full_params(state.inner)
    print(f"finite: {all(np.isfinite(x).all() for x in jax.tree.leaves(whole))}", flush=True)
    print(f"loss: {float(metrics['loss']):.4f}", flush=True)


if __name__ == "__main__":
    main()
