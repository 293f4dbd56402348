"""What `sow` writes is an output of a call, as in a loop of flax's own that hands on parameters and
state alone: whatever it is made of, and whichever transformation it is written in."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.adapters import KEY, X
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.frontend import adapt

pytestmark = pytest.mark.usefixtures("quick_compilation")


def add(a, b):
    return a + b


REDUCES = {
    "sum": (add, lambda: 0.0),
    "from one": (lambda a, b: a * jnp.exp(b), lambda: 1.0),
    "largest": (jnp.maximum, lambda: -jnp.inf),
    "last": (lambda a, b: b, lambda: None),
    "mean": (lambda a, b: {"n": a["n"] + 1, "sum": a["sum"] + b}, lambda: {"n": 0, "sum": 0.0}),
    "list": (lambda a, b: [*a, b], list),
    "tuple": (lambda a, b: (*a, b), tuple),
}


class Block(nn.Module):
    """Sows into `into`. With `counts` a variable that is state lies in the same collection."""

    reduce: str = "sum"
    into: str = "losses"
    counts: bool = False
    late: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        gate = nn.softmax(nn.Dense(4)(x))
        if self.counts:
            calls = self.variable(self.into, "calls", lambda: jnp.zeros(()))
            x = x * (1 + 0.1 * calls.value)
            if self.is_mutable_collection("params") or self.has_rng("dropout"):
                calls.value = calls.value + 1
        if not (self.late and self.is_initializing()):
            reduce_fn, init_fn = REDUCES[self.reduce]
            value = jnp.sum(gate.mean(0) ** 2)
            self.sow(self.into, "auxiliary", value, reduce_fn=reduce_fn, init_fn=init_fn)
        return nn.Dense(x.shape[-1])(gate) + x, None


AXES = {"params": 0, "losses": 0, "intermediates": 0}
OVER = {"variable_axes": AXES, "split_rngs": {"params": True}}
KINDS = {
    "called twice": lambda **f: _twice(Block(**f)),
    "scan": lambda **f: nn.scan(nn.remat(Block), length=3, **OVER)(**f),
    "remat": lambda **f: _twice(nn.remat(Block)(**f)),
    "jit": lambda **f: _both(nn.jit(Block)(**f), nn.jit(Block)(**f)),
    "vmap": lambda **f: _rows(nn.vmap(Block, in_axes=0, **OVER)(**f)),
}


def _twice(block):
    return lambda x: block(block(x)[0])


def _both(one, two):
    return lambda x: two(one(x)[0])


def _rows(block):
    return lambda x: (block(x.reshape(2, 3, 4))[0].reshape(6, 4), None)


class Model(nn.Module):
    kind: str
    fields: dict

    @nn.compact
    def __call__(self, x):
        call = KINDS[self.kind](**self.fields)
        x, _ = call(x, None) if self.kind == "scan" else call(x)
        return nn.Dense(2)(x)


def auxiliary(variables):
    sown = {n: c for n, c in variables.items() if n in ("losses", "intermediates")}
    return sum(jnp.sum(x) for x in jax.tree.leaves(sown))


def loss(apply, x, *, train):
    y = apply(x)
    total = auxiliary(apply.variables)
    return (y**2).mean() + total, {"auxiliary": total}


def compare(model, apply_own, *, tol=1e-6):
    """Hold the losses and gradients of two steps against `apply_own(params, state)`, which returns
    (y, variables)."""
    adapted = adapt(model, loss)
    params, state = jax.jit(adapted.init)(KEY, X)

    def expected(params, state):
        y, variables = apply_own(params, state)
        return (y**2).mean() + auxiliary(variables)

    def found(params, state):
        value, _, state = adapted.loss(params, state, X, KEY, train=True)
        return value, state

    wanted_of = jax.jit(jax.value_and_grad(expected))
    found_of = jax.jit(jax.value_and_grad(found, has_aux=True))
    for _ in range(2):
        wanted = wanted_of(params, state)
        (value, state), grads = found_of(params, state)
        for a, b in zip(jax.tree.leaves((value, grads)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=tol, atol=1e-7)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    evaluate = jax.jit(adapted.loss, static_argnames="train")
    value, _, _ = evaluate(params, state, X, KEY, train=False)
    return state, value


CASES = [
    *((kind, "sum", "losses") for kind in KINDS),
    *(("called twice", reduce, "losses") for reduce in REDUCES if reduce != "sum"),
    ("scan", "from one", "losses"),
    ("jit", "mean", "losses"),
    ("called twice", "sum", "intermediates"),
]


@pytest.mark.parametrize(("kind", "reduce", "into"), CASES)
def test_what_sow_writes_begins_anew_in_each_call(kind, reduce, into):
    model = Model(kind, {"reduce": reduce, "into": into})

    def own(params, state):
        return model.apply({"params": params}, X, mutable=["losses", "intermediates"])

    state, _ = compare(model, own)
    assert state == {}


def test_sow_that_is_silent_while_parameters_are_made_is_found():
    model = Model("called twice", {"late": True})
    state, value = compare(model, lambda p, s: model.apply({"params": p}, X, mutable=["losses"]))
    assert state == {}
    assert value > 0


def test_variables_of_a_collection_into_which_sow_writes_stay_state():
    model = Model("remat", {"counts": True})

    def own(params, state):
        variables = {"params": params, **state}
        return model.apply(variables, X, mutable=["losses"], rngs={"dropout": KEY})

    state, _ = compare(model, own)
    (calls,) = jax.tree.leaves(state)
    assert calls == 2 + 2 + 2  # two calls in init, in each step two


def test_tuples_that_a_variable_holds_are_state():
    class Memory(nn.Module):
        @nn.compact
        def __call__(self, x):
            seen = self.variable("memory", "seen", lambda: (jnp.zeros(()), jnp.zeros(4)))
            y = nn.Dense(4)(x) + seen.value[1]
            if not self.is_initializing() and self.is_mutable_collection("memory"):
                seen.value = (seen.value[0] + 1, seen.value[1] + 1)
            return y

    def own(params, state):
        return Memory().apply({"params": params, **state}, X, mutable=["memory"])

    state, _ = compare(Memory(), own)
    assert state["memory"]["seen"][0] == 2


def test_perturb_makes_no_state_in_any_collection():
    class Perturbed(nn.Module):
        @nn.compact
        def __call__(self, x):
            return self.perturb("y", nn.Dense(2)(x), collection="zeros")

    state, _ = compare(Perturbed(), lambda p, s: (Perturbed().apply({"params": p}, X), {}))
    assert state == {}


def test_a_model_that_was_called_before_is_noted_too():
    model = Model("jit", {"reduce": "from one"})
    before = jax.eval_shape(model.init, KEY, X)  # JAX keeps the trace of each block.
    for _ in range(2):
        compare(model, lambda p, s: model.apply({"params": p}, X, mutable=["losses"]))
    assert jax.eval_shape(model.init, KEY, X) == before  # no note is left behind
