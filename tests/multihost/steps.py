"""A short training, the same in one process and in several.

    python steps.py FOLDER CONFIG ...

Run by every process of a launch; the first one writes FOLDER/CONFIG.npz, with what `train` returns.
"""

import sys
from pathlib import Path

import numpy as np

ROWS, LENGTH, NUM_STEPS = 16, 32, 3
CONFIGS = {
    "zero3": {"persistence_threshold": 1000},
    "zeropp_min": {"persistence_threshold": 1000, "accumulate": 2},
}


def tokens(step):
    generator = np.random.default_rng(step)
    return generator.integers(0, 64, (ROWS, LENGTH + 1), dtype=np.int32)


def train(mesh, name):
    """Take some steps; return their losses, the validation loss at the end, and the parameters."""
    import jax
    import optax

    import zeroxla
    from zeroxla.models import GPT

    index, count = zeroxla.process_shard(mesh)

    def batch(step):
        return zeroxla.global_batch({"tokens": np.split(tokens(step), count)[index]}, mesh)

    config = getattr(zeroxla.ZeroConfig, name)(**CONFIGS[name])
    step = zeroxla.make_step(GPT.tiny(width=64), mesh, optax.sgd(0.1), config=config)
    state = step.init(jax.random.key(0), batch(0))
    losses = []
    for i in range(NUM_STEPS):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    losses.append(float(step.eval(state, batch(NUM_STEPS))["loss"]))
    params = jax.tree_util.tree_leaves_with_path(zeroxla.full_params(state))
    return {"losses": losses, **{jax.tree_util.keystr(path): x for path, x in params}}


def main(folder, names):
    import zeroxla

    zeroxla.initialize()
    import jax

    mesh = zeroxla.make_mesh()
    print("nodes", [[d.process_index for d in node] for node in mesh.devices], flush=True)
    for name in names:
        found = train(mesh, name)
        if jax.process_index() == 0:
            np.savez(Path(folder) / f"{name}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
