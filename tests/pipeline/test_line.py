"""A model's trace, cut at every place: the stretches, one after another, are the whole model."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tools.cut_models import MODELS, AllStates, Unrolled, vectors
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla.frontend import adapt
from zeroxla.pipeline.line import BlockLoop, make_line
from zeroxla.pipeline.line_layers import layers_of
from zeroxla.pipeline.line_stage import make_stage
from zeroxla.pipeline.model_shapes import ModelShapes
from zeroxla.program.paths import paths_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
KEY = jax.random.key(3)


def line_of(model, batch, *, train=True):
    """The line of a model, its adapted functions, and its parameters and state."""
    adapted = adapt(model)
    params, state = jax.jit(adapted.init)(KEY, batch)
    shapes = ModelShapes(
        params=params,
        model_state=state,
        batch=batch,
        key=KEY,
        kinds=((),) * len(jax.tree.leaves(params)),
    )
    return make_line(adapted, shapes.plain, train=train), adapted, params, state


def run_stages(line, places, params, state, batch):
    """Run the stages between places; return (loss, metrics) and the new state."""
    paths = [path for path, _ in paths_of(state)]
    whole, x = jax.tree.leaves(params), None
    old = jax.tree.leaves(state)
    new = list(old)
    for start, end in itertools.pairwise((0, *places, line.length)):
        stage = make_stage(line, start, end, paths)
        x, found = stage.run([p.cut(whole) for p in stage.pieces], x, batch, KEY, old)
        for share in stage.keeps:
            rows = slice(*share.rows) if share.rows else Ellipsis
            new[share.leaf] = new[share.leaf].at[rows].set(found[share.leaf][rows])
    return x, jax.tree.unflatten(jax.tree.structure(state), new)


@pytest.mark.parametrize(
    ("name", "train"),
    thinned([], slow=itertools.product(MODELS, (True, False)), rows=True),
)
def test_any_place_may_be_cut(name, train):
    """Two stages at some places of the line, and as many stages as layers."""
    make, batch_of = MODELS[name]
    batch = jax.tree.map(jnp.asarray, batch_of(2))
    line, adapted, params, state = line_of(make(), batch, train=train)
    loss, metrics, new_state = jax.jit(lambda p, s: adapted.loss(p, s, batch, KEY, train=train))(
        params, state
    )
    layers = layers_of(line, [path for path, _ in paths_of(params)])[0]
    cuts = [(p,) for p in range(1, line.length, max(1, line.length // 4))]
    for places in (*cuts, tuple(layers[1:])):
        run = jax.jit(lambda p, s, places=places: run_stages(line, places, p, s, batch))
        (found, others), mine = run(params, state)
        np.testing.assert_allclose(found, loss, rtol=2e-5)
        for a, b in zip(jax.tree.leaves(others), jax.tree.leaves(metrics), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5)
        for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(new_state), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_layers_are_blocks_and_modules_by_their_names():
    line, _, params, _ = line_of(Unrolled(blocks=3), vectors(2))
    starts, layers = layers_of(line, [path for path, _ in paths_of(params)])
    assert [layer.name for layer in layers] == ["first", "block_0", "block_1", "block_2", "last"]
    assert [layer.kind for layer in layers] == ["first", "block", "block", "block", "last"]
    sizes = [sum(x.size for x in jax.tree.leaves(params[layer.name])) for layer in layers]
    assert [layer.parameters for layer in layers] == sizes
    assert len(starts) == len(layers)
    assert {layer.bytes_after for layer in layers[:-1]} == {2 * 6 * 8 * 4}  # one activation


def test_blocks_that_are_written_out_run_as_a_loop():
    line, *_ = line_of(Unrolled(blocks=5, dropout=0.2), vectors(2))
    (loop,) = (part for part in line.parts if isinstance(part, BlockLoop))
    assert loop.scan.length == 5


def test_what_later_layers_read_of_each_block_travels_with_the_activations():
    line, *_ = line_of(AllStates(), vectors(2))
    (start,) = (s for p, s in zip(line.parts, line.starts) if isinstance(p, BlockLoop))
    # The carry, and the results of the loop's blocks so far.
    assert [p.turns for p in line.passed(start + 2)] == [2, 2]
    assert line.bytes_across[start + 2] > line.bytes_across[start]
