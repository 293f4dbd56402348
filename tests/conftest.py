"""Set up JAX before any test imports it: 8 CPU devices, a compilation cache, few threads.

Everything goes through environment variables, so that the processes that tests start get the same.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
NUM_DEVICES = 8


def _prepare_environment() -> None:
    # On a machine with an accelerator the suite still runs on 8 CPU devices, unless told otherwise.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # A collective blocks one thread per device; XLA sizes its pool by this variable.
    os.environ.setdefault("NPROC", "64")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags += f" --xla_force_host_platform_device_count={NUM_DEVICES}"
    os.environ["XLA_FLAGS"] = flags.strip()
    # Two test processes on two cores, each with 8 device threads: BLAS threads only contend.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Compilation is most of the suite's time. Reading an entry back costs some 10 ms, so programs
    # that compile faster than the threshold stay out.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".cache" / "jax"))
    # A bounded cache is a locked one: without, one process may read what another is still writing,
    # and dies of it.
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(4 * 2**30))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    # Where in Python each operation of a program comes from takes a fourteenth of the suite's time
    # to write down, and no test reads it.
    os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
    # Tests start some hundreds of processes, which begin sooner from bytecode.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Plots are drawn to files.
    os.environ.setdefault("MPLBACKEND", "Agg")


_prepare_environment()
# A test process comes to hold millions of JAX's objects, and would spend a twentieth of its time
# looking through them for garbage.
gc.set_threshold(50_000, 20, 20)

import pytest

pytest.register_assert_rewrite("tools", "multihost")
pytest_plugins = ["tools.left_out"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Decide which tests run in one process, where they share fixtures and compiled programs.

    These are the tests of a file. Two kinds of files are cut further: equality tests by their case,
    and pairs of features by the first feature. All run in the order of collection.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file, _, test = nodeid.partition("::")
            if test.startswith("test_a_pair["):
                return test.partition(" + ")[0]
            if not file.endswith("_equality.py"):
                return file
            return f"{file} {test.partition('[')[2].partition('-')[0]}"

    config.option.loadscopereorder = False  # by number of tests: slow files with few would be last
    return ByFile(config, log)


def pytest_collection_modifyitems(items):
    """Put the small scopes of the equality tests last, where they fill what a process has left."""
    items.sort(key=lambda item: item.path.name.endswith("_equality.py"))


@pytest.fixture(scope="session")
def mesh24():
    """Two nodes of four devices, the mesh of most tests."""
    from zeroxla.mesh.make_mesh import make_mesh

    return make_mesh(nodes=2, devices_per_node=4)


@pytest.fixture(scope="session")
def mesh18():
    """One node of eight devices: no hop between nodes."""
    from zeroxla.mesh.make_mesh import make_mesh

    return make_mesh(nodes=1, devices_per_node=8)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A folder of files to train `zeroxla train` on."""
    folder = tmp_path_factory.mktemp("text")
    for i in range(25):
        (folder / f"{i:02d}.txt").write_text(f"line {i}: the quick brown fox jumps\n" * 20)
    return folder
