"""Every notebook runs top to bottom in its own kernel, within the time that a reader has for it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))

SECONDS = 60
"""What a notebook may take on two idle cores of the machine that the yardstick was measured on."""
LONGER = {"05_rlhf": 300, "07_islands": 90, "08_axes": 90}
"""Notebooks that may take longer. 05 trains six times for a reward. 07 compiles for two islands at
once. 08 searches five splits."""
YARDSTICK_SECONDS = 1.65
"""What the yardstick takes there; elsewhere a notebook may take longer as the yardstick does."""
YARDSTICK = """
import time, jax, jax.numpy as jnp

def f(x):
    for i in range(40):
        x = jnp.tanh(x @ x) + jnp.sort(x, axis=i % 2)
    return x.sum()

jax.jit(jax.grad(f)).lower(jnp.ones((8, 8))).compile()
print(time.process_time())
"""
HANGS_AFTER = 300
"""A cell that runs as long as this, or three times its notebook's limit, has hung."""

# What the notebook's own first cell must set, and what the test session has set for itself.
OURS = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS", "MPLBACKEND", "STEPS")


def slower() -> float:
    """Return how much longer a notebook may take here and now: it mostly compiles, and so does the
    yardstick."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    took = subprocess.check_output([sys.executable, "-c", YARDSTICK], env=environment)
    return max(1, float(took) / YARDSTICK_SECONDS)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_top_to_bottom(path):
    limit = LONGER.get(path.stem, SECONDS)
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra: dev)")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (extra: dev)")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (extra: dev)")
    client = nbclient.NotebookClient(
        nbformat.read(path, as_version=4),
        kernel_name="python3",
        timeout=max(HANGS_AFTER, 3 * limit),
        # The notebook's `import zeroxla` finds this checkout, installed or not.
        resources={"metadata": {"path": str(REPOSITORY)}},
    )
    environment = {name: value for name, value in os.environ.items() if name not in OURS}
    slower_before = slower()
    started, before = time.perf_counter(), _cpu_seconds_of_ended_children()
    # Raises CellExecutionError, with the cell and its traceback, if any cell fails.
    client.execute(env=environment)
    wall_s = time.perf_counter() - started
    cpu_s = _cpu_seconds_of_ended_children() - before
    seconds = limit * (slower_before + slower()) / 2  # other processes come and go

    assert cpu_s > 1, "the kernel's CPU time was not counted"
    # The suite shares its cores with other test processes, so wall time says more about them than
    # about the notebook. CPU time does not depend on them: a kernel that never idles needs at most
    # its CPU time on an idle machine, and less where it uses both cores. How long it may idle is
    # bounded by the wall time, at three times the limit.
    took = f"{cpu_s:.0f} s of CPU time, {wall_s:.0f} s in all, of {seconds:.0f} s"
    assert min(wall_s, cpu_s) <= seconds, took
    assert wall_s <= 3 * seconds, took


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_as_it_ran(path):
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (extra: dev)")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < 500_000, (
        "plots must stay small: the repository keeps every version"
    )


def _cpu_seconds_of_ended_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
