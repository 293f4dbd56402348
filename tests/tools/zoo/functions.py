"""Plain pairs (init, loss): control flow over leaves, custom rules, odd shapes.

Shape letters: B batch, D width.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tools.zoo.base import case, leaves, mse, normal, tokens, vectors

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]


@case(vectors, unit_elements=30)
def unused_leaves() -> Any:
    """Leaves that the loss never reads, or reads for a shape, or multiplies by zero."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        y = batch["x"] @ p["a"] + jnp.zeros(p["shape"].shape[1]) + 0 * p["zero"]
        return mse(y, batch["y"])

    return leaves(never=(5, 7), a=(6, 3), shape=(4, 3), zero=(3,)), loss


@case(vectors, unit_elements=30)
def odd_dims() -> Any:
    """Dims of 5 and 7, which no number of devices divides."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        h = jnp.tanh(batch["x"] @ p["a"] + p["b"])
        h = jnp.tanh(jnp.einsum("bi,ijk,bk->bj", h, p["c"], h))
        return mse(h @ p["d"], batch["y"])

    return leaves(a=(6, 5), b=(5,), c=(5, 7, 5), d=(7, 3)), loss


@case(lambda rows: tokens(rows, vocab=50257))
def odd_embedding() -> Any:
    """50257 x 13, read as a table and as a matrix."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        h = p["table"][batch["tokens"]].mean(1) * p["gain"]
        logits = h @ p["table"].T / 16
        return -jax.nn.log_softmax(logits)[:, :3].mean()

    return leaves(table=(50257, 13), gain=(13,)), loss


@case(vectors, unit_elements=8)
def scalars() -> Any:
    """Leaves of one element and of none; fewer elements than devices."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        y = batch["x"] @ p["w"] * p["scalar"] + p["one"] + p["ones"][0, 0] * p["pair"].sum()
        return mse(y, batch["y"]) + p["empty"].sum()

    shapes = {"scalar": (), "one": (1,), "ones": (1, 1), "pair": (2,), "empty": (0, 3), "w": (6, 3)}
    return leaves(**shapes), loss


@case(vectors, unit_elements=40)
def cond_over_leaves() -> Any:
    """The data choose between two branches, of which one reads a leaf that the other does not. A
    leaf chooses between two others."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        x = jnp.tanh(batch["x"] @ p["first"])

        def left(x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ p["left"]) @ p["both"]

        def right(x: jax.Array) -> jax.Array:
            return x @ (2 * p["both"]) + p["bias"]

        y = lax.cond(batch["x"].sum() > 0, left, right, x)
        y = lax.cond(p["bias"].sum() > 0, lambda y: y * p["gain"], lambda y: y - p["gain"], y)
        return mse(y @ p["last"], batch["y"])

    return leaves(first=(6, 8), left=(8, 8), both=(8, 8), bias=(8,), gain=(8,), last=(8, 3)), loss


@case(vectors, unit_elements=40)
def fori_over_leaves() -> Any:
    """A fori_loop with fixed bounds that reads and indexes leaves."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        def turn(i: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.tanh(x @ p["shared"] + p["own"][i])

        return mse(lax.fori_loop(0, 4, turn, batch["x"]) @ p["last"], batch["y"])

    return leaves(shared=(6, 6), own=(4, 6), last=(6, 3)), loss


@case(vectors, unit_elements=40)
def while_behind_stop_gradient() -> Any:
    """A while loop over leaves has no reverse derivative: one gets stopped leaves, the other's
    result is stopped, and a leaf is used after that."""

    def settle(w: jax.Array, x: jax.Array) -> jax.Array:
        def more(c: Any) -> jax.Array:
            return (c[0] < 5) & (jnp.abs(c[1]).max() > 0.1)

        return lax.while_loop(more, lambda c: (c[0] + 1, 0.5 * jnp.tanh(c[1] @ w)), (0, x))[1]

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        x = batch["x"]
        before = settle(lax.stop_gradient(p["a"]), lax.stop_gradient(jnp.tanh(x @ p["b"])))
        after = settle(p["a"], jnp.tanh(x @ p["b"]))
        h = jnp.tanh(jnp.concatenate([before, x @ p["c"]], 1) @ p["d"])
        return mse((h + lax.stop_gradient(after)) @ p["e"], batch["y"])

    return leaves(a=(6, 6), b=(6, 6), c=(6, 6), d=(12, 6), e=(6, 3)), loss


@jax.custom_vjp
def doubled(w: jax.Array, x: jax.Array) -> jax.Array:
    """tanh(x @ w), with twice its gradient."""
    return jnp.tanh(x @ w)


def _doubled_forward(w: jax.Array, x: jax.Array) -> Any:
    y = jnp.tanh(x @ w)
    return y, (w.T, x, y)


def _doubled_backward(saved: Any, ct: jax.Array) -> Any:
    w_t, x, y = saved
    ct = 2 * ct * (1 - y**2)
    return x.T @ ct, ct @ w_t


doubled.defvjp(_doubled_forward, _doubled_backward)


@case(vectors, unit_elements=40)
def custom_vjp() -> Any:
    """A rule that takes leaves, called twice with the same leaf, and on a leaf's transpose."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        h = doubled(p["a"], doubled(p["a"], batch["x"]))
        return mse(doubled(p["b"].T, h), batch["y"])

    return leaves(a=(6, 6), b=(3, 6)), loss


@jax.custom_jvp
def halved(w: jax.Array, x: jax.Array) -> jax.Array:
    """tanh(x @ w), with half of its derivative by w."""
    return jnp.tanh(x @ w)


@halved.defjvp
def _halved_jvp(primals: Any, tangents: Any) -> Any:
    w, x = primals
    y = halved(w, x)
    return y, (1 - y**2) * (0.5 * (x @ tangents[0]) + tangents[1] @ w)


@case(vectors, unit_elements=40)
def custom_jvp() -> Any:
    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        return mse(halved(p["b"], halved(p["a"], batch["x"])), batch["y"])

    return leaves(a=(6, 6), b=(6, 3)), loss


class Layer(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


@case(vectors, unit_elements=30)
def penalties() -> Any:
    """An L2 penalty over all leaves, one on a norm, and metrics that follow from leaves alone.
    The leaves are in lists and named tuples."""

    def init(key: jax.Array, batch: Batch) -> Any:
        keys = jax.random.split(key, 3)
        sizes = [(6, 9), (9, 5), (5, 3)]
        return {"layers": [Layer(normal(k, *s), jnp.ones(s[1])) for k, s in zip(keys, sizes)]}

    def loss(p: Any, batch: Batch, key: jax.Array) -> Any:
        x = batch["x"]
        for kernel, bias in p["layers"]:
            x = jnp.sin(x @ kernel + bias)
        square = sum(jnp.sum(w**2) for w in jax.tree.leaves(p))
        norm = jnp.linalg.norm(p["layers"][0].kernel)
        metrics = {"norm": jnp.sqrt(square), "bias": p["layers"][2].bias[0], "leaves": 6}
        return mse(x, batch["y"]) + 1e-2 * square + 0.1 * (norm - 1) ** 2, metrics

    return init, loss


@case(vectors, unit_elements=30)
def penalty_only() -> Any:
    """A loss that does not read the batch."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> Any:
        return jnp.sum(p["a"] ** 2) + jnp.sum(jnp.cos(p["a"] @ p["b"])), {"b": p["b"].mean()}

    return leaves(a=(6, 9), b=(9, 5)), loss


@case(vectors, unit_elements=30)
def inner_jit() -> Any:
    """Leaves enter, are cast in, and leave jitted functions; one is called twice."""

    @jax.jit
    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ jax.jit(lambda w: 1.5 * w.T)(w).astype(jnp.float32))

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        transposed = jax.jit(jnp.transpose)(p["b"])
        return mse(layer(p["a"], layer(p["a"], batch["x"])) @ transposed, batch["y"])

    return leaves(a=(6, 6), b=(3, 6)), loss


@case(vectors, unit_elements=30)
def flat_vector() -> Any:
    """All weights in one leaf, cut where they are used."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        w = p["flat"]
        h = jnp.tanh(batch["x"] @ w[:36].reshape(6, 6) + w[36:42])
        h = jnp.tanh(h @ w[42:78].reshape(6, 6) * p["gain"])
        return mse(h @ w[78:96].reshape(6, 3) + w[-1], batch["y"])

    return leaves(flat=(97,), gain=(6,)), loss


@case(vectors, unit_elements=30)
def per_example() -> Any:
    """jax.vmap of a loss of one example, with randomness of its own key for each."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        def one(x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
            keep = jax.random.bernoulli(key, 0.8, (8,))
            return mse(jnp.where(keep, jnp.tanh(p["a"] @ x), 0) @ p["b"], y)

        keys = jax.random.split(key, len(batch["x"]))
        return jax.vmap(one)(batch["x"], batch["y"], keys).mean()

    return leaves(a=(8, 6), b=(8, 3)), loss


@case(vectors, unit_elements=30)
def gradient_penalty() -> Any:
    """The loss holds the norm of a gradient by the input, and a Hessian-vector product."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        def net(x: jax.Array) -> jax.Array:
            return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"])

        def energy(x: jax.Array) -> jax.Array:
            return jnp.sum(net(x) ** 2)

        slope, bend = jax.jvp(jax.grad(energy), (batch["x"],), (jnp.ones_like(batch["x"]),))
        return mse(net(batch["x"]), batch["y"]) + jnp.mean(slope**2) + jnp.mean(bend**2)

    return leaves(a=(6, 8), b=(8, 3)), loss


@case(vectors, unit_elements=30)
def inner_training() -> Any:
    """The loss takes two gradient steps of its own first."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        def inner(p: Params) -> jax.Array:
            return mse(jnp.tanh(batch["x"] @ p["a"]) @ p["b"], batch["y"])

        for _ in range(2):
            p = jax.tree.map(lambda x, g: x - 0.1 * g, p, jax.grad(inner)(p))
        return inner(p)

    return leaves(a=(6, 8), b=(8, 3)), loss


@case(vectors, unit_elements=30)
def spectral() -> Any:
    """Complex numbers, a linear solve with a leaf, and a sort."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        wave = jnp.fft.rfft(batch["x"]) * (p["real"] + 1j * p["imaginary"])
        h = jnp.fft.irfft(wave, n=6) @ p["mix"]
        h = jnp.linalg.solve(p["system"] + 4 * jnp.eye(6), h.T).T
        return mse(jnp.sort(h, axis=1)[:, :3], batch["y"])

    return leaves(real=(4,), imaginary=(4,), mix=(6, 6), system=(6, 6)), loss


@case(vectors, unit_elements=30)
def random_layers() -> Any:
    """Keys split between layers, and a callback: values that are no floats cross every unit."""

    def loss(p: Params, batch: Batch, key: jax.Array) -> jax.Array:
        x = batch["x"]
        for i, k in enumerate(jax.random.split(key, 3)):
            key, own = jax.random.split(jax.random.fold_in(key, i))
            x = jnp.tanh(x @ p[f"layer_{i}"])
            x = jnp.where(jax.random.bernoulli(own, 0.8, x.shape), x, 0)
            x = x + 0.1 * jax.random.normal(k, x.shape)
            jax.debug.callback(lambda mean: None, x.mean())
        return mse(x @ p["last"], batch["y"])

    return leaves(layer_0=(6, 6), layer_1=(6, 6), layer_2=(6, 6), last=(6, 3)), loss
