"""A script that saves, and closes nothing, as most scripts do.

python ends.py HOW FOLDER [failing]
"""

import sys
import time

import jax
import optax

import zeroxla
from zeroxla.checkpoint import orbax_handler
from zeroxla.checkpoint.about import About
from zeroxla.models import MLP


def main(how, folder, failing):
    zeroxla.simulate(2)
    zeroxla.initialize()
    write_sums, write = orbax_handler.write_sums, About.write

    def slowly(*arguments):
        """Write for longer than a process that failed waits for its threads."""
        time.sleep(3.5)
        write_sums(*arguments)

    def fail(about, path):
        if about.number == 2:
            raise OSError("no space")
        write(about, path)

    step = zeroxla.make_step(MLP.tiny(), zeroxla.make_mesh(), optax.sgd(0.1))
    batch = {
        "image": jax.ShapeDtypeStruct((8, 28, 28), "float32"),
        "label": jax.ShapeDtypeStruct((8,), "int32"),
    }
    state = step.init(jax.random.key(0), batch)
    checkpointer, other = (zeroxla.Checkpointer(f"{folder}/{name}") for name in "ab")
    checkpointer.save(1, state)
    other.save(1, state)
    checkpointer.wait()
    if failing:
        About.write = fail
    else:
        orbax_handler.write_sums = slowly
    checkpointer.save(2, state)
    del checkpointer  # as where a function returns that made it
    if how == "raise" and jax.process_index() == jax.process_count() - 1:
        raise RuntimeError("my mistake")
    if how == "exit":
        sys.exit(3)


main(sys.argv[1], sys.argv[2], "failing" in sys.argv)
