"""What the islands of faults_islands.py train, and how a run is set up. No JAX at import."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROWS, LENGTH, VOCABULARY = 8, 64, 256
MODEL = {"vocab": VOCABULARY, "length": LENGTH, "layers": 2, "width": 64, "heads": 4}
RATE, WARM_UP = 3e-3, 50
VALID_ROWS, NUM_VALID_BATCHES = 64, 8
EVERY, FRAGMENTS, DELAY = 20, 2, 4
"""Of the outer options: a fragment is exchanged each `EVERY` steps, another one each 10 steps."""
TOKEN = "between islands"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What a process of a run is told, as a JSON file.

    Attributes:
      folder: of the run: logs, and snapshots of the outer parameters.
      corpus: a file with the training text, uint8 of `numpy.save`.
      compiled: the folder in which compiled programs are kept.
      coordinator: where the coordinator listens.
      deadline: the coordinator's.
      islands: their number.
      step_s: the seconds of a step; what computing does not need is slept.
      seed: of the parameters and the data.
    """

    folder: str
    corpus: str
    compiled: str
    coordinator: str
    deadline: float
    islands: int
    step_s: float
    seed: int

    def save(self) -> Path:
        """Write the file, and return its path."""
        path = Path(self.folder) / "task.json"
        path.write_text(json.dumps(dataclasses.asdict(self)))
        return path

    @staticmethod
    def load(path: str) -> Task:
        """Return what the file says."""
        return Task(**json.loads(Path(path).read_text()))


def batch_of(corpus: np.ndarray, seed: int, slot: int, number: int) -> dict[str, np.ndarray]:
    """Return a batch of a slot's data by its number, int32 [ROWS, LENGTH + 1]. It depends on
    nothing else, so an island that comes back goes on where its slot was."""
    random = np.random.default_rng((seed, slot, number))
    starts = random.integers(0, len(corpus) - LENGTH - 1, ROWS)
    return {"tokens": corpus[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)}


def make_island_step() -> Any:
    """Return the step of an island of one device. Imports JAX."""
    import optax

    from zeroxla import Outer, WireFormat, ZeroConfig, make_mesh, make_step
    from zeroxla.models import GPT

    wire = WireFormat(bits=4, block=128, hadamard=32)
    outer = Outer(every=EVERY, wire=wire, fragments=FRAGMENTS, delay=DELAY)
    schedule = optax.linear_schedule(0.0, RATE, WARM_UP)
    config = ZeroConfig(outer=outer, persistence_threshold=0)
    return make_step(GPT(**MODEL), make_mesh(), optax.adamw(schedule, b2=0.95), config=config)


def keep_compiled(folder: str) -> None:
    """Simulate one device, and keep every compiled program in a folder."""
    import jax

    import zeroxla

    zeroxla.simulate(1)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def say(what: str, **facts: Any) -> None:
    """Print an event for the supervisor, with the time and this process' seconds on a core."""
    clocks = {"at": time.monotonic(), "cpu": round(time.process_time(), 3)}
    line = json.dumps({"what": what, **clocks, **facts})
    sys.stdout.write(f"@{line}\n")
    sys.stdout.flush()
