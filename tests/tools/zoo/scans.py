"""Plain pairs whose loss scans over stacked leaves, in as many ways as users may write it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tools.zoo.base import case, leaves, mse, vectors

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]


def finish(x: jax.Array, p: Params, batch: Batch) -> jax.Array:
    return mse(x @ p["last"], batch["y"])


@case(vectors, unit_elements=50)
def scan_with_constants() -> Any:
    """Stacked leaves, leaves that each turn reads whole, data by turn, and results by turn."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        noise = jax.random.normal(key, (3, *batch["x"].shape))

        def turn(x: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            w, b, noise = now
            x = jnp.tanh(x @ w @ p["shared"] + b * p["gain"]) + 0.1 * noise
            return x, x.mean(0)

        x, means = lax.scan(turn, batch["x"], (p["w"], p["b"], noise))
        return finish(x, p, batch) + jnp.sum(means**2)

    return leaves(w=(3, 6, 6), b=(3, 6), shared=(6, 6), gain=(6,), last=(6, 3)), loss


@case(vectors, unit_elements=50)
def scan_in_reverse() -> Any:
    """A reverse scan that a forward one with the same leaves precedes."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w), None

        x, _ = lax.scan(turn, batch["x"], p["w"], unroll=2)
        x, _ = lax.scan(turn, x, p["w"], reverse=True)
        return finish(x, p, batch)

    return leaves(w=(3, 6, 6), last=(6, 3)), loss


@case(vectors, unit_elements=50)
def nested_scans() -> Any:
    """Nested scans over leaves (L1, L2, ...) and (L1, ...). A leaf gives the inner scan's first
    carry."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        def inner(x: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            w, b = now
            x = jnp.tanh(x @ w + b)
            return x, x[0, 0]

        def outer(x: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
            w, b, start = now
            y, first = lax.scan(inner, x + start, (w, b))
            y, _ = lax.scan(inner, y, (w, b), reverse=True)
            return x + y, first.sum()

        x, firsts = lax.scan(outer, batch["x"], (p["w"], p["b"], p["start"]))
        return finish(x, p, batch) + firsts.sum()

    return leaves(w=(2, 3, 6, 6), b=(2, 3, 6), start=(2, 6), last=(6, 3)), loss


@case(vectors, unit_elements=50, rounds=True)
def cast_before_scan() -> Any:
    """Leaves are cast and transposed as stacks. One leaf has one number for each layer."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p["w"]).astype(jnp.float32)
        layers_last = jnp.transpose(p["t"], (2, 1, 0))  # (in, out, layer) -> (layer, out, in)

        def turn(x: jax.Array, now: Any) -> tuple[jax.Array, None]:
            w, t, heat = now
            return jnp.tanh(heat * (x @ w) @ t.T), None

        x, _ = lax.scan(turn, batch["x"], (half, layers_last, p["heat"]))
        return finish(x, p, batch)

    return leaves(w=(3, 6, 6), t=(6, 6, 3), heat=(3,), last=(6, 3)), loss


@case(vectors, unit_elements=50)
def scaled_before_scan() -> Any:
    """The scanned arrays are no leaves: scaled, stacked from leaves, and cut from a larger leaf."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        stacked = jnp.stack([p["a"], p["b"], p["a"]])

        def turn(x: jax.Array, now: Any) -> tuple[jax.Array, None]:
            w, s, c = now
            return jnp.tanh(x @ w + x @ s @ c), None

        x, _ = lax.scan(turn, batch["x"], (0.5 * p["w"], stacked, p["c"][1:]))
        return finish(x, p, batch)

    return leaves(w=(3, 6, 6), a=(6, 6), b=(6, 6), c=(4, 6, 6), last=(6, 3)), loss


@case(vectors, unit_elements=50)
def scanned_and_read_whole() -> Any:
    """A leaf is scanned along one dim, along another, and read whole before, between and after;
    one enters the same scan stacked and whole."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        x = batch["x"] @ p["w"].sum(0)

        def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w + p["w"][0, 0]), None

        x, _ = lax.scan(turn, x, p["w"])
        x = x + p["w"].mean()

        def column(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(x + w.mean(0)), None  # w: (layer, in)

        x, _ = lax.scan(column, x, jnp.moveaxis(p["w"], 2, 0))
        return finish(x, p, batch) + jnp.sum(p["w"] ** 2)

    return leaves(w=(3, 6, 6), last=(6, 3)), loss


@case(vectors, unit_elements=50)
def scan_without_carry() -> Any:
    """lax.map over experts: no carry, every turn reads the batch; the experts' losses are mixed
    by a leaf, and results follow from leaves alone."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> Any:
        def expert(now: Any) -> tuple[jax.Array, jax.Array]:
            w, v = now
            return jnp.tanh(batch["x"] @ w) @ v, jnp.sum(w**2)

        outputs, squares = lax.map(expert, (p["w"], p["v"]))
        y = jnp.tensordot(jax.nn.softmax(p["mix"]), outputs, 1)
        return mse(y, batch["y"]) + 0.01 * squares.sum(), {"first": squares[0]}

    return leaves(w=(4, 6, 6), v=(4, 6, 3), mix=(4,)), loss


@case(vectors, unit_elements=50)
def remat_in_scan() -> Any:
    """jax.checkpoint inside the body, with a scan inside it, and a carry with no gradient."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
            x = jnp.tanh(x @ v)
            return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

        def turn(carry: Any, now: Any) -> tuple[Any, jax.Array]:
            x, count, key = carry
            x = block(x, *now) * jax.random.bernoulli(key, 0.9, x.shape)
            return (x, count + 1, jax.random.split(key)[0]), jnp.float32(count)

        start = (batch["x"], 0, key)
        (x, count, _), counts = lax.scan(turn, start, (p["w"], p["v"]))
        return finish(x, p, batch) + 0 * (count + counts.sum())

    return leaves(w=(2, 3, 6, 6), v=(2, 6, 6), last=(6, 3)), loss


@case(vectors, unit_elements=50)
def carries() -> Any:
    """Carries that a turn overwrites, passes on, or replaces by a constant; one is a count."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        def turn(carry: Any, w: jax.Array) -> tuple[Any, Any]:
            x, _, gone, _, count = carry
            now = jnp.tanh(x @ w * gone + p["own"][count])
            return (now, x, jnp.ones_like(gone), w.sum(0), count + 1), 1.0

        start = (batch["x"], batch["x"], p["gone"], jnp.zeros(6), 0)
        (x, before, _, last, _), ones = lax.scan(turn, start, p["w"])
        return finish(x + 2 * before + last, p, batch) + ones.sum()

    return leaves(w=(4, 6, 6), own=(4, 6), gone=(6,), last=(6, 3)), loss


@case(vectors, unit_elements=50)
def stacked_one_element() -> Any:
    """A loop of one turn, dims of 1, and dims that no number of devices divides."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        def turn(x: jax.Array, now: Any) -> tuple[jax.Array, None]:
            w, v, one = now
            return jnp.tanh(x @ w) @ v * one, None

        x, _ = lax.scan(turn, batch["x"], (p["w"], p["v"], p["one"]))
        return finish(x, p, batch)

    return leaves(w=(1, 6, 7), v=(1, 7, 6), one=(1, 1), last=(6, 3)), loss
