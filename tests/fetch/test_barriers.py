"""Barriers: the activations that XLA must not compute again, for which it would keep gathered
leaves."""

import jax
import jax.numpy as jnp
import optax
import pytest

import zeroxla
from zeroxla.fetch.barriers import values_behind_barriers
from zeroxla.program.trace import trace

X_BD = jax.ShapeDtypeStruct((2, 4), jnp.float32)
W_DD = jax.ShapeDtypeStruct((4, 4), jnp.float32)
B_D = jax.ShapeDtypeStruct((4,), jnp.float32)
IDS_B = jax.ShapeDtypeStruct((2,), jnp.int32)


def held(function, *shapes, num_leaves):
    """Return the primitives that make the held values, in order."""
    program, _ = trace(function, *shapes)
    values = values_behind_barriers(program, program.inputs[:num_leaves])
    return [eq.name for eq in program.equations if values.intersection(eq.outputs)]


def test_a_biased_matmul_is_held_before_what_follows_from_it():
    assert held(lambda w, b, x: jnp.tanh(x @ w + b), W_DD, B_D, X_BD, num_leaves=2) == ["add"]


def test_of_a_chain_that_reads_leaves_the_end_is_held():
    def affine(scale, bias, x):
        return jnp.tanh(x * scale + bias)

    assert held(affine, B_D, B_D, X_BD, num_leaves=2) == ["add"]


def test_a_result_that_reads_a_leaf_is_held():
    assert held(lambda b, x: x * b, B_D, X_BD, num_leaves=1) == ["mul"]
    rows = held(lambda w, ids: w.at[ids].get(mode="clip"), W_DD, IDS_B, num_leaves=1)
    assert rows == ["gather"]


def test_nothing_is_held_behind_a_matmul():
    def norm_then_matmul(scale, w, x):
        return jnp.tanh((x * scale) @ w)

    assert held(norm_then_matmul, B_D, W_DD, X_BD, num_leaves=2) == []


def test_what_follows_from_leaves_alone_is_not_held():
    assert held(lambda w, b, x: x @ (w + b).T, W_DD, B_D, X_BD, num_leaves=2) == []


@jax.custom_vjp
def counted(w, x):
    """Adds 1 if a gradient is taken."""
    return x @ w


counted.defvjp(
    lambda w, x: (x @ w + 1, (w, x)), lambda saved, ct: (saved[1].T @ ct, ct @ saved[0].T)
)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_evaluation_is_not_differentiated(mesh24, checkpointed):
    def init(key, batch):
        return {"w": jnp.ones((4, 8))}

    def loss(params, batch, key):
        rule = jax.checkpoint(counted) if checkpointed else counted
        return jnp.mean(rule(params["w"], batch))

    config = zeroxla.ZeroConfig(persistence_threshold=0)
    step = zeroxla.make_step((init, loss), mesh24, optax.sgd(0.0), config=config)
    batch = jnp.ones((8, 4))
    state = step.init(jax.random.key(0), batch)
    assert float(step.eval(state, batch)["loss"]) == 4
    assert float(step(state, batch)[1]["loss"]) == 5
