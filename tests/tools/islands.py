"""Islands that are threads of this process, and what they train."""

import concurrent.futures
import contextlib

import jax
import numpy as np
import optax

import zeroxla
from zeroxla.models import MLP

KEY = jax.random.key(0)
MODEL = MLP(widths=(16,), classes=4)
ROWS = 16
TOKEN = "between islands"


def batches(num):
    """Return batches of ROWS rows."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(num, ROWS, 6)).astype(np.float32)
    labels = rng.integers(0, 4, (num, ROWS)).astype(np.int32)
    return [{"image": x, "label": y} for x, y in zip(images, labels, strict=True)]


def part(batch, i, num):
    """Return an island's rows of a batch."""
    return {n: x[i * len(x) // num : (i + 1) * len(x) // num] for n, x in batch.items()}


@contextlib.contextmanager
def coordinator(num, **options):
    """Run the coordinator of so many islands."""
    options = {"deadline": 20.0, **options}
    with zeroxla.Coordinator("127.0.0.1:0", TOKEN, num_islands=num, **options) as found:
        yield found


def make_step(outer, index, num, optimizer=None, *, model=MODEL, mesh=None, **config):
    """Return the step of an island, with its share of 8 devices, 4 at most.

    Args:
      outer: how they exchange.
      index: the number of the island.
      num: the number of islands.
      optimizer: the inner optimizer; None takes gradient descent.
      model: the model.
      mesh: other arguments of `make_mesh`.
      **config: other options.
    """
    size = min(4, 8 // num)
    devices = jax.devices()[index * size : (index + 1) * size]
    config = zeroxla.ZeroConfig(**{"outer": outer, "persistence_threshold": 0, **config})
    mesh_of_island = zeroxla.make_mesh(**{"nodes": 1, **(mesh or {})}, devices=devices)
    return zeroxla.make_step(model, mesh_of_island, optimizer or optax.sgd(0.1), config=config)


def in_threads(function, num):
    """Call a function in so many threads with their numbers; return the results."""
    with concurrent.futures.ThreadPoolExecutor(num) as pool:
        return list(pool.map(function, range(num)))


def trained(outer, num, rows, *, settle=True, optimizer=None, each=None, address=None, **options):
    """Train islands, each in a thread of its own.

    Args:
      outer: how they exchange.
      num: the number of islands.
      rows: the batches, which islands share.
      settle: merge what is under way at the end.
      optimizer: the inner optimizer.
      each: called with (island, state, number of steps) before each step; returns the state.
      address: the coordinator's; None starts one.
      **options: of `make_step`.

    Returns:
      The islands, which are closed; their states; and the metrics of their steps.
    """

    def run(index):
        step = make_step(outer, index, num, optimizer, **options)
        with zeroxla.Island(step, place, TOKEN, slot=index, timeout=60) as island:
            state, metrics = island.init(KEY, part(rows[0], index, num)), []
            for done, batch in enumerate(rows):
                state = state if each is None else each(island, state, done)
                state, found = island(state, part(batch, index, num))
                metrics.append(found)
            return island, (island.settle(state) if settle else state), metrics

    with contextlib.ExitStack() as stack:
        # No island is late here: one that compiles longer than another is waited for.
        place = address or stack.enter_context(coordinator(num, deadline=120.0)).address
        found = in_threads(run, num)
    islands, states, metrics = zip(*found, strict=True)
    return islands, states, metrics


def params(state):
    """Return an island's own parameters, whole."""
    return jax.tree.map(np.asarray, zeroxla.full_params(state.inner))


def copies(state):
    """Return the outer parameters, whole."""
    return [np.asarray(fragment.copy) for fragment in state.outer]
