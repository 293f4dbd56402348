"""State on the disks of several processes: each prints lines that the test reads.

    python disks.py FOLDER PARAMS STATE

Run by every process of a launch. FOLDER gets a checkpoint and, in its folder STATE, the file of the
state, where "{}" stands for the process's number; PARAMS says where the parameters are.
"""

import sys
from pathlib import Path


def main(folder, params, where):
    import zeroxla

    zeroxla.initialize()
    import jax
    from tools.disk import flip, state_file
    from tools.offload import batch, make_step

    mesh = zeroxla.make_mesh()
    index, count = zeroxla.process_shard(mesh)
    whole = batch()
    rows = {name: x.reshape(count, -1, *x.shape[1:])[index] for name, x in whole.items()}
    rows = zeroxla.global_batch(rows, mesh)
    path = Path(folder) / where.format(index)
    place = zeroxla.Offload(optimizer="disk", params=params, path=path, sub_group=1000)
    step = make_step(mesh, place)
    state = step.init(jax.random.key(0), rows)
    losses = []
    checkpoints = Path(folder) / "checkpoints"
    with zeroxla.Checkpointer(checkpoints, asynchronous=params == "none") as checkpointer:
        for i in range(4):
            state, metrics = step(state, rows)
            losses.append(float(metrics["loss"]))
            if i == 1:
                checkpointer.save(2, state)
        state = checkpointer.restore(step).state
        for _ in range(2):
            state, metrics = step(state, rows)
            losses.append(float(metrics["loss"]))
        checkpointer.save(4, state)
    print(f"losses: {losses}", flush=True)

    file = state_file(state)
    print(f"file: {file.path.name}", flush=True)
    if index == 1:
        flip(file.path, file.offset_of(file.names[0], file.version))
    try:
        step(state, rows)
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
