"""`Scan`: the parts of a scan equation, on every version of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zeroxla.program.scan import Scan
from zeroxla.program.trace import run, trace

W, B, X = jnp.arange(1.0, 4), jnp.array(2.0), jnp.array(0.5)


def function(w, b, x):
    """Two carries, a constant, two slices, one stacked result; from the last slice to the first."""

    def turn(carry, row):
        total, turns = carry
        return (total * row[0] + b * row[1], turns + 1), total - row[1]

    return lax.scan(turn, (x, 0), (w, 2 * w), reverse=True, unroll=2)


def scan_of(function, *args):
    program, _ = trace(function, *args)
    (eq,) = (eq for eq in program.equations if eq.name == "scan")
    return program, Scan(eq)


@pytest.mark.smoke
def test_operands_and_results_are_told_apart():
    program, scan = scan_of(function, W, B, X)
    (w, b, x), doubled = program.inputs, program.equations[0].outputs[0]
    assert list(scan.consts) == [b]
    assert scan.carry[0] is x
    assert list(scan.xs) == [w, doubled]
    assert (scan.num_consts, scan.num_carry, scan.first_x) == (1, 2, 3)
    assert list(scan.ys) == [scan.equation.outputs[2]]
    assert (scan.length, scan.reverse) == (3, True)
    consts, carry, xs = scan.split_inputs("abcde")
    assert (consts, carry, xs) == ("a", "bc", "de")
    assert scan.split_outputs("xyz") == ("xy", "z")


def test_the_body_is_one_turn():
    _, scan = scan_of(function, W, B, X)
    body = scan.body()
    assert [v.aval.shape for v in body.inputs] == [()] * 5
    assert not set(body.inputs) & set(scan.body().inputs)
    total, turns, y = body(B, X, 0, W[2], 2 * W[2])
    np.testing.assert_allclose([total, turns, y], [X * 3 + 12, 1, X - 6])


@pytest.mark.parametrize("back", [False, True])
def test_another_body_runs_in_its_place(back):
    program, scan = scan_of(function, W, B, X)
    body, length = scan.body(), scan.length
    env = dict(zip(program.inputs, (W, B, X), strict=True))
    run(program.equations[:1], env)
    xs = [env[v] for v in scan.xs]
    xs = [x[::-1] for x in xs] if back else xs

    def turn(carry, slices):
        return scan.split_outputs(body(B, *carry, *slices))

    carry, ys = scan.run(turn, [X, jnp.array(0)], xs, back=back)
    (total, turns), stacked = function(W, B, X)
    np.testing.assert_allclose([*carry], [total, turns], rtol=1e-6)
    np.testing.assert_allclose(ys[0][::-1] if back else ys[0], stacked, rtol=1e-6)
    assert length == turns
    text = str(jax.make_jaxpr(lambda xs: scan.run(turn, [X, 0], xs, length=2))([x[:2] for x in xs]))
    assert "length=2" in text
    assert "unroll=2" in text
