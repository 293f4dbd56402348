"""Processes of which one ends in a given way, while the others sleep or wait for it.

    python endings.py HOW RANK

Run by every process of a launch. Each says at which second process RANK ended.
"""

import atexit
import os
import sys
import time


def fail():
    raise ValueError("my mistake")


def fail_with_a_thread_that_waits():
    """Python waits for this thread before it calls what is registered with atexit."""
    import threading

    threading.Thread(target=time.sleep, args=(600,)).start()
    fail()


HOW = {
    "raises": fail,
    "raises beside a thread": fail_with_a_thread_that_waits,
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(5)": lambda: sys.exit(5),
    "os._exit(7)": lambda: os._exit(7),
}


def main(how, rank):
    import zeroxla

    zeroxla.initialize()
    import jax
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices("all are here")
    if how == "in turn":  # a caught exit does not count, and nobody is in a hurry
        try:
            sys.exit(3)
        except SystemExit:
            time.sleep(2 * jax.process_index())
        atexit.register(print, "the end: in order", flush=True)
        return
    if jax.process_index() == rank:
        print(f"at: {time.time()}", flush=True)
        HOW[how]()
    time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
