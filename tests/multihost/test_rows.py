"""The rows of a batch that a process reads are its own devices' rows, on any mesh."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

import zeroxla


def shards(axes, processes, monkeypatch):
    """What `process_shard` says in each process; `processes` are those of the mesh's devices."""
    make = np.vectorize(lambda process: SimpleNamespace(process_index=process), otypes=[object])
    mesh = SimpleNamespace(axis_names=axes, devices=make(np.array(processes)))
    found = []
    for process in np.unique(processes):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        found.append(zeroxla.process_shard(mesh))
    return found


@pytest.mark.parametrize(
    ("axes", "processes", "expected"),
    [
        (("node", "device"), [[0, 0], [1, 1]], [(0, 2), (1, 2)]),
        (("node", "device"), [[1, 1], [0, 0]], [(1, 2), (0, 2)]),
        (("node", "device"), [[0, 0], [2, 2], [1, 1]], [(0, 3), (2, 3), (1, 3)]),
        (("node", "device"), [[0, 0, 1, 1]], [(0, 2), (1, 2)]),
        (("device",), [0, 1], [(0, 2), (1, 2)]),
        # A host is a stage: both read all rows.
        (("pipe", "node", "device"), [[[0, 0]], [[1, 1]]], [(0, 1), (0, 1)]),
        (("pipe", "device"), [[0, 0], [1, 1]], [(0, 1), (0, 1)]),
        # Two hosts are a stage: half of the rows for one of each stage.
        (
            ("pipe", "node", "device"),
            [[[0, 0], [1, 1]], [[2, 2], [3, 3]]],
            [(0, 2), (1, 2), (0, 2), (1, 2)],
        ),
        # A part of each stage on each host.
        (("pipe", "node", "device"), [[[0], [1]], [[0], [1]]], [(0, 2), (1, 2)]),
        # The same with the axes in other orders.
        (("node", "pipe", "device"), [[[0], [0]], [[1], [1]]], [(0, 2), (1, 2)]),
        (("device", "node", "pipe"), [[[1, 1], [0, 0]]], [(1, 2), (0, 2)]),
        # Devices of a process whose rows do not follow one another: it reads what lies between.
        (("device", "node"), [[0, 0], [1, 1]], [(0, 1), (0, 1)]),
        (("node", "device"), [[0, 1, 0, 1], [2, 3, 2, 3]], [(0, 2), (0, 2), (1, 2), (1, 2)]),
        # A process with the end of a stage and the begin of the next.
        (("pipe", "device"), [[0, 0, 1], [1, 2, 2]], [(0, 1), (0, 1), (0, 1)]),
    ],
)
def test_the_part_that_a_process_reads(axes, processes, expected, monkeypatch):
    assert shards(axes, processes, monkeypatch) == expected


def test_a_process_without_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match="process 1 has no device in the mesh"):
        zeroxla.process_shard(zeroxla.make_mesh(nodes=1))
