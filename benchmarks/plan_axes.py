"""Whether `zeroxla plan --search` finds the fastest setting, with axes that split one row's work.

Three clusters of H100s that need not exist: Llama 3 70B at 8k tokens on 128 devices, Llama 3 405B
at 8k tokens on 512, and Llama 3 8B at 1M tokens on 64. Of each the search's best step time stands
beside the least of all settings planned one by one: every length of `tensor` and `context` that
divides a node, every number of micro-batches, with and without recomputation, every preset. So the
settings that the search leaves out are planned here. Presets keep more than the first one,
`zero3`, and are left out where that needs 1.05 times the memory. All times are predicted; nothing
is run.

    python benchmarks/plan_axes.py [--only NAME ...]

Exits with 1 if a target is missed; writes results/plan_axes.json and .md, of the cases that were
measured and of those that are in the file already. Takes about an hour on 2 cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from common import RESULTS, Check, report, table

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.planning.choices import ZEROS, Choice, Variants, axes_inside, counts_of, meshes
from zeroxla.planning.hunt import Found
from zeroxla.planning.model_presets import model_named
from zeroxla.planning.trials import TrialCluster, Trials

DEVICES_PER_NODE = 8
MAX_TIME, MAX_SEARCH_S = 1.1, 300.0
DTYPE = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model on a cluster.

    Attributes:
      model: the name of a preset.
      length, rows: the tokens of a sequence, and the sequences of a step.
      nodes: the number of nodes.
      fields: fields of the model that replace the preset's own.
      memory_fraction: the share of a device's memory that JAX takes.
    """

    model: str
    length: int
    rows: int
    nodes: int
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    memory_fraction: float | None = None

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {"tokens": jax.ShapeDtypeStruct((self.rows, self.length + 1), jnp.int32)}

    @property
    def models(self) -> dict[bool, Any]:
        """The model by whether it recomputes in backward."""
        return {r: model_named(self.model, remat=r, **self.fields)[0] for r in (False, True)}

    @property
    def cluster(self) -> dict[str, Any]:
        return {"device": "h100", "link": "400gbit", "memory_fraction": self.memory_fraction}


CASES = {
    "70B, 8k": Case(model="llama3-70b", length=8192, rows=128, nodes=16),
    "405B, 8k": Case(model="llama3-405b", length=8192, rows=512, nodes=64),
    "8B, 1M": Case(
        model="llama3-8b",
        length=2**20,
        rows=8,
        nodes=8,
        # On a GPU attention is one kernel whatever its blocks are; large ones trace faster.
        fields={"attention_block": 8192, "loss_chunk": 4096},
        memory_fraction=0.92,
    ),
}


def every_choice(case: Case) -> Iterator[list[Choice]]:
    """Yield all settings without stages: lists of those that differ in the preset alone."""
    for axes in axes_inside(DEVICES_PER_NODE, experts=False):
        for shape in meshes(case.nodes, DEVICES_PER_NODE, (1,), axes):
            for remat in (True, False):
                for count in counts_of(shape, case.rows):
                    rest = {"mesh_shape": shape, "microbatches": count, "remat": remat}
                    yield [Choice(zero=zero, weights=None, **rest) for zero in ZEROS]


def one_by_one(case: Case) -> tuple[Found | None, int]:
    """Return the fastest setting that fits, and the number of settings that were planned."""
    trials = Trials(
        variants=Variants.of(case.models, None),
        batch=case.batch,
        config=ZeroConfig(compute_dtype=DTYPE),
        cluster=TrialCluster(devices_per_node=DEVICES_PER_NODE, **case.cluster),
    )
    best: Found | None = None
    planned = 0
    for presets in every_choice(case):
        for choice in presets:
            try:
                found = Found(choice=choice, plan=trials.plan(choice))
            except (ValueError, NotImplementedError):
                break
            planned += 1
            seconds, room = found.plan.time.seconds, found.plan.target.device.usable_bytes
            print(f"  {', '.join(choice.words())}: {seconds:.4g} s, {found.limit}", flush=True)
            if found.plan.fits and (best is None or seconds < best.plan.time.seconds):
                best = found
            if choice is presets[0] and found.plan.most_bytes > 1.05 * room:
                break
    return best, planned


def measure(case: Case) -> dict[str, Any]:
    """Search, and try all settings one by one; return the figures."""
    start_s, cpu_s = time.monotonic(), time.process_time()
    search = zeroxla.search_plans(
        case.models, case.nodes, DEVICES_PER_NODE, case.batch, **case.cluster
    )
    search_s, search_cpu_s = time.monotonic() - start_s, time.process_time() - cpu_s
    print(search.table(20), search_s, search_cpu_s, flush=True)
    best, planned = one_by_one(case)
    assert search.best is not None, "nothing fits, says the search"
    assert best is not None, "nothing fits, one by one"
    found, least_s = search.best, min(best.plan.time.seconds, search.best.plan.time.seconds)
    return {
        "search_s": search_s,
        "search_cpu_s": search_cpu_s,
        "search_plans": len(search.found),
        "found": found.choice.words(),
        "found_s": found.plan.time.seconds,
        "found_bytes": found.plan.most_bytes,
        "mfu": found.plan.mfu,
        "without_axes_s": _without_axes(search),
        "planned": planned,
        "best": best.choice.words(),
        "best_s": best.plan.time.seconds,
        "ratio": found.plan.time.seconds / least_s,
    }


def _without_axes(search: zeroxla.Search) -> float | None:
    """Return the least seconds that the search found without axes that split one row's work."""
    found = (
        row.plan.time.seconds
        for row in search.found
        if row.plan.fits and not {"tensor", "context"} & set(row.choice.mesh_shape)
    )
    return min(found, default=None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME")
    only = parser.parse_args().only
    path = RESULTS / "plan_axes.json"
    measured = {}
    for name, case in CASES.items():
        if not only or name in only:
            print(name, flush=True)
            measured[name] = measure(case)
    before = json.loads(path.read_text())["cases"] if path.exists() else {}
    figures = {**before, **measured}
    figures = {name: figures[name] for name in CASES if name in figures}
    checks, rows = [], []
    for name, found in figures.items():
        checks.append(Check(name=f"{name}: found / best", value=found["ratio"], limit=MAX_TIME))
        seconds = Check(
            name=f"{name}: the search's processor time",
            value=found["search_cpu_s"],
            limit=MAX_SEARCH_S,
            unit=" s",
        )
        checks.append(seconds)
        none = found["without_axes_s"]
        rows.append(
            [
                name,
                ", ".join(found["found"]),
                f"{found['found_s']:.4g} s",
                f"{found['mfu']:.0%}",
                ", ".join(found["best"]),
                f"{found['best_s']:.4g} s",
                f"{found['ratio']:.3f}",
                "nothing fits" if none is None else f"{none:.4g} s",
                found["planned"],
                f"{found['search_cpu_s']:.0f} s",
            ]
        )
    columns = (
        "case",
        "the search's best (wires, mesh, micro-batches, weights per, remat)",
        "a step",
        "MFU",
        "best one by one",
        "a step",
        "found / best",
        "without these axes",
        "planned one by one",
        "processor time of the search",
    )
    body = (
        "Predicted step times of NVIDIA H100s in nodes of 8 with 400 Gbit/s a node; nothing was "
        "run. "
        + " ".join(
            f"{name}: {case.model}, {case.rows} sequences of {case.length} tokens on {case.nodes} "
            f"nodes, of which JAX takes {case.memory_fraction or 0.75:.0%} of the memory."
            for name, case in CASES.items()
            if name in figures
        )
        + "\n\n"
        + table(columns, rows)
    )
    return report("plan_axes", "Searches against all settings", body, {"cases": figures}, checks)


if __name__ == "__main__":
    sys.exit(main())
