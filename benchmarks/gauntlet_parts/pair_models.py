"""Models of Equinox and Haiku, which zeroxla takes as pairs of functions (init, loss)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from gauntlet_parts.case import Built, Case
from gauntlet_parts.losses import VOCABULARY, cross_entropy, distance, floats, labels, tokens

Loss = Callable[[Any, Any], Any]


def equinox_pair(make: Callable[[jax.Array], Any], loss: Loss, batch: Any, **others: Any) -> Built:
    """Return a module of Equinox: its arrays are the parameters.

    Args:
      make: `(key) -> module`.
      loss: `(module, batch) -> scalar`.
      batch, others: as for `Built`.
    """
    import equinox as eqx

    def is_array(x: Any) -> bool:
        return eqx.is_inexact_array(x) or isinstance(x, jax.ShapeDtypeStruct)

    _, static = eqx.partition(eqx.filter_eval_shape(make, jax.random.key(0)), is_array)

    def init(key: jax.Array, batch: Any) -> Any:
        return eqx.filter(make(key), eqx.is_inexact_array)

    def whole(params: Any, batch: Any, key: jax.Array) -> Any:
        return loss(eqx.combine(params, static), batch)

    logits = others.pop("logits", None)
    if (call := logits) is not None:

        def logits(params: Any, tokens: Any) -> Any:
            return call(eqx.combine(params, static), tokens)

    return Built(model=(init, whole), batch=batch, logits=logits, **others)


def haiku_pair(call: Callable[[Any], Any], loss: Loss, batch: Any, example: str) -> Built:
    """Return a function of Haiku.

    Args:
      call: `(entry of the batch) -> outputs`, with modules of Haiku inside.
      loss: `(outputs, batch) -> scalar`.
      example: the entry of the batch that `call` takes.
    """
    import haiku as hk

    transformed = hk.without_apply_rng(hk.transform(call))

    def init(key: jax.Array, batch: Any) -> Any:
        return transformed.init(key, batch[example])

    def whole(params: Any, batch: Any, key: jax.Array) -> Any:
        return loss(transformed.apply(params, batch[example]), batch)

    return Built(model=(init, whole), batch=batch)


def of_batch(module: Any, batch: Any) -> Any:
    return distance(jax.vmap(module)(batch["x"]))


def equinox_mlp() -> Built:
    import equinox as eqx

    make = lambda key: eqx.nn.MLP(8, 4, 16, 2, key=key)  # noqa: E731
    return equinox_pair(make, of_batch, {"x": floats(8)})


def equinox_convolutions() -> Built:
    import equinox as eqx

    def make(key: jax.Array) -> Any:
        first, second, third = jax.random.split(key, 3)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 8, 3, key=first),
                eqx.nn.GroupNorm(2, 8),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Conv2d(8, 8, 3, key=second),
                eqx.nn.Lambda(jnp.ravel),
                eqx.nn.Linear(8, 5, key=third),
            ]
        )

    def loss(module: Any, batch: Any) -> Any:
        return cross_entropy(jax.vmap(module)(batch["x"]), batch["label"])

    return equinox_pair(make, loss, {"x": floats(3, 8, 8), "label": labels(5)})


def equinox_recurrent() -> Built:
    import equinox as eqx

    def call(cell: Any, rows: Any) -> Any:
        start = (jnp.zeros(8), jnp.zeros(8))
        return jax.lax.scan(lambda carry, x: (cell(x, carry), None), start, rows)[0][0]

    def loss(cell: Any, batch: Any) -> Any:
        return distance(jax.vmap(lambda rows: call(cell, rows))(batch["x"]))

    make = lambda key: eqx.nn.LSTMCell(6, 8, key=key)  # noqa: E731
    return equinox_pair(make, loss, {"x": floats(5, 6)})


def equinox_attention() -> Built:
    import equinox as eqx

    def loss(module: Any, batch: Any) -> Any:
        return distance(jax.vmap(lambda x: module(x, x, x))(batch["x"]))

    make = lambda key: eqx.nn.MultiheadAttention(2, 8, key=key)  # noqa: E731
    return equinox_pair(make, loss, {"x": floats(5, 8)})


def haiku_mlp() -> Built:
    import haiku as hk

    call = lambda x: hk.nets.MLP([16, 16, 4])(x)  # noqa: E731
    return haiku_pair(call, lambda out, batch: distance(out), {"x": floats(8)}, "x")


def haiku_attention() -> Built:
    import haiku as hk

    def call(rows: Any) -> Any:
        length = rows.shape[1]
        x = hk.Embed(VOCABULARY, 32)(rows)
        mask = jnp.tril(jnp.ones((1, 1, length, length)))
        for _ in range(2):
            h = hk.LayerNorm(-1, True, True)(x)
            attention = hk.MultiHeadAttention(2, 16, w_init=hk.initializers.VarianceScaling())
            x = x + attention(h, h, h, mask=mask)
            h = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.Linear(32)(jax.nn.gelu(hk.Linear(48)(h)))
        return hk.Linear(VOCABULARY)(x)

    def loss(outputs: Any, batch: Any) -> Any:
        return cross_entropy(outputs[:, :-1], batch["tokens"][:, 1:])

    return haiku_pair(call, loss, {"tokens": tokens(9)}, "tokens")


def haiku_recurrent() -> Built:
    import haiku as hk

    def call(x: Any) -> Any:
        core = hk.LSTM(8)
        outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[0]), time_major=False)
        return outputs

    return haiku_pair(call, lambda out, batch: distance(out), {"x": floats(5, 6)}, "x")


def haiku_convolutions() -> Built:
    import haiku as hk

    def call(x: Any) -> Any:
        x = jax.nn.relu(hk.GroupNorm(2)(hk.Conv2D(8, 3)(x)))
        return hk.Linear(5)(hk.Conv2D(8, 3, stride=2)(x).mean((1, 2)))

    def loss(outputs: Any, batch: Any) -> Any:
        return cross_entropy(outputs, batch["label"])

    return haiku_pair(call, loss, {"x": floats(8, 8, 3), "label": labels(5)}, "x")


MODELS: dict[tuple[str, str], tuple[str, Callable[[], Built]]] = {
    ("equinox", "MLP"): ("other", equinox_mlp),
    ("equinox", "convolutions"): ("other", equinox_convolutions),
    ("equinox", "LSTM"): ("other", equinox_recurrent),
    ("equinox", "attention"): ("other", equinox_attention),
    ("dm-haiku", "MLP"): ("other", haiku_mlp),
    ("dm-haiku", "transformer"): ("other", haiku_attention),
    ("dm-haiku", "LSTM"): ("other", haiku_recurrent),
    ("dm-haiku", "convolutions"): ("other", haiku_convolutions),
}


def cases() -> list[Case]:
    """Return the cases."""
    return [
        Case(name=f"{package} {name}", kind=kind, package=package, build=build)
        for (package, name), (kind, build) in MODELS.items()
    ]
