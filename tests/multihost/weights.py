"""Weights of several processes: read by all, written by the first.

    python weights.py HUB OUT

HUB is a Hugging Face folder; exports go to OUT. Run by every process of a launch.
"""

import contextlib
import sys
from pathlib import Path

from tools.disk import files_limited_to


class Counted:
    """A whole array that counts the elements that are read of it."""

    def __init__(self, x):
        self.x, self.shape, self.dtype, self.read = x, x.shape, x.dtype, 0

    def __getitem__(self, index):
        self.read += self.x[index].size
        return self.x[index]


def begin_from_whole_arrays(step, state):
    """Make the state again from its parameters, of each kind that several processes may give."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import zeroxla

    key, whole = jax.random.key(0), zeroxla.full_params(state)
    paths = jax.tree_util.tree_leaves_with_path(whole)
    by_name = {jax.tree_util.keystr(p, simple=True, separator="/"): x for p, x in paths}

    def read(name, shape):
        if jax.process_index() == 1 and name in broken:
            raise OSError("no such file")
        return by_name[name]

    broken = ()
    counted = jax.tree.map(Counted, whole)
    everywhere = NamedSharding(step.mesh, PartitionSpec())

    def replicated(x):
        return jax.make_array_from_callback(x.shape, everywhere, lambda index: x[index])

    kinds = {
        "NumPy": whole,
        "JAX": jax.tree.map(jnp.asarray, whole),
        "replicated": jax.tree.map(replicated, whole),
        "stored": state.params,
        "function": read,
        "counted": counted,
    }
    for given in kinds.values():
        params = step.init_from(given, key).params
        for x, y in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
            assert x.sharding == y.sharding
            for mine, other in zip(x.addressable_shards, y.addressable_shards, strict=True):
                np.testing.assert_array_equal(mine.data, other.data)
    split = [x for x in jax.tree.leaves(counted) if x.x.size > 1000]
    print(f"read: {max(x.read / x.x.size for x in split):.2f}", flush=True)
    broken = list(by_name)[2:]
    try:
        step.init_from(read, key)
    except (OSError, ValueError) as error:
        print(f"broken: {error}", flush=True)


def main(hub, out):
    import zeroxla

    zeroxla.initialize()
    import jax
    import numpy as np

    from zeroxla.checkpoint.weights.export import export_params
    from zeroxla.checkpoint.weights.pretrained import from_pretrained
    from zeroxla.models import from_hugging_face

    first = jax.process_index() == 0
    model = from_hugging_face(hub)
    step = zeroxla.make_step(model, zeroxla.make_mesh())
    step.abstract_state({"tokens": np.zeros((8, 9), np.int32)})
    state = from_pretrained(model, hub, step)
    begin_from_whole_arrays(step, state)
    # Of the others the folder does not count: it cannot even be made.
    folder = Path(out) / "good" if first else Path("/dev/null/nowhere")
    files = export_params(state, folder, model=model, max_shard_size="100KB")
    print(f"files: {len(files)}", flush=True)
    with files_limited_to(10_000) if first else contextlib.nullcontext():
        try:
            export_params(state, Path(out) / "bad", model=model)
        except ValueError as error:
            print(f"failure: {error}", flush=True)
    missing = hub if first else "/dev/null/nowhere"
    try:
        from_pretrained(model, missing, step)
    except ValueError as error:
        print(f"unread: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
