"""Versions of a state file whose every byte is known from the version's number."""

import numpy as np

SIZES = {"a": 5, "b": 4096, "c": 3 * 2**20 + 1, "empty": 0}


def content(name, number):
    """Return what version `number` of an array holds."""
    rng = np.random.default_rng([number, *name.encode()])
    return rng.integers(0, 256, SIZES[name], np.uint8)


def write(file, number, names=SIZES):
    for name in names:
        file.write(name, content(name, number))
    file.commit()


def held(file):
    return {name: file.read(name, file.version).result() for name in SIZES}


def assert_holds(file, numbers):
    for name, data in held(file).items():
        assert np.array_equal(data, content(name, numbers[name])), name
