"""Checkpoints of several processes: each save and restore prints a line that the test reads.

    python checkpoints.py FOLDER FULL

FOLDER holds a checkpoint of step 3. FULL is the folder in which one process after the other
cannot write. Run by every process of a launch.
"""

import contextlib
import sys
import time

from tools.disk import files_limited_to


def main(folder, full):
    import zeroxla

    zeroxla.initialize()
    import jax
    from tools.checkpoints import NET, OPTIONS, batch_of, optax

    mesh = zeroxla.make_mesh()
    index, count = zeroxla.process_shard(mesh)
    config = zeroxla.ZeroConfig(**OPTIONS)
    step = zeroxla.make_step(NET, mesh, optax.adam(1e-2), config=config)

    def batch(i):
        rows = {name: jax.numpy.split(x, count)[index] for name, x in batch_of(i).items()}
        return zeroxla.global_batch({name: jax.device_get(x) for name, x in rows.items()}, mesh)

    step.abstract_state(batch(0))
    with zeroxla.Checkpointer(folder) as checkpointer:
        restored = checkpointer.restore(step)
        state = restored.state
        checkpointer.save(4, state)  # as it was read
        for i in range(restored.number, restored.number + 2):
            state, metrics = step(state, batch(i))
            print(f"loss {i}: {float(metrics['loss'])!r}", flush=True)
        checkpointer.save(5, state, {"next": 5})

    with zeroxla.Checkpointer(full, report=lambda text: print("said:", text)) as checkpointer:
        for number in (0, 1):
            # Files of one process alone, though all are in one folder.
            alone = jax.process_index() == number
            begin = time.monotonic()
            with files_limited_to(0) if alone else contextlib.nullcontext():
                try:
                    checkpointer.save(number + 1, state)
                    checkpointer.wait()
                    print(f"failure of {number}: none", flush=True)
                except zeroxla.SaveError as error:
                    print(f"failure of {number}: {error}", flush=True)
            assert time.monotonic() - begin < 20
        checkpointer.save(3, state)
        checkpointer.wait()
        print(f"numbers: {checkpointer.numbers()}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
