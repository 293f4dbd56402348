"""An axis over two processes: each places its own part of the sequences, of the rows that both
read."""

import functools
import json

import jax
import numpy as np
import pytest
from tools.axis_models import SERIES
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from multihost import axes, processes

pytestmark = pytest.mark.usefixtures("quick_compilation")


@functools.cache
def launched(way):
    """Return what each process has said."""
    status, said, out = processes.launch("axes.py", way, devices_per_node=2)
    assert status == 0, out
    return said


@pytest.fixture
def said():
    return launched("placed")


@pytest.mark.slow
def test_a_process_places_its_own_part(said):
    for process in (0, 1):
        assert said[process]["shards"] == str([(axes.ROWS, SERIES // 4, 8)])
        starts = [SERIES // 4 * (2 * process + i) for i in (0, 1)]
        assert json.loads(said[process]["starts"]) == starts
        assert said[process]["same"] == "True"


@pytest.mark.slow
@pytest.mark.parametrize("way", thinned(["placed"], slow=["by rows"]))
def test_losses_are_those_of_one_process(way):
    mesh = zeroxla.make_mesh(nodes=1, devices=jax.devices()[:1])
    want = axes.train(mesh, lambda step, rows, train: rows)
    for process in (0, 1):
        np.testing.assert_allclose(json.loads(launched(way)[process][way]), want, rtol=5e-6)


@pytest.mark.slow
def test_processes_that_read_other_rows_are_told(said):
    for process in (0, 1):
        assert (
            "processes 0, 1 all have devices for part 0 of a batch" in said[process]["other rows"]
        )
