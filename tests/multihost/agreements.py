"""Cases in which processes do not agree: each prints the error that it gets, as "case: error".

    python agreements.py CASE ...

Run by every process of a launch.
"""

import os
import signal
import sys

import numpy as np


def first_fails(error):
    """Process 0 alone does something, and cannot."""
    from zeroxla.mesh.processes.exchange import on_first

    def action():
        raise error

    on_first("folder", action)


def others_say_more():
    import jax

    from zeroxla.mesh.processes.exchange import agree

    agree("text", {"x": "1"} if jax.process_index() == 0 else {"x": "1", "y": "2"}, "mend it")


def train(batch=None, *, rate=0.1, accumulate=1):
    """Make a train step and take the first step."""
    import jax
    import optax

    import zeroxla
    from zeroxla.models import GPT

    mesh = zeroxla.make_mesh()
    index, count = zeroxla.process_shard(mesh)
    tokens = np.zeros((4, 9), np.int32)
    config = zeroxla.ZeroConfig.zero3(accumulate=accumulate)
    step = zeroxla.make_step(GPT.tiny(width=16), mesh, optax.sgd(rate), config=config)
    whole = zeroxla.global_batch({"tokens": np.split(tokens, count)[index]}, mesh)
    state = step.init(jax.random.key(0), whole)
    step(state, whole if batch is None else batch)


def train_stages(*, seed=0, schedule="1f1b"):
    """Take the first step of a pipeline, of which each process is a stage."""
    import jax
    import optax

    import zeroxla
    from zeroxla.models import GPT

    mesh = zeroxla.make_mesh(pipe=2)
    pipeline = zeroxla.Pipeline.from_model(GPT.tiny(width=16), schedule=schedule)
    step = zeroxla.make_step(pipeline, mesh, optax.sgd(0.1), microbatches=2)
    tokens = np.random.default_rng(seed).integers(0, 64, (4, 9), dtype=np.int32)
    batch = zeroxla.global_batch({"tokens": tokens}, mesh)
    step(step.init(jax.random.key(0), batch), batch)


def stops_answering():
    """Process 1 is stopped while process 0 waits for it."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_index() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    multihost_utils.sync_global_devices("never")


def by_process(*values):
    import jax

    return values[jax.process_index()]


CASES = {
    "first cannot": lambda: first_fails(OSError("no space")),
    "first refuses": lambda: first_fails(ValueError("no such run")),
    "others say more": others_say_more,
    "own batch": lambda: train({"tokens": np.zeros((4, 9), np.int32)}),
    "another optimizer": lambda: train(rate=by_process(0.1, 0.2)),
    "another config": lambda: train(accumulate=by_process(1, 2)),
    "other rows": lambda: train_stages(seed=by_process(0, 1)),
    "another schedule": lambda: train_stages(schedule=by_process("1f1b", "gpipe")),
    "stops answering": stops_answering,
}


def main(names):
    import zeroxla

    zeroxla.initialize()
    for name in names:
        try:
            CASES[name]()
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error}".replace("\n", " | "), flush=True)
        else:
            print(f"{name}: nothing", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
