"""TensorBoard's events: the values of the steps, after a resumption and on a full disk."""

from __future__ import annotations

from tools.disk import files_limited_to
from tools.tensorboard import read_events

from zeroxla.cli.run_folder import RunFolder
from zeroxla.cli.tracking.tensorboard import TensorBoardEvents
from zeroxla.cli.tracking.tracker import TrackedRun


def begun(folder, step=0):
    """Return a tracker that writes into a run folder."""
    tracker = TensorBoardEvents()
    run = TrackedRun(
        name="run", path=folder.path, command="train", config={}, step=step, files=folder.files
    )
    tracker.begin(run)
    return tracker


def test_events_hold_the_values(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {})
    tracker = begun(folder)
    tracker.log(1, {"loss": 2.5, "skipped": 0})
    tracker.log(2, {"loss": 2.25})
    folder.close()
    scalars, starts = read_events(folder.path)
    assert scalars == {("loss", 1): 2.5, ("skipped", 1): 0, ("loss", 2): 2.25}
    assert starts == []


def test_a_run_that_goes_on_forgets_later_steps(tmp_path):
    folder = RunFolder.create(tmp_path, {})
    begun(folder).log(5, {"loss": 5.0})
    folder.close()
    folder = RunFolder.reopen(tmp_path, step=3)
    begun(folder, step=3).log(4, {"loss": 40.0})
    folder.close()
    scalars, starts = read_events(tmp_path)
    assert starts == [4]
    assert scalars["loss", 4] == 40


def test_a_full_disk_loses_no_event(tmp_path):
    reports = []
    folder = RunFolder.create(tmp_path, {}, reports.append)
    tracker = begun(folder)
    tracker.log(1, {"loss": 1.0})
    (events,) = tmp_path.glob("events.out.tfevents.*")
    with files_limited_to(events.stat().st_size + 5):
        tracker.log(2, {"loss": 2.0})
        tracker.log(3, {"loss": 3.0})
        assert len(reports) == 1
    tracker.log(4, {"loss": 4.0})
    scalars, _ = read_events(tmp_path)
    assert [scalars["loss", step] for step in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert "again" in reports[1]
