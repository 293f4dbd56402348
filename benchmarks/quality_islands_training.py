"""Training one variant of benchmarks/quality_islands.py: islands are threads of this process."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from common import NUM_DEVICES
from optax import contrib
from quality_islands_variants import Variant
from quality_training import LENGTH, NUM_FINAL_BATCHES, Setup

from zeroxla import Coordinator, Island, IslandState, Step, TrainState, make_mesh, make_step
from zeroxla.cli.data.text import training_batches
from zeroxla.cli.train.chosen import with_rates
from zeroxla.cli.train.setup import BETA2, optimizer_for, schedule_for
from zeroxla.models import GPT

TOKEN = "between islands"
DEADLINE_S = 3600.0
"""So long a round waits for an island: nobody is ever left out."""


class Trainer:
    """Trains one variant, from any seed."""

    def __init__(self, setup: Setup, variant: Variant) -> None:
        self.setup, self.variant = setup, variant
        self.programs: dict[int, Any] = {}  # by island; the seeds share what was compiled

    @functools.cached_property
    def steps(self) -> list[Step]:
        """The step of each island, on its own share of the devices."""
        num = self.variant.islands or self.variant.parts
        size = NUM_DEVICES // num
        shares = [jax.devices()[i * size : (i + 1) * size] for i in range(num)]
        nodes = 1 if num > 1 else 2
        make = muon_for if self.variant.inner == "muon" else _adamw_for
        return [
            make_step(
                GPT(**self.setup.model),
                make_mesh(nodes=nodes, devices=share),
                make(self.setup),
                config=self.variant.config,
            )
            for share in shares
        ]

    def result_file(self, seed: int) -> Path:
        """Return the file in which the result of a seed lies."""
        slug = "".join(c if c.isalnum() else "_" for c in self.variant.name)
        return self.setup.folder / f"{slug}-{self.setup.steps}-{seed}.json"

    def train(self, seed: int, advance: Callable[[int], None]) -> dict[str, Any]:
        """Train to the end, or read what was trained before; return the result.

        Args:
          seed: of the parameters and the data.
          advance: called with the number of steps that were taken, or were there already.
        """
        file = self.result_file(seed)
        if file.exists():
            advance(self.setup.steps)
            return json.loads(file.read_text())
        found = self._islands(seed, advance) if self.variant.islands else self._alone(seed, advance)
        result = {"variant": self.variant.name, "seed": seed, **found}
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(result))
        temporary.rename(file)
        return result

    def _alone(self, seed: int, advance: Callable[[int], None]) -> dict[str, Any]:
        """Train without islands."""
        step, batches = self.steps[0], self._batches(seed, 0, self.variant.parts)
        first = next(self._batches(seed, 0, self.variant.parts))
        state = step.init(jax.random.key(seed), first)
        for _ in range(self.setup.steps):
            state, _ = step(state, next(batches))
            advance(1)
        return {"loss": self._loss(step, state)}

    def _islands(self, seed: int, advance: Callable[[int], None]) -> dict[str, Any]:
        """Train islands, each in a thread, and take the first one's parameters.

        Returns:
          The losses of the first island's own parameters, and of the outer parameters; the number
          of rounds, of rounds that training has merged, and the bytes that the first island has
          sent in those.
        """
        num = self.variant.islands
        all_done = threading.Barrier(num)
        place = Coordinator("127.0.0.1:0", TOKEN, num_islands=num, deadline=DEADLINE_S)
        with place, concurrent.futures.ThreadPoolExecutor(num) as pool:
            run = functools.partial(
                self._island, seed=seed, address=place.address, all_done=all_done, advance=advance
            )
            found = list(pool.map(run, range(num)))
        outer = self.variant.config.outer
        assert outer is not None
        rounds = [n for n in range(self.setup.steps + 1) if outer.start_of(n) <= self.setup.steps]
        for state, merged, _ in found:
            islands = [m["outer_islands"] for m in merged]
            assert state.round == len(rounds), f"{state.round} rounds of {len(rounds)}"
            assert set(islands) <= {num}, f"a round had {set(islands)} of {num} islands"
        state, merged, shared = found[0]
        for other, _, _ in found[1:]:
            for a, b in zip(state.outer, other.outer, strict=True):
                np.testing.assert_array_equal(np.asarray(a.copy), np.asarray(b.copy))
        return {
            "loss": self._loss(self.steps[0], state.inner),
            "outer_loss": self._loss(self.steps[0], shared),
            "rounds": state.round,
            "seen_rounds": len(merged),
            "seen_bytes": sum(m["outer_bytes"] for m in merged),
        }

    def _island(
        self,
        index: int,
        *,
        seed: int,
        address: str,
        all_done: threading.Barrier,
        advance: Callable[[int], None],
    ) -> tuple[IslandState, list[dict[str, Any]], TrainState]:
        """Train one island; return its last state, the metrics of steps that merged, and the state
        with the outer parameters."""
        num, merged = self.variant.islands, []
        try:
            with Island(self.steps[index], address, TOKEN, slot=index) as island:
                first = next(self._batches(seed, index, num))
                batches = self._batches(seed, index, num)
                if index in self.programs:
                    island.programs = self.programs[index]
                state = island.init(jax.random.key(seed), first)
                for _ in range(self.setup.steps):
                    state, metrics = island(state, next(batches))
                    if "outer_islands" in metrics:
                        merged.append({n: metrics[n] for n in ("outer_islands", "outer_bytes")})
                    if index == 0:
                        advance(1)
                self.programs[index] = island.programs
                state = island.settle(state)
                all_done.wait()
                return state, merged, island.shared(state)
        except BaseException:
            all_done.abort()
            raise

    def _batches(self, seed: int, index: int, count: int) -> Any:
        """Return an island's rows of the batches of a seed, which are the same for every count."""
        return iter(
            training_batches(
                self.setup.corpus.train,
                batch=self.setup.batch,
                length=LENGTH,
                seed=seed,
                shard_index=index,
                shard_count=count,
            )
        )

    def _loss(self, step: Step, state: TrainState) -> float:
        """Return the mean loss of held-out text."""
        batches = self.setup.valid(NUM_FINAL_BATCHES)
        return float(np.mean([float(step.eval(state, b)["loss"]) for b in batches]))


def _adamw_for(setup: Setup) -> optax.GradientTransformation:
    return optimizer_for(setup.options, schedule_for(setup.options))


def muon_for(setup: Setup) -> optax.GradientTransformation:
    """Return Muon for the matrices of the blocks, and AdamW for all other leaves.

    Muon's updates are scaled to AdamW's usual size (`consistent_rms=0.2`), so it takes the rate,
    the schedule, the decay and the clipping of AdamW, and nothing is tuned. Source: arXiv
    2502.16982.
    """
    training, schedule = with_rates(setup.options).training, schedule_for(setup.options)
    adam = dataclasses.replace(training, clip=0).make(schedule, beta2=BETA2)
    # The blocks are stacked: the first dim counts them.
    dims = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    muon = contrib.muon(
        schedule,
        weight_decay=training.weight_decay,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: dims, params),
    )

    def labels(params: Any) -> Any:
        return jax.tree.map(lambda x: "muon" if x.ndim == 3 else "adam", params)

    both = optax.multi_transform({"muon": muon, "adam": adam}, labels)
    return optax.chain(optax.clip_by_global_norm(training.clip), both)
