"""Gather and reduce-scatter over two hops, against NumPy: values, order, dtypes, bytes, axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.wire import collectives_on

from zeroxla import make_mesh
from zeroxla.mesh.axes import BATCH_AXES
from zeroxla.mesh.placement import place
from zeroxla.wire.routes import LeafSource, Route

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Every dtype where both axes are long, with padding of both kinds; float32 elsewhere too.
MESHES_AND_DTYPES = thinned(
    [((3, 2), "float32"), ((2, 4), "bfloat16")],
    slow=[
        *(((2, 4), dtype) for dtype in ("float32", "float16")),
        ((3, 2), "bfloat16"),
        *((mesh, "float32") for mesh in ((1, 8), (4, 2), (8, 1), (1, 1))),
    ],
    rows=True,
)
# (shape, dims that stay unsplit): split along the first, second and third dim, padded or not.
LEAVES = [
    ((24, 6), ()),
    ((5, 7), ()),
    ((7, 3, 5), (0,)),
    ((3, 48), (0,)),
    ((2, 3, 24), (0, 1)),
    ((9,), ()),
]


def collectives_of(mesh, wire="float32", reduce="float32", **options):
    dtypes = {"compute_dtype": wire, "reduce_dtype": reduce}
    return collectives_on(*mesh.devices.shape, **dtypes, **options)


def gather_all(collectives, shards, placements):
    routes = [Route(placement=p) for p in placements]
    return collectives.gathers.gather([LeafSource(x) for x in shards], routes)


def reduce_all(collectives, gradients, placements):
    return collectives.reduces.reduce(gradients, [Route(placement=p) for p in placements])


def placements_on(mesh):
    return [place(shape, mesh.size, skip=skip) for shape, skip in LEAVES]


def leaf_values(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(-9, 10, shape).astype(np.float32) for shape, _ in LEAVES]


def on_mesh(function, mesh, in_specs, out_specs):
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


FUSED, ALONE = 10**9, 0  # `alone_elements` for shards that share a buffer, and for each by itself


def fused_and_alone(function):
    """Return a function that calls `function` with fused shards, then with each by itself."""

    def both(*args):
        return function(*args, alone_elements=FUSED), function(*args, alone_elements=ALONE)

    return both


@pytest.mark.parametrize(("shape", "wire"), MESHES_AND_DTYPES)
def test_gather_returns_whole_natural_leaves(shape, wire):
    mesh = make_mesh(nodes=shape[0], devices_per_node=shape[1])
    placements, leaves = placements_on(mesh), leaf_values()
    assert any(p.pad for p in placements) or mesh.size == 1

    @fused_and_alone
    def gather(shards, **options):
        return gather_all(collectives_of(mesh, wire, **options), shards, placements)

    stored = [
        jax.device_put(p.stored(jnp.asarray(x)), p.sharding(mesh))
        for p, x in zip(placements, leaves)
    ]
    specs = [p.spec for p in placements]
    for found in jax.jit(on_mesh(gather, mesh, (specs,), PartitionSpec()))(stored):
        for got, want in zip(found, leaves, strict=True):
            assert got.dtype == wire
            assert got.shape == want.shape
            np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@pytest.mark.parametrize(("shape", "reduce"), MESHES_AND_DTYPES)
def test_reduce_sums_over_all_devices_and_keeps_a_shard(shape, reduce):
    mesh = make_mesh(nodes=shape[0], devices_per_node=shape[1])
    placements = placements_on(mesh)
    # One gradient a rank; sums of whole numbers are exact in every dtype here.
    by_rank = [np.stack(x) for x in zip(*(leaf_values(r) for r in range(mesh.size)))]
    stored = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(BATCH_AXES))) for x in by_rank]

    @fused_and_alone
    def run_reduce(grads, **options):
        collectives = collectives_of(mesh, reduce=reduce, **options)
        return reduce_all(collectives, [g[0] for g in grads], placements)

    specs = [p.spec for p in placements]
    run = on_mesh(run_reduce, mesh, ([PartitionSpec(BATCH_AXES)] * len(specs),), (specs, specs))
    for found in jax.jit(run)(stored):
        for got, want, placement in zip(found, by_rank, placements, strict=True):
            assert got.dtype == jnp.float32
            assert got.shape == placement.stored_shape
            assert got.sharding.is_equivalent_to(placement.sharding(mesh), got.ndim)
            np.testing.assert_array_equal(got, placement.stored(jnp.asarray(want.sum(0))))


def test_the_mean_of_two_by_two_ranks():
    """Rank r holds -(r + 1) everywhere: the mean is exactly -2.5."""
    mesh = make_mesh(nodes=2, devices_per_node=2)
    placement = place((64, 57), 4)

    def run(rows):
        whole = collectives_of(mesh)
        (shard,) = reduce_all(whole, [-(whole.rank() + 1.0) * jnp.ones((64, 57))], [placement])
        return shard / 4, whole.sum(rows), whole.rank()[None]

    out_specs = (placement.spec, PartitionSpec(), PartitionSpec(BATCH_AXES))
    mean, total, ranks = jax.jit(on_mesh(run, mesh, PartitionSpec(BATCH_AXES), out_specs))(
        jnp.arange(8.0)
    )
    np.testing.assert_array_equal(mean, np.full((64, 57), -2.5))
    # Rank r holds rows 2 r and 2 r + 1 of the batch.
    np.testing.assert_array_equal(total, [0 + 2 + 4 + 6, 1 + 3 + 5 + 7])
    np.testing.assert_array_equal(ranks, range(4))


def test_a_16_bit_reduce_rounds_once_a_hop_and_sums_in_float32():
    mesh = make_mesh(nodes=2, devices_per_node=4)
    placement = place((8, 16), 8)
    by_rank = np.random.default_rng(0).normal(size=(8, 8, 16)).astype(np.float32)

    def run(grads):
        return reduce_all(collectives_of(mesh, reduce="bfloat16"), [grads[0]], [placement])[0]

    found = jax.jit(on_mesh(run, mesh, PartitionSpec(BATCH_AXES), placement.spec))(by_rank)

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(np.float32)

    of_nodes = rounded(by_rank).reshape(2, 4, 8, 16).sum(1, dtype=np.float32)
    expected = rounded(of_nodes).sum(0, dtype=np.float32)
    np.testing.assert_array_equal(found, expected)
    # A ring in bfloat16 would round each partial sum: the error would be several times this.
    np.testing.assert_allclose(found, by_rank.sum(0), atol=2**-8 * 8)


def test_infinities_and_nans_arrive():
    mesh = make_mesh(nodes=2, devices_per_node=2)
    placement = place((8,), 4)
    by_rank = np.zeros((4, 8), np.float32)
    by_rank[3, 1], by_rank[0, 6] = np.inf, np.nan
    for dtype in ("float32", "float16"):

        def run(grads, dtype=dtype):
            return reduce_all(collectives_of(mesh, reduce=dtype), [grads[0]], [placement])[0]

        found = jax.jit(on_mesh(run, mesh, PartitionSpec(BATCH_AXES), placement.spec))(by_rank)
        np.testing.assert_array_equal(found, [0, np.inf, 0, 0, 0, 0, np.nan, 0])


def hops(function, mesh, in_specs, out_specs, *args):
    """(primitive, axis, wire dtype, bytes that each device receives) of every collective."""
    jaxpr = jax.make_jaxpr(on_mesh(function, mesh, in_specs, out_specs))(*args)
    (body,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    found = []
    for eqn in body.params["jaxpr"].eqns:
        axis = eqn.params.get("axis_name")
        if axis is None:
            continue
        axis = axis if isinstance(axis, tuple) else (axis,)
        x, y = eqn.invars[0].aval, eqn.outvars[0].aval
        peers = 1 - 1 / np.prod([mesh.shape[a] for a in axis])
        received = max(x.size, y.size) * x.dtype.itemsize * peers
        found.append((eqn.primitive.name, axis, x.dtype.name, received))
    return found


@pytest.mark.parametrize(
    ("dtype", "on_wire", "primitive"),
    [
        ("float32", "float32", "reduce_scatter"),
        ("bfloat16", "uint16", "all_to_all"),
        ("float16", "uint16", "all_to_all"),
    ],
)
@pytest.mark.parametrize("alone", [ALONE, FUSED])
def test_one_collective_a_hop_moves_each_byte_once(dtype, on_wire, primitive, alone):
    mesh = make_mesh(nodes=2, devices_per_node=4)
    placements = placements_on(mesh)
    shapes = [jax.ShapeDtypeStruct(p.stored_shape, jnp.float32) for p in placements]
    specs = [p.spec for p in placements]
    both = collectives_of(mesh, dtype, dtype, alone_elements=alone)
    ideal = (1 - 1 / 8) * sum(np.prod(s.shape) for s in shapes) * jnp.dtype(dtype).itemsize
    wires = 1 if alone == FUSED else len(LEAVES)

    found = hops(lambda x: gather_all(both, x, placements), mesh, (specs,), PartitionSpec(), shapes)
    assert [(name, axis, wire) for name, axis, wire, _ in found] == [
        ("all_gather", (axis,), on_wire) for axis in ("node", "device")
    ] * wires
    assert sum(received for *_, received in found) == ideal

    naturals = [jax.ShapeDtypeStruct(p.shape, jnp.float32) for p in placements]
    whole = PartitionSpec()
    found = hops(lambda x: reduce_all(both, x, placements), mesh, (whole,), specs, naturals)
    assert [(name, axis, wire) for name, axis, wire, _ in found] == [
        (primitive, (axis,), on_wire) for axis in ("device", "node")
    ] * wires
    assert sum(received for *_, received in found) == ideal


@pytest.mark.parametrize(
    ("shape", "axes"), [((1, 8), {"device"}), ((8, 1), {"node"}), ((1, 1), set())]
)
def test_an_axis_of_one_device_has_no_hop(shape, axes):
    mesh = make_mesh(nodes=shape[0], devices_per_node=shape[1])
    placement = place((16, 4), mesh.size)
    whole = collectives_of(mesh)

    def run(x):
        (leaf,) = gather_all(whole, [x], [placement])
        return reduce_all(whole, [leaf], [placement])[0], whole.sum(jnp.ones(3))

    x = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    found = hops(run, mesh, placement.spec, (placement.spec, PartitionSpec()), x)
    assert {a for _, axis, *_ in found for a in axis} == axes
