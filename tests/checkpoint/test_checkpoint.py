"""Checkpoints are bit-exact on any mesh and for any optimizer, and open without zeroxla."""

import itertools

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from optax import contrib
from tools.checkpoints import (
    KEY,
    MESHES,
    Net,
    assert_same,
    batch_of,
    logical,
    run,
    saved,  # noqa: F401
    step_on,
    steps,  # noqa: F401
)
from tools.quick import quick_compilation, thinned  # noqa: F401

from zeroxla import Checkpointer, Feedback, WireFormat

pytestmark = pytest.mark.usefixtures("quick_compilation")


QUICK = [((2, 4), (2, 4)), ((2, 4), (3, 2))]
PAIRS = [*itertools.product(MESHES, MESHES)]


@pytest.mark.parametrize(
    ("source", "to"),
    thinned(QUICK, slow=[pair for pair in PAIRS if pair not in QUICK], rows=True),
)
def test_a_state_opens_on_any_mesh(steps, saved, source, to):
    folder, kept, losses = saved[source]
    with Checkpointer(folder) as checkpointer:
        restored = checkpointer.restore(steps[to])
    assert (restored.number, restored.position) == (3, {"next": 3})
    assert_same(logical(restored.state), kept)
    shapes = steps[to].shapes()
    for x, y in zip(jax.tree.leaves(restored.state), jax.tree.leaves(shapes), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    _, found = run(steps[to], restored.state, 3, 5)
    if source == to:
        assert found == losses
    else:
        np.testing.assert_allclose(found, losses, rtol=1e-5)


@pytest.mark.smoke
def test_orbax_alone_reads_it(saved):
    folder, (params, *_), _ = saved[2, 4]
    found = ocp.StandardCheckpointer().restore(folder / "3" / "state")
    assert_same(found["params"]["Dense_0"], params["Dense_0"])


# what is in it


def test_what_is_inside_is_said_without_reading_it(saved):
    folder, (params, *_), _ = saved[2, 4]
    with Checkpointer(folder) as checkpointer:
        about = checkpointer.describe()
    assert (about.number, about.position, about.mesh) == (3, {"next": 3}, {"node": 2, "device": 4})
    leaf = about.leaves["params", "Dense_0", "kernel"]
    assert (leaf.shape, leaf.dtype) == (params["Dense_0"]["kernel"].shape, "float32")
    assert "params/Dense_0/kernel" in str(about)
    assert "7 x 13" in str(about)


def test_arrays_are_selected_by_name(saved):
    with Checkpointer(saved[2, 4][0]) as checkpointer:
        about = checkpointer.describe()
    params = ["params/Dense_1/bias", "params/Dense_1/kernel"]
    for pattern, names in {
        "^params/Dense_1/": params,
        "params/Dense_[1-9]/k": params[1:],
        "mu/Dense_1/": [name.replace("params", "opt_state/0/mu") for name in params],
        "^Dense_1": [],
        "": ["/".join(path) for path in about.leaves],
    }.items():
        assert ["/".join(leaf.name) for leaf in about.select(pattern)] == names
    (kernel,) = about.select("params/Dense_1/kernel")
    assert kernel is about.leaves["params", "Dense_1", "kernel"]


@pytest.mark.slow
def test_equal_models_have_equal_fingerprints(saved):
    prints = set()
    for shape in MESHES:
        folder, *_ = saved[shape]
        with Checkpointer(folder) as checkpointer:
            prints.add(checkpointer.describe().fingerprint)
    assert len(prints) == 1


@pytest.mark.smoke
def test_parameters_only(steps, saved):
    folder, (params, *_), _ = saved[2, 4]
    with Checkpointer(folder) as checkpointer:
        found = checkpointer.restore_params()
        some = checkpointer.restore_params(pattern="Dense_0/")
        fresh = steps[4, 2].init(jax.random.key(9), batch_of(0))
        before = logical(fresh)
        state = checkpointer.restore_params(fresh, "Dense_1/kernel")
        with pytest.raises(ValueError, match=r"no parameter .* matches 'Dense_7'; .*Dense_0/bias"):
            checkpointer.restore_params(pattern="Dense_7")
    del found["empty"]  # of no elements: nothing is stored
    assert_same(found, {name: x for name, x in params.items() if name != "empty"})
    assert_same(some, {"Dense_0": params["Dense_0"]})
    after = logical(state)
    np.testing.assert_array_equal(after[0]["Dense_1"]["kernel"], params["Dense_1"]["kernel"])
    after[0]["Dense_1"]["kernel"] = before[0]["Dense_1"]["kernel"]
    assert_same(after, before)


# when it is saved


def test_every_and_keep(steps, tmp_path):
    step = steps[2, 4]
    state = step.init(KEY, batch_of(0))
    with Checkpointer(tmp_path, keep=2, every=2) as checkpointer:
        saved = [checkpointer.save(i, state) for i in range(1, 7)]
        assert saved == [False, True] * 3
        assert checkpointer.save(7, state, force=True)
        assert not checkpointer.save(7, state, force=True)
        checkpointer.wait()
        assert checkpointer.numbers() == [6, 7]


# states of other optimizers, and what wires remember


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            lambda: optax.adafactor(0.01, min_dim_size_to_factor=4, momentum=0.9), id="adafactor"
        ),
        pytest.param(lambda: contrib.muon(0.02), id="muon"),
    ],
)
def test_other_optimizers_change_the_mesh_and_accumulate(optimizer, tmp_path):
    one, other = (
        step_on(shape, optimizer(), model=Net(empty=False), accumulate=accumulate)
        for shape, accumulate in (((2, 4), 1), ((3, 2), 2))
    )
    state, _ = run(one, one.init(KEY, batch_of(0)), 0, 2)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state)
        other.abstract_state(batch_of(0))
        restored = checkpointer.restore(other).state
    assert_same(logical(restored), logical(state))
    _, losses = run(one, state, 2, 3)
    _, found = run(other, restored, 2, 3)
    np.testing.assert_allclose(found, losses, rtol=1e-5)


@pytest.mark.slow
def test_error_feedback_goes_on_where_it_fits_and_starts_anew_elsewhere(tmp_path):
    options = {
        "persistence_threshold": 0,
        "quantize_threshold": 0,
        "gradient_wire": WireFormat(bits=8, block=32),
        "inter_node_reduce": "step",
        "error_feedback": Feedback(),
    }
    one, other, without = (
        step_on(shape, **{**options, **more})
        for shape, more in (((2, 4), {}), ((4, 2), {}), ((2, 4), {"error_feedback": None}))
    )
    state, _ = run(one, one.init(KEY, batch_of(0)), 0, 2)
    said = []
    with Checkpointer(tmp_path, report=said.append) as checkpointer:
        checkpointer.save(2, state)
        same = checkpointer.restore(one).state
        assert_same(*(jax.tree.map(np.asarray, x.wire_state) for x in (same, state)))
        assert any(np.asarray(x).any() for x in jax.tree.leaves(same.wire_state.errors))
        for step in (other, without):
            assert not said
            step.abstract_state(batch_of(0))
            restored = checkpointer.restore(step).state
            assert_same(logical(restored), logical(state))
            assert restored.wire_state is None
            if step is other:
                assert "of another mesh or other formats, and starts anew" in said.pop()
            # It is read while it still holds: a step takes its state's place.
            run(step, restored, 2, 1)
        losses = [run(one, x, 2, 3)[1] for x in (same, state)]
    assert losses[0] == losses[1]
