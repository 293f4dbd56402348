"""What is cut out of an update: the equations around products of whole matrices, and no others."""

import jax
import jax.numpy as jnp
import optax
import pytest
from optax import contrib
from tools.matrix_optimizers import shampoo, soap

from zeroxla.program import compat
from zeroxla.program.trace import trace
from zeroxla.step.owners.matrix_pieces import matrix_pieces

PARAMS = {"a": (8, 24), "b": (16, 8), "c": (8, 24), "bias": (8,), "scale": ()}


def cut(optimizer, shapes=PARAMS):
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}

    def update(params, opt_state, grads):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    program, _ = trace(update, params, optimizer.init(params), params, opened=compat.forward_jaxpr)
    found = matrix_pieces(program)
    inside = {eq for piece in found.pieces for eq in piece.equations}
    outside = {eq for equations in found.outside for eq in equations}
    assert inside | outside == set(program.equations)
    assert inside.isdisjoint(outside)
    return found


def shapes(values):
    return sorted(v.aval.shape for v in values if v.aval.size > 3)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(1e-3),
        optax.lamb(1e-3),
        optax.adafactor(1e-3, min_dim_size_to_factor=4, momentum=0.9),
        optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3)),
        optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1e-3)),
        contrib.schedule_free_adamw(1e-3),
    ],
    ids=["adamw", "lamb", "adafactor", "lion", "noise", "schedule_free"],
)
def test_updates_by_element_and_norms_have_no_pieces(optimizer):
    assert cut(optimizer).pieces == ()


def test_of_muon_the_momentum_goes_in_and_its_orthogonalization_comes_out():
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), contrib.muon(optax.linear_schedule(0.1, 0.0, 9))
    )
    pieces = cut(optimizer).pieces
    assert [shapes(p.reads) for p in pieces] == [[PARAMS[name]] for name in "abc"]
    assert [shapes(p.results) for p in pieces] == [[PARAMS[name]] for name in "abc"]
    assert {p.turn for p in pieces} == {0}


@pytest.mark.parametrize(("optimizer", "num_in", "num_out"), [(shampoo, 5, 5), (soap, 7, 6)])
def test_sums_roots_and_update_of_a_matrix_are_one_piece(optimizer, num_in, num_out):
    """Each of the arrays of its state travels once, though it is read at several places."""
    pieces = cut(optimizer(0.1)).pieces
    assert len(pieces) == 3
    for piece in pieces:
        assert len(shapes(piece.reads)) == num_in
        assert len(shapes(piece.results)) == num_out


def test_a_norm_over_all_matrices_is_outside_and_parts_two_turns():
    optimizer = optax.chain(contrib.muon(-1.0), optax.clip_by_global_norm(1.0), contrib.muon(0.1))
    found = cut(optimizer)
    assert [p.turn for p in found.pieces] == [0, 0, 0, 1, 1, 1]


def test_products_with_vectors_are_outside():
    def power_iteration(g):
        v = g.T @ (g @ jnp.ones(g.shape[1]))
        return g / jnp.vdot(g @ v, g @ v)

    optimizer = optax.stateless(
        lambda grads, _: jax.tree.map(lambda g: power_iteration(g) if g.ndim > 1 else g, grads)
    )
    assert cut(optimizer).pieces == ()


def test_a_product_inside_a_loop_is_found():
    def squared(g):
        return jax.lax.fori_loop(0, 3, lambda i, x: x @ g.T @ g, g)

    optimizer = optax.stateless(
        lambda grads, _: jax.tree.map(lambda g: squared(g) if g.ndim > 1 else g, grads)
    )
    pieces = cut(optimizer).pieces
    assert [[eq.name for eq in piece.equations] for piece in pieces] == [["scan"]] * 3


def test_what_prints_stays_outside():
    def product(g):
        g = g @ g.T @ g
        jax.debug.print("{}", g[0, 0])
        return g @ g.T @ g

    optimizer = optax.stateless(
        lambda grads, _: jax.tree.map(lambda g: product(g) if g.ndim > 1 else g, grads)
    )
    found = cut(optimizer)
    assert len(found.pieces) == 3
    printed = [eq for equations in found.outside for eq in equations if eq.has_effects]
    assert len(printed) == 3
