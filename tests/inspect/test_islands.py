"""Reports and pictures of exchanges show the bytes that islands have sent."""

import numpy as np
import pytest
from tools.islands import batches, part, trained
from tools.quick import quick_compilation  # noqa: F401

from zeroxla import inspect
from zeroxla.config.outer import Outer
from zeroxla.quantize import WireFormat

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_reports_have_the_bytes_that_islands_send():
    outer = Outer(every=4, fragments=2, wire=WireFormat(bits=4, block=64))
    (island, _), (state, _), metrics = trained(outer, 2, batches(8))
    found = island.describe(2)
    assert found.starts == (2, 4)
    sent = [x["outer_bytes"] for x in metrics[0] if "outer_bytes" in x]
    assert [x * found.num_devices for x in found.device_bytes] * 2 == sent
    assert found.bytes_per_step == sum(sent) / 8
    assert "a step" in str(found)

    row = part(batches(1)[0], 0, 2)
    lowered, mesh = island.step.lower(state.inner, row), island.step.mesh
    plain = inspect.comms(lowered, mesh)
    report = inspect.comms(lowered, mesh, islands=found)
    assert report.rows == plain.rows
    assert report.to_dict()["islands"]["device_bytes"] == found.device_bytes
    assert plain.to_dict()["islands"] is None
    assert f"{inspect.format_bytes(found.bytes_per_step)} by an island" in str(report)
    assert "by an island" not in str(plain)


def test_a_picture_of_islands_has_a_lane_and_a_curve_for_each():
    def metrics(t, **more):
        return {"loss": np.float32(4 - t / 10), **more}

    merged = {"outer_bytes": 500, "outer_islands": 2}
    alone = {"outer_bytes": 0, "outer_islands": 1}
    steps = {
        0: [(float(t), metrics(t, **(merged if t == 5 else alone if t == 15 else {})))
            for t in range(20)],
        1: [(float(t), metrics(t)) for t in (*range(6), *range(16, 20))],
    }  # fmt: skip
    figure = inspect.plot_islands(steps)
    lanes, losses = figure.axes
    assert "500 B sent" in lanes.get_title(loc="left")
    # Island 1 is drawn in two runs: it was away from 5 to 16.
    bars = sorted((bar.get_y() + 0.25, bar.get_x(), bar.get_width()) for bar in lanes.patches)
    assert bars == [(0.0, 0.0, 19.0), (1.0, 0.0, 5.0), (1.0, 16.0, 3.0)]
    dots = [line.get_xdata().tolist() for line in lanes.lines]
    assert dots == [[5.0], [15.0], [], []]
    assert [line.get_label() for line in losses.lines] == ["island 0", "island 1"]
    assert np.isnan(losses.lines[1].get_ydata()).sum() == 1
    with pytest.raises(ValueError, match="no island has taken a step; give the time"):
        inspect.plot_islands({0: []})
