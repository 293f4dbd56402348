"""Small losses whose segments have few residuals, and all that could be kept of them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zeroxla.fetch.fetch_plan import make_plan
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.fetch.keeping.residual_graph import DeviceRates, ResidualGraph
from zeroxla.program.trace import Value, trace

ROWS, WIDTH = 8, 16
RATES = DeviceRates(flops_per_s=1e12, bytes_per_s=1e11)
MAX_WAYS = 2**18

X_BD = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
W_DD = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
W_LDD = jax.ShapeDtypeStruct((3, WIDTH, WIDTH), jnp.float32)


def perceptron(w, x):
    return jnp.sin(jnp.tanh(jnp.sin(x @ w) @ w) @ w) @ w


def norm(w, x):
    centred = x @ w
    centred -= centred.mean(1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, 1, keepdims=True) + 1e-5) @ w


def attention(w, x):
    scores = (x @ w) @ x.T
    scores -= lax.stop_gradient(scores.max(1, keepdims=True))
    weights = jnp.exp(scores)
    return (weights / weights.sum(1, keepdims=True)) @ (x @ w)


def gelu(w, x):
    y = x @ w
    return (y * (0.5 + 0.5 * jnp.tanh(0.8 * (y + 0.04 * y * y * y)))) @ w


def residual_block(w, x):
    for _ in range(2):
        x = x + jnp.tanh(x @ w) @ w
    return x


def shared_outputs(w, x):
    y = jnp.sin(x @ w)
    a, b = jnp.split(jnp.exp(y @ w), 2, axis=1)
    return jnp.sum(a * b, 1) + jnp.sum(jnp.cos(y) * jnp.tanh(y))


def scan_body(w, x):
    def turn(x, w):
        return jnp.tanh(jnp.sin(x @ w) @ w.T), None

    return lax.scan(turn, x, w)[0]


def wide_and_narrow(w, x):
    wide = jnp.tanh(jnp.concatenate([x @ w] * 6, 1))
    narrow = jnp.sin(wide.reshape(ROWS, 6, WIDTH).sum(1))
    return jnp.exp(narrow @ w) * jnp.sin(narrow)


LOSSES = {
    "perceptron": (perceptron, W_DD),
    "norm": (norm, W_DD),
    "attention": (attention, W_DD),
    "gelu": (gelu, W_DD),
    "residual block": (residual_block, W_DD),
    "shared outputs": (shared_outputs, W_DD),
    "scan body": (scan_body, W_LDD),
    "wide and narrow": (wide_and_narrow, W_DD),
}
"""name -> (function of a leaf and rows, the leaf's shape)."""


def plan_of(function, w, x=X_BD, **options):
    """Return the fetch plan of the sum of a function's results."""
    program, _ = trace(lambda w, x: jnp.sum(function(w, x)), w, x)
    leaf = program.inputs[0]
    options = {"unit_elements": None, **options}
    return make_plan(program, [leaf], [leaf], split_dims={leaf: w.ndim - 1}, **options)


LAYERS = {
    "narrow": lambda w, x: jnp.tanh(jnp.sin(x @ w)),
    "wide": lambda w, x: jnp.tanh(jnp.concatenate([jnp.sin(x)] * 3, 1)[:, :WIDTH] @ w),
    "two products": lambda w, x: jnp.sin(jnp.tanh(x @ w) @ w),
}
"""name -> function of a leaf and rows, for several layers."""


def plan_of_layers(layer, count, *, gathered=True):
    """Return the plan of layers with a leaf each, a segment for each leaf; and the program."""

    def loss(*args):
        *leaves, x = args
        for w in leaves:
            x = layer(w, x)
        return jnp.sum(x)

    program, _ = trace(loss, *[W_DD] * count, X_BD)
    leaves = program.inputs[:-1]
    own = leaves if gathered else ()
    split = dict.fromkeys(own, 1)
    return make_plan(program, own, leaves, unit_elements=1, split_dims=split), program


def places_of(plan, rates=RATES):
    """Return the places of a plan, in the order of forward."""
    return PlaceFinder(rates).find(plan, {*plan.leaves, *plan.inputs})


def graph_of(function, w, rates=RATES):
    """Return the graph of the one segment, loops looked into, that has residuals."""
    (graph,) = [p.graph for p in places_of(plan_of(function, w), rates) if p.graph.residuals]
    return graph


def graph_from(rng, *, num_equations, num_residuals, host=False):
    """Return a graph made of random numbers: chains that branch and join, some equations with two
    results, some that only rename, some that need leaves.

    Args:
      rng: NumPy's generator.
      num_equations, num_residuals: how many.
      host: whether values may wait on the host.
    """
    maker, sizes = [-1, -1], [int(n) for n in rng.integers(0, 9, 2)]
    reads, renames = [], []
    for eq in range(num_equations):
        count = int(rng.integers(1, 4))
        near = rng.integers(max(0, len(maker) - 5), len(maker), count)
        reads.append(tuple(dict.fromkeys(int(v) for v in near)))
        renames.append(bool(rng.random() < 0.15))
        results = 1 if renames[-1] or rng.random() < 0.8 else 2
        maker += [eq] * results
        sizes += [int(n) for n in rng.integers(1, 9, results)]
    num_leaves = int(rng.integers(0, 3))
    needs = [rng.random(num_leaves) < 0.3 for _ in reads]
    renamed = np.array(renames)
    residuals = rng.choice(len(maker), min(num_residuals, len(maker)), replace=False)
    seconds = np.where(renamed, 0, rng.integers(1, 40, num_equations)).astype(float)
    away = rng.integers(1, 30, len(maker)) if host else np.full(len(maker), np.inf)
    return ResidualGraph(
        values=tuple(Value(None) for _ in maker),
        bytes=tuple(sizes),
        maker=tuple(maker),
        residuals=tuple(int(v) for v in residuals),
        seconds=tuple(seconds.tolist()),
        flops=tuple(seconds.tolist()),
        reads=tuple(reads),
        renames=tuple(renames),
        fused=tuple((rng.random(num_equations) < 0.5).tolist()),
        gathers=tuple(tuple(np.flatnonzero(n).tolist()) for n in needs),
        gather_seconds=tuple(rng.integers(1, 20, num_leaves).astype(float).tolist()),
        host_seconds=tuple(away.astype(float).tolist()),
    )


@dataclasses.dataclass(frozen=True)
class Everything:
    """The bytes and seconds of every way to keep values of a graph.

    Attributes:
      num_bytes: shape [ways]: of what is kept on the device.
      own_bytes: shape [ways]: of what is kept and of the residuals.
      seconds: shape [ways].
    """

    num_bytes: np.ndarray
    own_bytes: np.ndarray
    seconds: np.ndarray

    def best_within(self, limit):
        """Return the least seconds within so many bytes; infinite if nothing fits."""
        return self.seconds[self.num_bytes <= limit].min(initial=np.inf)

    def best_at(self, price):
        """Return the least seconds + price * bytes."""
        return (self.seconds + price * self.num_bytes).min()

    @staticmethod
    def of(graph: ResidualGraph, *, host: bool = False):
        """Enumerate them: each value that can be made again is kept, is not kept or, with `host`,
        waits on the host; what nothing makes is kept, or waits, where it is needed."""
        free = [v for v in range(len(graph.maker)) if graph.maker[v] >= 0 or host]
        options = [[*["none"] * (graph.maker[v] >= 0), "kept", *["away"] * host] for v in free]
        sizes = tuple(map(len, options))
        assert np.prod(sizes, dtype=float) <= MAX_WAYS, "too many ways"
        ways = np.indices(sizes, np.int8).reshape(len(free), -1)
        count = ways.shape[1]

        def is_in(v, state):
            if v not in free:
                return np.full(count, state == "kept")
            names, way = options[free.index(v)], ways[free.index(v)]
            return way == (names.index(state) if state in names else -1)

        needed = np.zeros((len(graph.maker), count), bool)
        needed[list(graph.residuals)] = True
        runs = np.zeros((len(graph.seconds), count), bool)
        gathered = np.zeros((len(graph.gather_seconds), count), bool)
        # Equations stand in order, so that backwards all readers come before a value's maker.
        for eq in reversed(range(len(graph.seconds))):
            for v in (v for v in free if graph.maker[v] == eq):
                runs[eq] |= needed[v] & is_in(v, "none")
            needed[list(graph.reads[eq])] |= runs[eq]
            gathered[list(graph.gathers[eq])] |= runs[eq]
        num_bytes, own_bytes, seconds = np.zeros((3, count))
        for v, size in enumerate(graph.bytes):
            kept, away = needed[v] & is_in(v, "kept"), needed[v] & is_in(v, "away")
            num_bytes += np.where(kept, size, 0)
            seconds += np.where(away, graph.host_seconds[v], 0)
        kept = np.array([needed[v] & is_in(v, "kept") for v in range(len(graph.maker))])
        there = kept | np.isin(np.arange(len(graph.maker)), graph.residuals)[:, None]
        for v in reversed(range(len(graph.maker))):
            # What renames another value, and what is fused into its readers, takes no memory.
            eq = graph.maker[v]
            passed = np.full(count, eq >= 0 and graph.renames[eq])
            read = graph.reads[eq][:1] if eq >= 0 and graph.renames[eq] else graph.reads[eq]
            if eq >= 0 and graph.fused[eq]:
                passed |= runs[eq]
            if eq >= 0:
                there[list(read)] |= there[v] & passed
            own_bytes += np.where(there[v] & ~passed, graph.bytes[v], 0)
        seconds += np.array(graph.seconds) @ runs + np.array(graph.gather_seconds) @ gathered
        return Everything(num_bytes, own_bytes, seconds)
