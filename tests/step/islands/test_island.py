"""Islands against a NumPy reference of the algorithm, and against data parallelism."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from tools.islands import (
    KEY,
    MODEL,
    ROWS,
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
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.config.outer import Outer
from zeroxla.quantize import WireFormat

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
@pytest.mark.parametrize("num", thinned([2], slow=[4]))
def test_an_exchange_after_each_step_is_data_parallelism(num):
    rows = batches(3)
    _, states, _ = trained(Outer(every=1, optimizer=optax.sgd(1.0)), num, rows)
    step = zeroxla.make_step(MODEL, zeroxla.make_mesh(nodes=2), optax.sgd(0.1))
    state = step.init(KEY, rows[0])
    for batch in rows:
        state, _ = step(state, batch)
    for mine in states:
        assert jax.tree.all(
            jax.tree.map(
                lambda a, b: np.allclose(a, b, atol=1e-6), params(mine), zeroxla.full_params(state)
            )
        )


def masks(island, state):
    """Return for each fragment which elements of each leaf belong to it."""
    found = []
    for programs in island.programs:
        fragment, leaves = programs.fragment, jax.tree.leaves(state.inner.params)

        def local(leaves, fragment=fragment):
            zeros = {i: x * 0 for i, x in leaves.items()}
            return fragment.put(zeros, np.ones(fragment.size, np.float32))

        specs = programs.specs
        run = jax.shard_map(local, mesh=programs.mesh, in_specs=(specs,), out_specs=specs)
        ones = run({i: leaves[i] for i in fragment.leaves})
        pairs = enumerate(zip(leaves, state.inner.placements[0], strict=True))
        found.append([np.asarray(p.natural(ones.get(i, x * 0))) for i, (x, p) in pairs])
    for each in zip(*found, strict=True):
        np.testing.assert_array_equal(sum(each), np.ones_like(each[0]))
    return found


def reference(outer, num, rows, masks, start):
    """Return the parameters of each island by the algorithm in float64: inner gradients of the
    unsharded model, outer SGD with Nesterov's momentum."""
    tree = jax.tree.structure(start)

    @jax.jit
    @functools.partial(jax.grad)
    def gradient(params, batch):
        return MODEL.apply({"params": params}, batch, train=True, method=MODEL.loss)[0]

    first = [np.asarray(x, np.float64) for x in jax.tree.leaves(start)]
    own = [[x.copy() for x in first] for _ in range(num)]
    shared, momentum = [x.copy() for x in first], [x * 0 for x in first]
    due = []
    for t, batch in enumerate(rows, 1):
        for i, mine in enumerate(own):
            now = tree.unflatten([x.astype(np.float32) for x in mine])
            for x, g in zip(mine, jax.tree.leaves(gradient(now, part(batch, i, num))), strict=True):
                x -= 0.1 * np.asarray(g, np.float64)
        for p, mask in enumerate(masks):
            if (t - (p + 1) * outer.every // outer.fragments) % outer.every == 0:
                mean = [
                    sum(s - mine[k] for mine in own) / num * m
                    for k, (s, m) in enumerate(zip(shared, mask, strict=True))
                ]
                due.append((t + outer.delay, mask, mean))
        for _, mask, mean in [x for x in due if x[0] == t]:
            for k, (m, g) in enumerate(zip(mask, mean, strict=True)):
                momentum[k] = np.where(m, 0.9 * momentum[k] + g, momentum[k])
                shared[k] -= 0.7 * (g + 0.9 * momentum[k]) * m
                for mine in own:
                    mixed = shared[k] + outer.mixing * (mine[k] - shared[k])
                    mine[k] = np.where(m, mixed, mine[k])
    return own, shared


CASES = {
    "all at once": Outer(every=3),
    "a fragment for each unit, on the host": Outer(every=4, fragments="units", state="host"),
    "fragments": Outer(every=4, fragments=3),
    "fragments, delayed": Outer(every=4, fragments=2, delay=2),
    "delayed, mixed": Outer(every=3, delay=1, mixing=0.25),
}


@pytest.mark.parametrize(
    "name",
    thinned(
        ["fragments, delayed"],
        slow=[
            "a fragment for each unit, on the host",
            "all at once",
            "fragments",
            "delayed, mixed",
        ],
    ),
)
def test_islands_follow_the_algorithm(name):
    outer, num, rows = CASES[name], 2, batches(9)
    islands, states, metrics = trained(outer, num, rows, settle=False)
    start = islands[0].step.init(KEY, part(rows[0], 0, num))
    mask = masks(islands[0], states[0])
    outer = dataclasses.replace(outer, fragments=len(mask))
    expected, _ = reference(outer, num, rows, mask, zeroxla.full_params(start))
    for state, want in zip(states, expected, strict=True):
        for a, b in zip(jax.tree.leaves(params(state)), want, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-6)
    merges = [t for t, x in enumerate(metrics[0], 1) if "outer_bytes" in x]
    wanted = [outer.start_of(number) + outer.delay for number in range(9 * outer.fragments)]
    assert merges == [t for t in wanted if t <= 9]


@pytest.mark.parametrize(
    ("bits", "num", "feedback"),
    thinned(
        [(4, 2, True)],
        slow=[
            (bits, num, feedback)
            for bits, num, feedback in itertools.product((4, 8), (2, 4), (True, False))
            if (bits, num, feedback) != (4, 2, True)
        ],
        rows=True,
    ),
)
def test_quantized_islands_share_the_same_bits_and_lose_little(num, bits, feedback):
    rows = batches(24)
    _, plain, _ = trained(Outer(every=4, fragments=2), num, rows)
    wire = WireFormat(bits=bits, block=64, hadamard=32)
    outer = Outer(every=4, fragments=2, wire=wire, error_feedback=feedback)
    islands, states, metrics = trained(outer, num, rows)
    for state in states[1:]:
        for a, b in zip(copies(states[0]), copies(state), strict=True):
            np.testing.assert_array_equal(a, b)
    moved = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params(states[0]))])
    exact = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params(plain[0]))])
    if feedback:
        lost = np.linalg.norm(moved - exact) / np.linalg.norm(exact)
        assert lost < {8: 0.01, 4: 0.05}[bits]
    sent = [x["outer_bytes"] for x in metrics[0] if "outer_bytes" in x]
    world = len(copies(states[0])[0])
    part_bytes = wire.num_bytes(islands[0].programs[0].among(num).part_size)
    assert sent[0] == (num - 1) * 2 * world * part_bytes


@pytest.mark.slow
def test_a_state_begins_and_goes_on_like_its_training_state():
    """One island alone, with outer SGD of rate 1, trains as if there were none."""
    rows = batches(6)
    outer = Outer(every=2, optimizer=optax.sgd(1.0))
    (island,), (state,), _ = trained(outer, 1, rows, optimizer=optax.adam(1e-2))
    step = island.step
    alone = step.init(KEY, rows[0])
    for batch in rows:
        alone, _ = step(alone, batch)
    for a, b in zip(
        *(map(jax.tree.leaves, (params(state), zeroxla.full_params(alone)))), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert (state.clock, state.round, state.versions) == (6, 3, (3,))
    assert PartitionSpec(island.step.mesh.axis_names) == island.programs[0].rows


def test_an_outer_optimizer_that_reads_shapes_is_refused():
    with pytest.raises(ValueError, match=r"keeps arrays of the shapes .* element by element"):
        trained(Outer(every=2, optimizer=optax.contrib.muon(0.1)), 1, batches(1))


@pytest.mark.parametrize("wire", thinned([None], slow=[WireFormat(bits=4, block=64)]))
def test_an_island_that_diverges_takes_no_other_with_it(wire):
    rows, outer = batches(4), Outer(every=2, optimizer=optax.sgd(1.0), wire=wire)

    seen = {}

    def each(island, state, done):
        if done == 1 and island.slot == 1:
            broken = jax.tree.map(lambda x: x * np.nan, state.inner.params)
            state = dataclasses.replace(
                state, inner=dataclasses.replace(state.inner, params=broken)
            )
        if done == 2:
            seen[island.slot] = jax.tree.map(np.array, [f.copy for f in state.outer])
        return state

    _, (one, two), _ = trained(outer, 2, rows, each=each)
    at_two, same = seen[0], seen[1]
    for a, b in zip(at_two, same, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_array_equal(a, b)
    for state in (one, two):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params(state)))
    if wire is None:  # Half of the mean's weight is gone, and the first island's change is whole.
        alone = make_step(None, 0, 2)
        state = alone.init(KEY, part(rows[0], 0, 2))
        for batch in rows[:2]:
            state, _ = alone(state, part(batch, 0, 2))
        copy = np.concatenate([np.ravel(x) for x in at_two])
        want = np.concatenate([np.ravel(np.asarray(x)) for x in jax.tree.leaves(state.params)])
        real = (np.sort(x[x != 0]) for x in (copy, want))  # Paddings are zeros.
        np.testing.assert_allclose(*real, atol=1e-6)


@pytest.mark.slow
def test_islands_weigh_as_much_as_the_rows_that_they_have_trained_on():
    """12 rows of each batch on one island and 4 on the other."""
    rows, outer = batches(2), Outer(every=1, optimizer=optax.sgd(1.0))
    with coordinator(2) as there:

        def run(index):
            cut = slice(12) if index == 0 else slice(12, None)
            own = [{n: x[cut] for n, x in b.items()} for b in rows]
            step = make_step(outer, index, 2)
            with zeroxla.Island(step, there.address, TOKEN, slot=index) as island:
                state = island.init(KEY, own[0])
                for batch in own:
                    state, _ = island(state, batch)
                return state

        states = in_threads(run, 2)
    step = zeroxla.make_step(MODEL, zeroxla.make_mesh(nodes=2), optax.sgd(0.1))
    state = step.init(KEY, rows[0])
    for batch in rows:
        state, _ = step(state, batch)
    for mine in states:
        both = (jax.tree.leaves(x) for x in (params(mine), zeroxla.full_params(state)))
        for a, b in zip(*both, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


def test_each_fragment_weighs_by_the_rows_since_its_own_exchange():
    found = []
    with coordinator(1, say=found.append) as there:
        trained(Outer(every=4, fragments=2), 1, batches(8), address=there.address)
    rows = [event["rows"][0] for event in found if event["what"] == "closed"]
    assert rows == [2 * ROWS, 4 * ROWS, 4 * ROWS, 4 * ROWS]
