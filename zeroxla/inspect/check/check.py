"""`check`: looks on a small instance of a model for what would go wrong on many devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.inspect.check.check_report import CheckReport
from zeroxla.inspect.check.checked_model import CheckedModel, checked_model
from zeroxla.inspect.check.collectives import check_collectives
from zeroxla.inspect.check.equality import check_equality
from zeroxla.inspect.check.gathered import check_gathered
from zeroxla.inspect.check.overflow import check_overflow
from zeroxla.inspect.check.repeats import check_repeats
from zeroxla.inspect.check.two_runs import run_twice
from zeroxla.inspect.check.whole_leaves import check_whole_leaves
from zeroxla.mesh.axes import platform_of
from zeroxla.mesh.make_mesh import make_mesh
from zeroxla.step.checks import check_is_config


def check(
    model: Any,
    batch: Any,
    *,
    mesh: Mesh | None = None,
    config: ZeroConfig | None = None,
    loss: Callable[..., Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    axis_names: Mapping[str, str | Sequence[str]] | None = None,
) -> CheckReport:
    """Check a small instance of a model before training a large one.

    Six checks: `equality` of loss and gradients with the unsharded model; `collectives` that all
    devices run in one order; what must be `gathered` at one time; `whole leaves`; `overflow` in
    the dtype of `config`; and whether the model `repeats`, when it is traced and when it runs.
    docs/check.md says what each one finds and what it does not.

    Args:
      model: as for `make_step`; an instance with few and narrow layers, but at least two.
      batch: a pytree of arrays on the host, with at least one row for each device and micro-batch.
      mesh: the mesh. None takes all devices, in two nodes if their number is even.
      config: the options that you train with. Of them the checks read `compute_dtype`,
        `accumulate`, `frozen`, `splits`, `rewrite`, `unit_elements` and `init_loss_scale`;
        quantized wires would change the numbers, and are left out.
      loss: as for `make_step`.
      optimizer: as for `make_step`.
      axis_names: as for `make_step`.

    Returns:
      The report: `print` it, or ask it whether all is `ok`.

    Raises:
      ValueError: as `make_step` and a step, the mesh has stages, or there are several processes.

    Cost: mostly compilation, of the step, of the unsharded gradients and, in a narrow dtype, of a
    program that notes the size of each value: for two small layers 3 s of a CPU, for a scanned
    transformer of two layers in float16 some 25 s.

    >>> import numpy as np, zeroxla
    >>> from zeroxla.models import MLP
    >>> batch = {"image": np.ones((16, 8, 8)), "label": np.arange(16) % 10}
    >>> zeroxla.check(MLP.tiny(), batch).ok
    True
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"check runs in one process, and there are {jax.process_count()}; run it on one "
            "machine, where zeroxla.simulate(8) makes eight devices of the CPU"
        )
    config = ZeroConfig() if config is None else config
    check_is_config(config)
    mesh = _usual_mesh() if mesh is None else mesh
    if mesh.size == 1:
        raise ValueError(
            "check on one device: there is nothing to compare; call zeroxla.simulate(8) before JAX "
            "starts, or pass a mesh of several devices"
        )
    batch = jax.tree.map(np.asarray, batch)
    with _exactly(mesh):
        checked = checked_model(
            model,
            batch,
            mesh,
            config=config,
            loss=loss,
            optimizer=optimizer,
            axis_names=axis_names,
        )
        return _report(checked, model)


def _report(checked: CheckedModel, model: Any) -> CheckReport:
    collectives = check_collectives(checked)
    # A step whose devices would wait for each other forever must not run.
    runs = None if collectives.verdict == "fault" else run_twice(checked)
    results = (
        check_equality(checked, runs),
        collectives,
        check_gathered(checked),
        check_whole_leaves(checked),
        check_overflow(checked),
        check_repeats(checked, runs),
    )
    return CheckReport(model=_name(model), mesh=_words(checked.mesh), results=results)


def _usual_mesh() -> Mesh:
    count = len(jax.devices())
    return make_mesh(nodes=2 if count % 2 == 0 else 1)


@contextlib.contextmanager
def _exactly(mesh: Mesh) -> Iterator[None]:
    """Return a context in which products are as exact as float32, and on CPUs programs, each of
    which runs once or twice, compile with little optimization."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, before or platform_of(mesh) == "cpu")
    try:
        with jax.default_matmul_precision("highest"):
            yield
    finally:
        jax.config.update(name, before)


def _name(model: Any) -> str:
    """Return a model in words."""
    if isinstance(model, tuple | list):
        return "the pair " + ", ".join(getattr(f, "__name__", type(f).__name__) for f in model)
    name = getattr(model, "__qualname__", type(model).__name__)
    return name.replace(".<locals>", "").replace(".<lambda>", "")


def _words(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {length}" for axis, length in mesh.shape.items())
