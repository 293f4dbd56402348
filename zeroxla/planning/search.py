"""`zeroxla.search_plans`: presets, splits of the mesh, micro-batches and recomputation, ranked."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import linen
from rich.table import Table

from zeroxla.config.zero_config import ZeroConfig
from zeroxla.mesh.axes import DEVICE, NODE, PIPE
from zeroxla.pipeline.pipeline import Pipeline
from zeroxla.planning.make import plan
from zeroxla.planning.plan import Plan
from zeroxla.program.report import Report, format_bytes

ZEROS = ("zero3", "zeropp", "zeropp_hq", "zeropp_min")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Settings of a training step.

    Attributes:
      zero: a preset of `ZeroConfig`.
      mesh_shape: axis lengths.
      microbatches: into which the batch is cut.
      weights: of a pipeline: gathered once a step, or in every tick; None without stages.
      remat: whether blocks are recomputed in backward; None where the model does not say.
    """

    zero: str
    mesh_shape: Mapping[str, int]
    microbatches: int
    weights: str | None
    remat: bool | None

    def words(self) -> list[str]:
        """Return the settings as a row of a table."""
        axes = " x ".join(f"{name}={size}" for name, size in self.mesh_shape.items())
        remat = {None: "-", True: "yes", False: "no"}[self.remat]
        return [self.zero, axes, str(self.microbatches), self.weights or "-", remat]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A choice, and its plan."""

    choice: Choice
    plan: Plan

    @property
    def limit(self) -> str:
        """What limits it: memory where it does not fit, else what the step waits for most."""
        return self.plan.limit if self.plan.fits else "memory"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Search(Report):
    """What was found; `print` it.

    Attributes:
      found: the best first: those that fit by tokens/s, then the others by memory.
      refused: reasons why settings could not be planned, and which those are.
    """

    found: tuple[Found, ...]
    refused: Mapping[str, Sequence[str]]

    @property
    def best(self) -> Found | None:
        """The fastest that fits, if one does."""
        return self.found[0] if self.found and self.found[0].plan.fits else None

    def table(self, most: int | None = None) -> Table:
        """Return the rows, or the first ones, as a rich table."""
        table = Table(title="Settings, by predicted speed", title_justify="left")
        for name in ("wires", "mesh"):
            table.add_column(name, no_wrap=True)
        for name in ("micro-batches", "weights per", "remat", "memory", "a step", "a second"):
            table.add_column(name, justify="right")
        table.add_column("limited by")
        for row in self.found[:most]:
            fits, time = row.plan.fits, row.plan.time.seconds
            table.add_row(
                *row.choice.words(),
                format_bytes(row.plan.most_bytes),
                f"{time:.3g} s",
                f"{row.plan.tokens_per_s:,.0f}",
                row.limit,
                style=None if fits else "dim",
            )
        return table

    def notes(self) -> list[str]:
        """Return a sentence for each reason why settings were refused."""
        return [f"Not planned: {'; '.join(which)}: {why}" for why, which in self.refused.items()]


def search_plans(
    model: Any,
    nodes: int,
    devices_per_node: int,
    batch: Any,
    *,
    config: ZeroConfig | None = None,
    zeros: Sequence[str] = ZEROS,
    pipes: Sequence[int] | None = None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    **options: Any,
) -> Search:
    """Plan a model on a cluster in many ways, and rank them.

    Tried are presets x ways to split the devices into stages and nodes x recomputation, and of each
    as few micro-batches as fit (in a pipeline about four for each stage, which keep its bubble
    short; more if they do not fit, and then weights gathered in every tick).

    Args:
      model: as `make_step` takes it; or {False: model, True: the one that recomputes in backward},
        which are both tried, as both are of a flax.linen module with a field `remat`. If it scans
        over its blocks, so are pipelines.
      nodes, devices_per_node: of the cluster.
      batch: shapes of a global batch, the same one for all.
      config: what presets do not decide: dtypes, thresholds, ... Default: computing in bfloat16.
      zeros: names of presets.
      pipes: numbers of stages; powers of two up to 8 if None.
      progress: called with (plans done, plans at least, what is next).
      options: as `zeroxla.plan` takes them: optimizer, loss, device, link, machines.

    Returns:
      What was found.

    Raises:
      ValueError: unknown presets, or no setting can be planned at all (it says why not).

    Cost: a trace for each: minutes in all.
    """
    config = config or ZeroConfig(compute_dtype="bfloat16")
    if unknown := set(zeros) - set(ZEROS):
        raise ValueError(f"there are no presets {sorted(unknown)}; there are {ZEROS}")
    rows = jax.tree.leaves(batch)[0].shape[0]
    models, refused = _variants(model, options.get("loss"))
    meshes = list(_meshes(nodes, devices_per_node, pipes or (1, 2, 4, 8)))
    if not any(staged for _, staged in models.values()):
        meshes = [mesh for mesh in meshes if mesh.get(PIPE, 1) == 1]
    tried = [(z, mesh, remat) for mesh in meshes for remat in models for z in zeros]
    found: list[Found] = []
    for i, (zero, mesh, remat) in enumerate(tried):
        plain, staged = models[remat]
        made = staged if mesh.get(PIPE, 1) > 1 else plain
        last: Found | None = None
        for choice in _attempts(zero, mesh, remat, rows):
            progress(i, len(tried), ", ".join(choice.words()))
            try:
                with warnings.catch_warnings():  # that a preset's wires lack an axis is no news
                    warnings.filterwarnings("ignore", message=".*without effect")
                    last = _planned(made, choice, batch, config, options)
            except (ValueError, NotImplementedError) as error:
                refused.setdefault(str(error), []).append(", ".join(choice.words()))
                continue
            if last.plan.fits:
                break
        found += [last] if last else []
    progress(len(tried), len(tried), "")
    if not found:
        raise ValueError("no setting can be planned:\n" + "\n".join(refused))
    found.sort(key=lambda row: _rank(row.plan))
    return Search(found=tuple(found), refused=refused)


def _rank(plan: Plan) -> tuple[bool, float]:
    return not plan.fits, -plan.tokens_per_s if plan.fits else plan.most_bytes


def _planned(
    model: Any, choice: Choice, batch: Any, config: ZeroConfig, options: Mapping[str, Any]
) -> Found:
    more = {} if choice.weights is None else {"weights": choice.weights, "loss": None}
    found = plan(
        model,
        choice.mesh_shape,
        batch,
        config=_with_wires(config, choice.zero),
        microbatches=choice.microbatches,
        **{**options, **more},
    )
    return Found(choice=choice, plan=found)


def _with_wires(config: ZeroConfig, zero: str) -> ZeroConfig:
    """Return the options with those that presets decide as one has them."""
    presets = {name: getattr(ZeroConfig, name)() for name in ZEROS}
    decided = {
        field.name
        for preset in presets.values()
        for field in dataclasses.fields(ZeroConfig)
        if getattr(preset, field.name) != getattr(ZeroConfig(), field.name)
    }
    return dataclasses.replace(config, **{name: getattr(presets[zero], name) for name in decided})


def _variants(
    model: Any, loss: Any
) -> tuple[dict[bool | None, tuple[Any, Any]], dict[str, list[str]]]:
    """Return (model, its pipeline or None) with and without recomputation, and why there are no
    pipelines."""
    models: Mapping[Any, Any] = {None: model}
    if isinstance(model, Mapping):
        models = model
    elif isinstance(model, linen.Module) and hasattr(model, "remat"):
        models = {remat: model.clone(remat=remat) for remat in (False, True)}
    refused: dict[str, list[str]] = {}

    def staged(model: Any) -> Any:
        try:
            return Pipeline.from_model(model, loss)
        except (ValueError, TypeError, NotImplementedError) as error:
            refused[str(error)] = ["pipelines"]
            return None

    return {remat: (made, staged(made)) for remat, made in models.items()}, refused


def _meshes(nodes: int, devices: int, pipes: Sequence[int]) -> Iterator[dict[str, int]]:
    """Yield the ways to lay stages over a cluster, hosts becoming stages first, as `make_mesh`."""
    for pipe in pipes:
        if nodes % pipe == 0:
            shape = {PIPE: pipe, NODE: nodes // pipe, DEVICE: devices}
        elif pipe % nodes == 0 and devices % (pipe // nodes) == 0:
            shape = {PIPE: pipe, NODE: 1, DEVICE: devices * nodes // pipe}
        else:
            continue
        yield {axis: size for axis, size in shape.items() if axis != PIPE or size > 1}


def _attempts(
    zero: str, mesh: Mapping[str, int], remat: bool | None, rows: int
) -> Iterator[Choice]:
    """Yield settings, those first that would be the fastest if they fit."""
    of_device = max(rows // (mesh[NODE] * mesh[DEVICE]), 1)
    counts = [m for m in range(1, of_device + 1) if of_device % m == 0]
    pipe = mesh.get(PIPE, 1)
    if pipe > 1:
        enough = [m for m in counts if m <= 4 * pipe]
        counts = [enough[-1], *(m for m in counts if m > 4 * pipe)]
    for weights in ("step", "tick") if pipe > 1 else (None,):
        for count in counts:
            yield Choice(
                zero=zero, mesh_shape=mesh, microbatches=count, weights=weights, remat=remat
            )
