"""What the benchmarks share: simulated devices, the plain-jit baseline, checks and result files."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import zeroxla
from zeroxla.frontend import adapt
from zeroxla.models import GPT
from zeroxla.planning.compile_check import MEMORY_SCHEDULER as MEMORY_SCHEDULER

RESULTS = Path(__file__).resolve().parent / "results"

NUM_DEVICES = 8
LENGTH = 128


def start(*, flags: str = "", threads: int | None = None, devices: int = NUM_DEVICES) -> Mesh:
    """Simulate devices in this process, as 2 nodes.

    Args:
      flags: what is added to XLA_FLAGS.
      threads: the argument of `zeroxla.simulate` with this name.
      devices: their number.
    """
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    zeroxla.simulate(devices, threads=threads)
    return zeroxla.make_mesh(nodes=2)


def gpt(*, scan: bool, layers: int, width: int) -> GPT:
    """Return a byte-level GPT for sequences of 128: 12 width^2 + 13 width parameters a layer."""
    return GPT(vocab=256, length=LENGTH, layers=layers, width=width, heads=8, scan=scan)


def token_shapes(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of `rows` sequences."""
    return {"tokens": jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)}


def random_tokens(rows: int, vocab: int = 256) -> dict[str, np.ndarray]:
    """Return a batch of `rows` random sequences."""
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, LENGTH + 1), dtype=np.int32)
    return {"tokens": tokens}


def tree_bytes(tree: Any) -> int:
    """Sum the bytes of a pytree of arrays or shapes, keys apart."""
    arrays = [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(x.size * x.dtype.itemsize for x in arrays)


def residual_bytes(pullback: Callable[[Any, Any], Any], params: Any, inputs: Any) -> int:
    """Return the bytes of the activations that a backward needs.

    They are the residuals that depend on `inputs`, each once; those that depend on parameters alone
    are parameters or copies of them. zeroxla has no part in it. A compiler may keep less and
    compute some again.

    Args:
      pullback: `(params, inputs) -> jax.vjp(...)[1]`.
      params, inputs: pytrees of shapes.
    """
    with jax.disable_jit():  # a nested jit would hand the same value out twice
        residuals = jax.make_jaxpr(lambda p, x: jax.tree.leaves(pullback(p, x)))(params, inputs)
    jaxpr = residuals.jaxpr
    on_inputs = set(jaxpr.invars[len(jax.tree.leaves(params)) :])
    for eqn in jaxpr.eqns:
        reads = (v for v in eqn.invars if not isinstance(v, jax.extend.core.Literal))
        if not on_inputs.isdisjoint(reads):
            on_inputs.update(eqn.outvars)
    kept = {v for v in jaxpr.outvars if not isinstance(v, jax.extend.core.Literal)} & on_inputs
    return tree_bytes([v.aval for v in kept])


def alternately(
    runs: Mapping[str, Callable[[], float]], turns: int, check: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds of each run by name, a number for each turn.

    Two more turns go before: the first compiles, the second warms up.

    Args:
      runs: take a step and return its seconds.
      turns: in each of which every run takes a step.
      check: called after every turn.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(turns + 2):
        for name, run in runs.items():
            times[name].append(run())
        check()
    return {name: seconds[2:] for name, seconds in times.items()}


class PlainFSDP:
    """What a user would write instead: one `jax.jit`, sharding annotations, `value_and_grad`.

    Parameters and optimizer state are split over all devices along the same dims as zeroxla's, in
    the order (node, device) of the batch's rows, which suits the compiler's partitioner best: in
    zeroxla's device-major order it moves more bytes and keeps 10 % more alive. Gradients are
    constrained to the parameters' sharding. Every collective is the compiler's.

    Attributes:
      train: jitted `(params, opt_state, batch, key) -> (params, opt_state, loss)`; donates the
        first two.
      shapes: of its arguments, with their shardings.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        state: zeroxla.TrainState,
        batch: Any,
        *,
        compute_dtype: str = "float32",
    ) -> None:
        """Build the step; `state` and `batch` may be shapes, leaves of `state` without padding. The
        loss reads the leaves cast to `compute_dtype`."""
        adapted = adapt(model)
        by_rows = NamedSharding(mesh, PartitionSpec(("node", "device")))
        whole = NamedSharding(mesh, PartitionSpec())

        def shape(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        def split(x: Any) -> jax.ShapeDtypeStruct:
            spec = (("node", "device") if names else None for names in x.sharding.spec)
            return shape(x, NamedSharding(mesh, PartitionSpec(*spec)))

        params, opt_state = jax.tree.map(split, (state.params, state.opt_state))
        rows = jax.tree.map(lambda x: shape(x, by_rows), batch)
        self.shapes = (params, opt_state, rows, shape(state.key, whole))
        placed = [jax.tree.map(lambda x: x.sharding, tree) for tree in (params, opt_state)]
        assert not jax.tree.leaves(state.model_state), "the baseline is written for GPT and Llama"

        def train(params: Any, opt_state: Any, batch: Any, key: jax.Array) -> Any:
            def loss(params: Any) -> jax.Array:
                params = jax.tree.map(lambda x: x.astype(compute_dtype), params)
                return adapted.loss(params, state.model_state, batch, key, train=True)[0]

            value, grads = jax.value_and_grad(loss)(params)
            grads = jax.lax.with_sharding_constraint(grads, placed[0])
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, value

        self.train = jax.jit(train, donate_argnums=(0, 1), out_shardings=(*placed, None))

    def lower(self) -> jax.stages.Lowered:
        """Lower the step for its shapes."""
        return self.train.lower(*self.shapes)

    def place(self, state: zeroxla.TrainState) -> tuple[Any, Any]:
        """Return copies of a state's parameters and optimizer state, placed for `train`."""
        placed = jax.tree.map(lambda x: x.sharding, self.shapes[:2])
        copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=placed)
        return copy((state.params, state.opt_state))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One target: `value` must be at most `limit`."""

    name: str
    value: float
    limit: float
    unit: str = ""

    @property
    def passed(self) -> bool:
        return self.value <= self.limit

    def __str__(self) -> str:
        mark = "met" if self.passed else "MISSED"
        return f"{mark}: {self.name}: {self.value:.4g}{self.unit} (at most {self.limit:.4g})"


def environment() -> dict[str, str]:
    """Return the machine and the versions that figures were taken with."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    memory_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores, {memory_gb:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "zeroxla": zeroxla.__version__,
        **{name: version(name) for name in packages},
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a markdown table, the first column left-aligned and the others right-aligned."""
    lines = [header, ["---", *("---:" for _ in header[1:])], *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def report(
    name: str,
    title: str,
    body: str,
    figures: dict[str, Any],
    checks: list[Check],
    *,
    files: str | None = None,
    folder: Path = RESULTS,
    versions: Mapping[str, str] | None = None,
) -> int:
    """Print a benchmark's result and write it to FILES.json and FILES.md in a folder.

    Args:
      name: of the command.
      title: heading.
      body: markdown: what was measured, and its tables.
      figures: everything measured, for JSON.
      checks: the targets.
      files: their name; None: that of the command.
      folder: their folder; it is made if it is missing.
      versions: names and versions that are reported after those of `environment`.

    Returns:
      The exit code: 0 if every target is met, else 1.
    """
    about = {**environment(), **(versions or {})}
    marks = "\n".join(f"- {check}" for check in checks)
    made_with = ", ".join(
        text if key in ("machine", "system") else f"{key} {text}" for key, text in about.items()
    )
    text = (
        f"# {title}\n\n{body}\n\n## Targets\n\n{marks}\n\n"
        f"Measured by `python benchmarks/{name}.py` on {made_with}.\n"
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{files or name}.md").write_text(text)
    results = [{**dataclasses.asdict(check), "passed": check.passed} for check in checks]
    everything = {"environment": about, **figures, "targets": results}
    (folder / f"{files or name}.json").write_text(json.dumps(everything, indent=2) + "\n")
    print(text)
    missed = [check.name for check in checks if not check.passed]
    if missed:
        print(f"targets missed: {'; '.join(missed)}")
    return 1 if missed else 0
