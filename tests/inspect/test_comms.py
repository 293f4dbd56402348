"""Reports on programs, against numbers worked out by hand and bytes measured on real sockets."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tools.inspect import (
    DATA,
    GPU_PROGRAM,
    LEAF,
    gather_hops,
    in_both_forms,
    lower,
    make_mesh,
    reduce_hops,
    summary,
)

from zeroxla.inspect import comms, format_bytes
from zeroxla.program.phases import phase_of


@pytest.mark.smoke
def test_two_hop_gather_and_reduce_count_and_weigh_as_by_hand():
    mesh = make_mesh(2, 4)
    # A leaf of 64 x 8 float32 = 2048 bytes; a shard 256, the secondary piece 512.
    lowered = lower(lambda w: reduce_hops(2 * gather_hops(w)), mesh, LEAF, LEAF, (64, 8))
    for report in in_both_forms(lowered, mesh):
        assert summary(report) == {
            # Half of 512; a host's four devices together send half of the leaf.
            ("node", "all-gather", "forward gather", "f32", 1, 256, 1024),
            # Three quarters of 2048, inside the host.
            ("device", "all-gather", "forward gather", "f32", 1, 1536, 0),
            ("device", "reduce-scatter", "reduce", "f32", 1, 1536, 0),
            ("node", "reduce-scatter", "reduce", "f32", 1, 256, 1024),
        }
        assert report.total_bytes() == 2 * (1 - 1 / 8) * 2048
        assert report.flat() == ()


@pytest.mark.smoke
def test_scans_multiply_counts_and_conditionals_are_marked():
    mesh = make_mesh(2, 4)

    def step(x):  # 8 x 4 float32 on each device: 128 bytes
        def outer(x, _):
            with jax.named_scope("forward"):
                x = lax.psum(x, "device") * 0.1

            def inner(x, _):
                x = lax.ppermute(x, "node", [(0, 1), (1, 0)])
                return lax.all_to_all(x, "device", 0, 0, tiled=True), None

            x, _ = lax.scan(inner, x, None, length=3)
            both = functools.partial(lax.psum, axis_name=("node", "device"))
            return lax.cond(x.sum() > 0, both, lambda x: x, x), None

        return lax.scan(outer, x, None, length=5)[0]

    for report in in_both_forms(lower(step, mesh, DATA, DATA, (64, 4)), mesh):
        assert summary(report) == {
            ("device", "all-reduce", "forward", "f32", 5, 5 * 2 * 128 * 3 / 4, 0),
            ("node", "collective-permute", "other", "f32", 15, 15 * 128, 15 * 4 * 128),
            ("device", "all-to-all", "other", "f32", 15, 15 * 128 * 3 / 4, 0),
            # A ring of eight in node-major order leaves each host once: 2 * 128 * 7 / 8.
            ("node+device", "all-reduce", "other", "f32", 5, 5 * 224, 5 * 224),
        }
        assert [row.kind for row in report.rows if row.conditional] == ["all-reduce"]
        assert "<= 5" in str(report)
        assert [row.elements for row in report.flat()] == [32]
        assert len(report.flat(min_elements=32)) == 1
        assert report.flat(min_elements=33) == ()


def test_of_branches_the_heaviest_counts():
    mesh = make_mesh(2, 4)

    def step(x):  # 8 x 4 float32 on each device: 128 bytes
        def inner(x):
            return lax.cond(x[0, 0] > 0, lambda x: lax.psum(x, "node"), lambda x: 2 * x, x)

        def first(x):  # an all-reduce over `device`, and one over `node` at most
            return inner(lax.psum(x, "device"))

        def second(x):
            return lax.psum(lax.psum(x[:4], "device") * 2, "device").repeat(2, 0)

        return lax.cond(x.sum() > 0, first, second, x)

    for report in in_both_forms(lower(step, mesh, DATA, DATA, (64, 4)), mesh):
        over_device, over_node = 128 * 2 * 3 / 4, 128 * 2 / 2
        # Bytes: the first branch; with two halves the second has as many over `device`.
        assert report.total_bytes() == over_device + over_node
        assert report.total_bytes(axis="device") == over_device
        assert report.count() == report.count(axis="device") == 2
        assert report.total_bytes(axis="node") == over_node
        assert {(row.axis, row.count, row.received_bytes) for row in report.rows} == {
            ("device", 2, over_device),
            ("node", 1, over_node),
        }
        assert str(report).count("<=") == 3 * 2 + 2  # the host's column only where it has bytes


@jax.custom_vjp
def gathered(shard):
    return gather_hops(shard)


gathered.defvjp(lambda shard: (gathered(shard), None), lambda _, ct: (reduce_hops(ct),))


def test_phases_of_a_differentiated_checkpointed_scan():
    mesh = make_mesh(2, 4)
    layers = 3

    def loss(w, x):
        def layer(x, w):
            body = jax.checkpoint(lambda w, x: jnp.tanh(x @ gathered(w)), prevent_cse=False)
            return body(w, x), None

        with jax.named_scope("forward"):
            return jnp.sum(lax.scan(layer, x, w)[0] ** 2)

    def step(w, x):
        grads = jax.grad(loss)(w, x)
        with jax.named_scope("update"):
            return w - 0.1 * grads / lax.psum(jnp.sum(grads**2), ("node", "device"))

    w_spec = P(None, ("device", "node"))
    lowered = lower(step, mesh, (w_spec, DATA), w_spec, (layers, 16, 16), (64, 16))
    for report in in_both_forms(lowered, mesh):
        for phase in ("forward gather", "backward gather", "reduce"):
            for axis in ("node", "device"):
                assert report.count(phase=phase, axis=axis) == layers, (phase, axis)
        assert report.count(phase="update") == 1
        assert report.count() == 6 * layers + 1
        # ZeRO-3: each leaf is received three times, less the part a device already has.
        leaves_bytes = layers * 16 * 16 * 4
        moved = report.total_bytes(phase="gather") + report.total_bytes(phase="reduce")
        assert moved == 3 * (1 - 1 / 8) * leaves_bytes
        assert report.cross_host_bytes(axis="node") == 3 * leaves_bytes / 2
        assert report.total_bytes(phase="backward") == report.total_bytes(phase="backward gather")


def test_function_lowered_once_is_counted_in_the_phase_of_each_call():
    mesh = make_mesh(2, 4)
    shared = jax.jit(gather_hops)

    def step(w):
        with jax.named_scope("forward"):
            first = shared(w)
        with jax.named_scope("backward"):
            return first + shared(w)

    report = comms(lower(step, mesh, LEAF, P(), (64, 8)), mesh)
    assert report.count(phase="forward gather") == 2
    assert report.count(phase="backward gather") == 2


@pytest.mark.parametrize(
    ("op_name", "kind", "phase"),
    [
        ("jit(step)/shard_map/jvp(forward)/gather/all_gather", "all-gather", "forward gather"),
        ("jit(step)/backward/gather/all_gather", "all-gather", "backward gather"),
        (
            "jit(step)/transpose(jvp(forward))/checkpoint/rematted_computation/gather/all_gather",
            "all-gather",
            "backward gather",
        ),
        ("jit(step)/transpose(jvp(forward))/reduce/reduce_scatter", "reduce-scatter", "reduce"),
        ("jit(step)/backward/reduce/all_to_all", "all-to-all", "reduce"),
        ("jit(step)/transpose(jvp(gather))/reduce_scatter", "reduce-scatter", "reduce"),
        ("jit(step)/jvp(forward)/layer_0/psum", "all-reduce", "forward"),
        ("jit(step)/transpose(jvp(forward))/layer_0/psum", "all-reduce", "backward"),
        ("jit(step)/update/dot_general", "all-reduce", "update"),
        ("jit(step)/forward/embed/gather", "all-gather", "forward"),  # the primitive `gather`
        ("jit(step)/shard_map/move/all_to_all", "all-to-all", "move"),
        ("jit(step)/shard_map/deal/all_to_all", "all-to-all", "deal"),
        ("jit(step)/shard_map/while/body/send/ppermute", "collective-permute", "send"),
        ("jit(step)/forward/move/gather/all_gather", "all-gather", "forward gather"),
        ("", "all-gather", "other"),
        (
            "jit(step)/(jvp(forward)/gather/all_gather:transpose(jvp(forward))/gather/all_gather)",
            "all-gather",
            "forward gather+backward gather",
        ),
    ],
)
def test_phase_is_read_from_the_scope_path(op_name, kind, phase):
    assert phase_of(op_name, kind) == phase


def all_gather(*axes):
    return lambda x: lax.all_gather(x, axes, tiled=True)


def psum(*axes):
    return lambda x: lax.psum(x, axes)


def all_to_all(*axes):
    return lambda x: lax.all_to_all(x, axes, 0, 0, tiled=True)


@pytest.mark.parametrize(
    ("function", "in_spec", "measured_mb"),
    [
        (lambda x: gather_hops(x), LEAF, 8.02),
        (lambda x: reduce_hops(x), P(), 8.02),
        (all_gather("device", "node"), LEAF, 56.1),
        (all_gather("node", "device"), DATA, 1.76 * 8),
        (psum("device", "node"), P(), 112),
        (all_to_all("device", "node"), P(), 32.1),
    ],
    ids=["hops", "reduce_hops", "flat", "flat_node_major", "flat_psum", "flat_all_to_all"],
)
def test_cross_host_bytes_match_bytes_counted_on_a_network_interface(
    function, in_spec, measured_mb
):
    # Two hosts of four devices over Gloo, a float32 array of 16 MB; table of the design document.
    mesh = make_mesh(2, 4)
    report = comms(lower(function, mesh, in_spec, P(), (4_000_000,)), mesh)
    assert report.cross_host_bytes() == pytest.approx(measured_mb * 1e6, rel=0.01)


def test_wire_dtypes_of_a_lowered_program_are_what_was_written():
    mesh = make_mesh(2, 4)
    report = comms(lower(gather_hops, mesh, LEAF, P(), (64, 8), dtype=jnp.bfloat16), mesh)
    assert report.total_bytes(dtype="bf16") == report.total_bytes() == 7 / 8 * 64 * 8 * 2
    lowered = lower(gather_hops, mesh, LEAF, P(), (64, 8), dtype=jnp.uint8)
    for report in in_both_forms(lowered, mesh):
        assert report.total_bytes(dtype="u8") == report.total_bytes() == 7 / 8 * 64 * 8


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((1, 8), {"device"}),
        ((8, 1), {"node"}),
        ((3, 2), {"node", "device", "node+device"}),
        ((1, 1), set()),
    ],
)
def test_axes_of_length_one_are_not_spanned(shape, axes):
    mesh = make_mesh(*shape)

    def step(w):
        total = lax.psum(w.sum(), ("node", "device"))
        return reduce_hops(gather_hops(w)) + total

    rows = 6 * int(np.prod(shape))
    for report in in_both_forms(lower(step, mesh, LEAF, LEAF, (rows, 2)), mesh):
        assert {row.axis for row in report.rows} == axes
        flat_expected = "node+device" in axes
        assert bool(report.flat()) == flat_expected
        world = int(np.prod(shape))
        data_bytes = report.total_bytes(min_elements=2)
        assert data_bytes == pytest.approx(2 * (1 - 1 / world) * rows * 2 * 4)


def test_groups_are_positions_on_a_mesh_of_permuted_devices():
    mesh = make_mesh(2, 4, order=[5, 2, 7, 0, 1, 4, 3, 6])
    lowered = lower(gather_hops, mesh, LEAF, P(), (64, 8))
    for report in in_both_forms(lowered, mesh):
        assert [(row.axis, row.count) for row in report.rows] == [("node", 1), ("device", 1)]


def test_permute_onto_itself_moves_nothing():
    mesh = make_mesh(2, 4)
    shift = functools.partial(lax.ppermute, axis_name="device", perm=[(0, 0), (1, 1), (2, 3)])
    (row,) = comms(lower(shift, mesh, DATA, DATA, (8,)), mesh).rows
    assert (row.axis, row.received_bytes) == ("device", 4)
    for perm in ([(0, 0), (1, 1)], []):
        stay = functools.partial(lax.ppermute, axis_name="device", perm=perm)
        assert comms(lower(stay, mesh, DATA, DATA, (8,)), mesh).rows == ()


def test_three_axes_and_the_choice_of_what_crosses_hosts():
    mesh = make_mesh(2, 2, 2, names=("pipe", "node", "device"))

    def step(x):  # 4 float32 on each device
        x = lax.ppermute(x, "pipe", [(0, 1)])
        return lax.psum(x, "node")

    lowered = lower(step, mesh, P(("pipe", "node", "device")), P(), (32,))
    report = comms(lowered, mesh)
    assert [row.axis for row in report.rows] == ["pipe", "node"]
    assert [row.received_bytes for row in report.rows] == [16, 16]
    # Every node of every stage is a host: four of two devices.
    assert [row.cross_host_bytes for row in report.rows] == [32, 32]
    # Two hosts of four devices: both stages of node 0 are on host 0.
    report = comms(lowered, mesh, host_axes=("node",))
    assert [row.cross_host_bytes for row in report.rows] == [0, 64]


def test_collectives_inserted_by_the_compiler_show_only_in_the_compiled_program():
    mesh = make_mesh(2, 4)
    columns, rows = (NamedSharding(mesh, P(*s)) for s in ((None, "device"), ("device", None)))
    product = jax.jit(
        jnp.matmul, in_shardings=(columns, rows), out_shardings=NamedSharding(mesh, P())
    )
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    lowered, compiled = in_both_forms(product.lower(x, x), mesh)
    assert lowered.rows == ()
    assert summary(compiled) == {
        ("device", "all-reduce", "other", "f32", 1, 2 * 1024 * 3 / 4, 0),
    }


def test_program_of_another_mesh_is_refused():
    mesh = make_mesh(2, 4)
    lowered = lower(gather_hops, mesh, LEAF, P(), (64, 8))
    with pytest.raises(ValueError, match=r"compiled for 8 devices, the mesh .* has 4"):
        comms(lowered.compile(), make_mesh(2, 2))
    with pytest.raises(ValueError, match=r"names device 7, but the mesh has 4 devices"):
        comms(lowered, make_mesh(2, 2))


def test_report_prints_sums_and_serialises():
    report = comms(GPU_PROGRAM, make_mesh(2, 4))
    text = str(report)
    assert "node=2 x device=4" in text
    assert "forward gather+backward gather" in text
    total = next(line for line in text.splitlines() if "total" in line)
    assert str(report.count()) in total
    assert format_bytes(report.total_bytes()) in total
    assert format_bytes(report.cross_host_bytes()) in total
    restored = json.loads(json.dumps(report.to_dict()))
    assert restored["mesh"] == {"node": 2, "device": 4}
    assert sum(row["received_bytes"] for row in restored["rows"]) == report.total_bytes()
    assert sum(row["cross_host_bytes"] for row in restored["rows"]) == report.cross_host_bytes()


def test_rows_sum_collectives_that_are_alike():
    mesh = make_mesh(2, 4)

    def step(w, v):
        return gather_hops(w).sum() + gather_hops(v).sum()

    report = comms(lower(step, mesh, (LEAF, LEAF), P(), (64, 8), (128, 8)), mesh)
    assert len(report.collectives) == 4
    assert [(r.axis, r.count, r.elements) for r in report.rows] == [
        ("node", 2, 256),
        ("device", 2, 1024),
    ]
    assert report.count(axis="device", min_elements=513) == 1
    assert report.total_bytes(axis="device", min_elements=513) == 3 / 4 * 128 * 8 * 4
