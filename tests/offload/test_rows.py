"""Layers of a stacked leaf are updated a few at a time, if that gives the same bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.offload import batch, make, make_step
from tools.quick import thinned

from zeroxla import Offload
from zeroxla.offload.update.rows import run_rows, runs_of_rows, values_with_rows
from zeroxla.offload.update.sub_groups import SubGroups
from zeroxla.program.trace import read, run, trace

SHAPE = (6, 4, 3)


def normal(seed, shape=SHAPE):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def traced(fun, *arrays):
    program, _ = trace(fun, *arrays)
    return program, dict(zip(program.inputs, arrays, strict=True))


def padded(x):
    """As a leaf whose second dim is stored with padding."""
    return jnp.pad(jnp.sqrt(jnp.abs(x[:, :3])), ((0, 0), (0, 1), (0, 0)))


@pytest.mark.parametrize(
    "fun",
    thinned(
        [
            lambda a, b, s: jnp.clip(a, -1, 1) + jnp.full_like(b, s),
            lambda a, b, s: padded(a) - b**3,
        ],
        slow=[
            lambda a, b, s: a * s + jnp.where(b > 0, b, jnp.float32(2) / s),
            lambda a, b, s: jnp.where(s > 0, a, b).astype(jnp.bfloat16).astype(jnp.float32),
        ],
    ),
)
def test_rows_alone_give_the_same_bits(fun):
    a, b, s = normal(0), normal(1), np.float32(0.7)
    program, env = traced(fun, a, b, s)
    row_values = values_with_rows(program.equations, program.inputs, 0, 6)
    assert row_values is not None
    (out,) = program.outputs
    run(program.equations, env)
    found = []
    for rows in runs_of_rows(6, 4, 0):
        part = dict(zip(program.inputs, (rows.cut(a), rows.cut(b), s), strict=True))
        run_rows(program.equations, part, rows, row_values)
        found.append(read(part, out))
    assert [x.shape[0] for x in found] == [4, 2]
    np.testing.assert_array_equal(np.concatenate(found), read(env, out))


@pytest.mark.parametrize(
    "fun",
    [
        lambda a, b, s: a / jnp.sum(a),  # of all rows
        lambda a, b, s: a - a.mean(1, keepdims=True),  # of a row, but by a reduction
        lambda a, b, s: a[::-1] + b,
        lambda a, b, s: jnp.cumsum(a, 0),
        lambda a, b, s: a + np.arange(72, dtype=np.float32).reshape(SHAPE),
        lambda a, b, s: a + jax.random.normal(jax.random.key(0), SHAPE),
        lambda a, b, s: jnp.pad(a[1:], ((0, 1), (0, 0), (0, 0))),
        lambda a, b, s: a + b[0],
    ],
)
def test_what_is_of_several_rows_is_found(fun):
    program, _ = traced(fun, normal(0), normal(1), np.float32(0.7))
    assert values_with_rows(program.equations, program.inputs, 0, 6) is None


def test_arrays_without_these_rows_are_found():
    program, _ = traced(lambda a, b: (a * 2, b * 2), normal(0), normal(1, (4,)))
    assert values_with_rows(program.equations, program.inputs, 0, 6) is None


def sub_groups_of(optimizer, limit, layer_dims=None):
    params = {"a": normal(0), "b": normal(1, (5,))}
    state = optimizer.init(params)

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = (params, state, params)
    flags = [False] * 2 + [x.ndim > 0 for x in jax.tree.leaves(state)] + [False] * 2
    if layer_dims is None:
        leaves = jax.tree.leaves((params, state))
        layer_dims = [0 if x.shape == SHAPE else None for x in leaves]
    return SubGroups.of(update, args, flags, limit=limit, layer_dims=layer_dims)


def rows_of(sub_groups):
    return [g.rows and (g.rows.start, g.rows.stop) for g in sub_groups.groups]


def test_only_what_is_too_large_is_cut():
    adam = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    assert rows_of(sub_groups_of(adam, 1000)) == [None]
    assert rows_of(sub_groups_of(adam, 144)) == [None, None]
    assert rows_of(sub_groups_of(adam, 50)) == [(0, 2), (2, 4), (4, 6), None]
    assert rows_of(sub_groups_of(adam, 1)) == [*((i, i + 1) for i in range(6)), None]
    assert [g.is_last for g in sub_groups_of(adam, 50).groups] == [False, False, True, True]
    assert rows_of(sub_groups_of(adam, 50, [None] * 7)) == [None, None]


def test_what_is_not_of_single_rows_comes_whole():
    assert rows_of(sub_groups_of(optax.lamb(1e-2), 50)) == [None, None]


def test_what_others_read_is_not_written_row_by_row():
    """The update of `b` reads `a` as it was before the step."""

    def update(a, b, m, n):
        return a + m, b + n + a, m * 2, n * 2

    args = [jax.ShapeDtypeStruct(SHAPE, jnp.float32)] * 4
    offloaded = [False, False, True, True]
    sub_groups = SubGroups.of(update, args, offloaded, limit=36, layer_dims=[0] * 4)
    assert rows_of(sub_groups) == [None, (0, 3), (3, 6)]


@pytest.mark.slow
def test_a_step_brings_layers_of_a_scanned_model(mesh24, tmp_path):
    place = Offload(optimizer="disk", path=tmp_path, sub_group=1000)
    step, state = make(mesh24, place)
    state, _ = step(state, batch())
    update = step.disk.update_of(state)
    cut = [g for g in update.sub_groups.groups if g.rows is not None]
    assert len(cut) >= 8
    # Of the layers of the same leaves there is one program.
    assert len(set(update.group_programs)) < len(update.group_programs)
    for group in cut:
        size = sum(v.aval.size // v.aval.shape[0] * group.rows.count for v in group.arrays)
        assert size <= 1000 * 8 or group.rows.count == 1


def test_a_pipeline_is_not_cut_along_its_stages(mesh24):
    step = make_step(mesh24, Offload())
    placement = next(p for p in step.abstract_state(batch()).placements[0] if p.layer_dims)
    assert placement.unsplit_layers == 0
    assert dataclasses.replace(placement, stage_dim=0).unsplit_layers is None
