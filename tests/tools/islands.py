"""Islands that are threads of this process, and what they train."""

import concurrent.futures

import jax
import numpy as np
import optax

import zeroxla
from zeroxla.models import MLP
from zeroxla.step.islands.island import Island
from zeroxla.step.islands.link import LocalLink

KEY = jax.random.key(0)
MODEL = MLP(widths=(16,), classes=4)
ROWS = 16


def batches(num):
    """Return batches of ROWS rows."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(num, ROWS, 6)).astype(np.float32)
    labels = rng.integers(0, 4, (num, ROWS)).astype(np.int32)
    return [{"image": x, "label": y} for x, y in zip(images, labels, strict=True)]


def part(batch, i, num):
    """Return an island's rows of a batch."""
    return {n: x[i * len(x) // num : (i + 1) * len(x) // num] for n, x in batch.items()}


def made(outer, num, optimizer=None, *, links=None, model=MODEL, mesh=None, **config):
    """Return islands of this process, each with its share of 8 devices, 4 at most.

    Args:
      outer: how they exchange.
      num: their number.
      optimizer: the inner optimizer; None takes gradient descent.
      links: join them; None takes links between threads.
      model: the model.
      mesh: other arguments of `make_mesh`.
      **config: other options.
    """
    size = min(4, 8 // num)
    config = zeroxla.ZeroConfig(**{"outer": outer, "persistence_threshold": 0, **config})
    found = []
    for i, link in enumerate(links or LocalLink.make(num)):
        devices = jax.devices()[i * size : (i + 1) * size]
        mesh_of_island = zeroxla.make_mesh(**{"nodes": 1, **(mesh or {})}, devices=devices)
        step = zeroxla.make_step(model, mesh_of_island, optimizer or optax.sgd(0.1), config=config)
        found.append(Island(step, link))
    return found


def trained(islands, rows, *, settle=True):
    """Train each island in a thread of its own; return the states and the metrics of the steps."""

    def run(island):
        index, num = island.link.index, island.link.num
        state, metrics = island.init(KEY, part(rows[0], index, num)), []
        for batch in rows:
            state, found = island(state, part(batch, index, num))
            metrics.append(found)
        return (island.settle(state) if settle else state), metrics

    with concurrent.futures.ThreadPoolExecutor(len(islands)) as pool:
        found = list(pool.map(run, islands))
    return [state for state, _ in found], [metrics for _, metrics in found]


def params(state):
    """Return an island's own parameters, whole."""
    return jax.tree.map(np.asarray, zeroxla.full_params(state.inner))


def copies(state):
    """Return the outer parameters, whole."""
    return [np.asarray(fragment.copy) for fragment in state.outer]
