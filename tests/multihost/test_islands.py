"""Islands of two processes each, and one that comes later."""

import concurrent.futures
import re
import time

import numpy as np
import pytest

import zeroxla
from multihost import processes

TOKEN = "between islands"


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_islands_of_two_processes(tmp_path, late):
    """All processes of an island merge at the same step, and have what their likes have."""
    events = []
    num = 1 if late else 2
    with zeroxla.Coordinator(
        "127.0.0.1:0", TOKEN, num_islands=num, deadline=20.0, say=events.append
    ) as there:

        def run(slot):
            if late and slot == 1:
                while sum(event["what"] == "closed" for event in events) < 4:
                    time.sleep(0.1)
            argv = ["-m", "zeroxla", "launch", "--nodes=2", "--devices-per-node=2", "--"]
            program = [processes.FOLDER / "islands.py", 6, slot, tmp_path]
            return processes.finish(
                processes.start(
                    [*argv, processes.sys.executable, *program],
                    ZEROXLA_ISLANDS=there.address,
                    ZEROXLA_ISLANDS_TOKEN=TOKEN,
                )
            )

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            results = list(pool.map(run, range(2)))
    for status, out in results:
        assert status == 0, out
        assert re.findall(r"\[\d\] finite: (.*)", out) == ["True"] * 2
        assert len(set(re.findall(r"\[\d\] loss: (.*)", out))) == 1
        together = re.findall(r"\[\d\] together: (\d+)", out)
        assert len(set(together)) == 1
        assert int(together[0]) >= 4, events
    first = [int(re.findall(r"\[0\] first: (\d+)", out)[0]) for _, out in results]
    assert first[0] == 0
    assert (first[1] > 0) == late
    for process in range(2):
        one, two = (dict(np.load(tmp_path / f"{slot}.{process}.npz")) for slot in range(2))
        both = one.keys() & two.keys()
        assert len(both) >= 4
        for name in both:
            np.testing.assert_array_equal(one[name], two[name], err_msg=name)
