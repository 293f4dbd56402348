"""Checkpoints of islands: the outer state once, and back onto other islands."""

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import traverse_util
from tools.islands import (
    KEY,
    MODEL,
    TOKEN,
    batches,
    coordinator,
    copies,
    in_threads,
    make_step,
    params,
    part,
    trained,
)
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.config.outer import Outer
from zeroxla.step.islands.saved_island import SavedIsland

pytestmark = pytest.mark.usefixtures("quick_compilation")
OUTER = Outer(every=2, fragments=2, optimizer=optax.adam(0.1))
ADAM = optax.adam(1e-2)


def shared(island, state):
    """Return the parameters that islands share, whole."""
    return jax.tree.map(np.asarray, zeroxla.full_params(island.shared(state)))


def run(folder, num, rows, *, outer=OUTER, save=None, share=4):
    """Train islands; each opens its checkpoint if it has one, and saves after `save` steps.

    Returns:
      For each, what islands share, versions and round at the beginning; the last state, its own
      parameters, and what islands share then.
    """
    with coordinator(num, deadline=120.0) as there:

        def island_of(index):
            step = make_step(outer, index, share, ADAM)
            with zeroxla.Island(step, there.address, TOKEN, slot=index, timeout=30) as island:
                own = [part(batch, index, 4) for batch in rows]
                step.abstract_state(own[0])
                with Checkpointer(folder / f"{index}", asynchronous=False) as checkpoints:
                    if checkpoints.numbers():
                        state = island.begin(checkpoints.restore(island).state)
                    else:
                        state = island.init(KEY, own[0])
                    first = shared(island, state), state.versions, state.round
                    for done, batch in enumerate(own, 1):
                        state, _ = island(state, batch)
                        if done == save:
                            state = island.settle(state)
                            checkpoints.save(done, island.to_save(state))
                    state = island.settle(state)
                    return first, state, params(state), shared(island, state)

        return in_threads(island_of, num)


@pytest.mark.slow
def test_islands_go_on_from_their_checkpoints(tmp_path):
    """Without delay and wires a run in two parts is the run in one, bit for bit."""
    rows = batches(8)
    whole = run(tmp_path / "whole", 2, rows)
    run(tmp_path / "parts", 2, rows[:4], save=4)
    abouts = [Checkpointer(tmp_path / "parts" / str(i)).describe() for i in range(2)]
    assert abouts[0].outer["versions"] == [3, 4]
    kinds = [{path[1] for path in about.leaves if path[0] == "outer"} for about in abouts]
    assert kinds == [{"copy", "optimizer 1", "optimizer 2"}, {"copy"}]  # the optimizer's once
    found = run(tmp_path / "parts", 2, rows[4:])
    for (_, state, mine, _), (_, want, expected, _) in zip(found, whole, strict=True):
        assert state.versions == want.versions == (7, 8)
        for a, b in zip(copies(state), copies(want), strict=True):
            np.testing.assert_array_equal(a, b)
        jax.tree.map(np.testing.assert_array_equal, mine, expected)


@pytest.mark.slow
@pytest.mark.parametrize("num", [1, 3])
def test_another_number_of_islands_goes_on(tmp_path, num):
    rows = batches(6)
    before = run(tmp_path, 2, rows[:4], save=4)
    found = run(tmp_path, num, rows[4:])
    for first, state, *_ in found:
        jax.tree.map(np.testing.assert_array_equal, first[0], before[0][3])
        assert first[1:] == ((3, 4), 4)
        assert state.versions == (5, 6)
    for _, state, *_ in found[1:]:
        for a, b in zip(copies(found[0][1]), copies(state), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_another_mesh_and_other_fragments(tmp_path):
    """4 devices of each island instead of 2, and 3 fragments instead of 2."""
    rows = batches(6)
    before = run(tmp_path, 2, rows[:4], save=4)
    abouts = [Checkpointer(tmp_path / str(i)).describe() for i in range(2)]
    assert ["numbers" in about.outer for about in abouts] == [True, False]
    outer = Outer(every=3, fragments=3, optimizer=optax.adam(0.1))
    (first, state, *_), other = run(tmp_path, 2, rows[:3], outer=outer, share=2)
    assert before[0][1].outer[0].copy.shape[0] == 2
    assert state.outer[0].copy.shape[0] == 4
    jax.tree.map(np.testing.assert_array_equal, first[0], before[0][3])
    assert first[1:] == ((4, 4, 4), 4)
    assert state.versions == (7, 5, 6)
    for a, b in zip(copies(state), copies(other[1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_the_shared_parameters_are_the_outer_ones():
    outer = Outer(every=2, fragments=2, delay=1, mixing=0.5)
    islands, states, _ = trained(outer, 2, batches(5))
    one, two = (zeroxla.full_params(i.shared(s)) for i, s in zip(islands, states, strict=True))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    own = params(states[0])
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (own, one)),
                                                        strict=True))  # fmt: skip
    flat = np.concatenate([np.ravel(x) for x in jax.tree.leaves(one)])
    mine = np.concatenate([np.ravel(x) for x in copies(states[0])])
    np.testing.assert_array_equal(np.sort(flat[flat != 0]), np.sort(mine[mine != 0]))


def test_whoever_reads_an_island_s_checkpoint_gets_what_is_evaluated(tmp_path):
    """Every island's checkpoint, by every way to read it; its own parameters where asked for."""
    rows = batches(3)
    outer = Outer(every=2, fragments=2, delay=1, mixing=0.5)
    islands, states, _ = trained(outer, 2, rows, optimizer=ADAM)
    plain = zeroxla.make_step(MODEL, islands[0].step.mesh, ADAM)
    plain.abstract_state(rows[0])
    want = shared(islands[0], states[0])
    loss = float(plain.eval(islands[0].shared(states[0]), rows[0])["loss"])
    for i, (island, state) in enumerate(zip(islands, states, strict=True)):
        with Checkpointer(tmp_path / f"{i}", asynchronous=False) as checkpoints:
            checkpoints.save(3, island.to_save(state))
            restored = checkpoints.restore(plain).state
            own = checkpoints.restore(plain, island_own=True).state
            found = {
                "restore": zeroxla.full_params(restored),
                "restore_params": checkpoints.restore_params(),
                "into a state": zeroxla.full_params(checkpoints.restore_params(own)),
                "export": exported(tmp_path / f"{i}", tmp_path / "files"),
            }
            mine = {
                "restore": zeroxla.full_params(own),
                "restore_params": checkpoints.restore_params(island_own=True),
                "export": exported(tmp_path / f"{i}", tmp_path / "files", island_own=True),
            }
        assert float(plain.eval(restored, rows[0])["loss"]) == pytest.approx(loss, abs=1e-6)
        for way, params_found in found.items():
            same(params_found, want, way)
        for way, params_found in mine.items():
            same(params_found, params(state), way)
        assert abs(float(plain.eval(own, rows[0])["loss"]) - loss) > 1e-4


def exported(folder, output, **options):
    """Return the tensors of an export, by flat name."""
    (file,) = zeroxla.export_params(folder, output, **options)
    return safetensors.numpy.load_file(file)


def same(found, want, way):
    """Check that parameters, nested or by flat name, are the same bits."""
    want = traverse_util.flatten_dict(want, sep=".")
    found = traverse_util.flatten_dict(found, sep=".")
    assert found.keys() == want.keys()
    for name, x in want.items():
        np.testing.assert_array_equal(found[name], x, err_msg=f"{way}: {name}")


def test_a_checkpoint_says_which_parameters_it_does_not_have(tmp_path):
    step = make_step(None, 0, 1)
    state = step.init(KEY, batches(1)[0])
    with Checkpointer(tmp_path, asynchronous=False) as checkpoints:
        checkpoints.save(1, state)
        # as zeroxla 0.1 wrote it for the islands but one
        checkpoints.save(2, SavedIsland(inner=state, facts={"clock": 2, "round": 1}))
        with pytest.raises(ValueError, match=r"step 1 is of no island.*leave island_own"):
            checkpoints.restore(step, 1, island_own=True)
        with pytest.raises(ValueError, match=r"by zeroxla .*the smallest slot.*island_own=True"):
            checkpoints.restore_params(number=2)
        assert checkpoints.restore(step, 2, island_own=True).number == 2
    with pytest.raises(ValueError, match=r"this is a state; export island.shared\(state\)"):
        zeroxla.export_params(state, tmp_path / "files", island_own=True)
