"""Reports on programs, against numbers worked out by hand and bytes measured on real sockets."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zeroxla.inspect import (
    array_bytes_per_device,
    comms,
    format_bytes,
    hlo,
    memory,
    plot_comms,
    plot_placement,
)
from zeroxla.inspect.comms import phase_of

LEAF = P(("device", "node"))
DATA = P(("node", "device"))


def make_mesh(*shape, names=("node", "device"), order=None):
    size = int(np.prod(shape))
    devices = [jax.devices()[i] for i in (order or range(size))]
    return Mesh(np.array(devices).reshape(shape), names)


def lower(function, mesh, in_specs, out_specs, *shapes, dtype=jnp.float32):
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


def in_both_forms(lowered, mesh, **options):
    return [comms(lowered, mesh, **options), comms(lowered.compile(), mesh, **options)]


def summary(report):
    """The rows as (axis, kind, phase, dtype, count, received, sent between hosts)."""
    return {
        (r.axis, r.kind, r.phase, r.dtype, r.count, r.received_bytes, r.cross_host_bytes)
        for r in report.rows
    }


def gather_hops(shard):
    with jax.named_scope("gather"):
        return lax.all_gather(lax.all_gather(shard, "node", tiled=True), "device", tiled=True)


def reduce_hops(whole):
    with jax.named_scope("reduce"):
        piece = lax.psum_scatter(whole, "device", tiled=True)
        return lax.psum_scatter(piece, "node", tiled=True)


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


@pytest.mark.parametrize(
    ("start", "keep_going", "change", "trips"),
    [
        (0, lambda i: i < 7, 1, 7),
        (3, lambda i: i < 9, 2, 3),
        (3, lambda i: i <= 9, 2, 4),
        (10, lambda i: i > 0, -3, 4),
        (10, lambda i: i >= 1, -3, 4),
        (5, lambda i: i < 5, 1, 0),
    ],
)
def test_trip_count_follows_from_the_counter_of_a_lowered_loop(start, keep_going, change, trips):
    mesh = make_mesh(2, 4)

    def step(x):
        def body(carry):
            return carry[0] + change, lax.psum(carry[1], "device")

        return lax.while_loop(lambda carry: keep_going(carry[0]), body, (start, x))[1]

    assert comms(lower(step, mesh, DATA, DATA, (8, 4)), mesh).count() == trips


def test_loop_that_depends_on_data_asks_for_its_trips():
    mesh = make_mesh(2, 4)

    def step(x):
        def body(x):
            return x + lax.psum(x, "device")

        return lax.while_loop(lambda x: lax.psum(x.sum(), "node") < 9, body, x)

    lowered = lower(step, mesh, DATA, DATA, (8, 4))
    for program in (lowered, lowered.compile()):
        with pytest.raises(ValueError, match=r"trip count depends on data; pass while_trips=N"):
            comms(program, mesh)
        report = comms(program, mesh, while_trips=10)
        assert report.count(axis="device") == 10
        assert report.count(axis="node") == 11  # the condition is checked once more


def test_loop_that_depends_on_data_is_of_no_interest_without_collectives():
    mesh = make_mesh(2, 4)

    def step(x):
        x = lax.psum(x, "device")
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x)

    for report in in_both_forms(lower(step, mesh, DATA, DATA, (8, 4)), mesh):
        assert report.count() == 1


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
    # Two hosts of four devices: both stages of node 0 are on host 0.
    assert [row.cross_host_bytes for row in report.rows] == [0, 64]
    # Four hosts of two devices.
    report = comms(lowered, mesh, host_axes=("pipe", "node"))
    assert [row.cross_host_bytes for row in report.rows] == [32, 32]


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


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,4},{1,5},{2,6},{3,7}}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("{}", ()),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['node'=2,'device'=4] {'device'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['node'=2,'device'=4] {'node'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['node'=2,'device'=4] {'node','device'}", (tuple(range(8)),)),
        ("mesh['node'=2,'device'=4] {'device','node'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh['a'=2,'b'=4,'c'=1] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=8] {'a':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        (
            "mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
        (
            "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}",
            ((0, 2, 4, 6), (1, 3, 5, 7)),
        ),
    ],
)
def test_replica_groups_in_every_printed_form(text, groups):
    attributes = f", channel_id=1, replica_groups={text}, dimensions={{0}}"
    assert hlo.replica_groups(attributes) == groups


def test_replica_groups_in_an_unknown_form_are_an_error():
    with pytest.raises(ValueError, match="a form this reader does not know"):
        hlo.replica_groups(", replica_groups=@mesh<a=8> {a}, dimensions={0}")


# What XLA prints for GPUs: start/done pairs (with tuple results, an older and a newer kind of
# all-reduce-start), a generic async-start around a computation, a merged gather, packed int4.
GPU_PROGRAM = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%wrapped (w: f32[64,4]) -> f32[8,4] {
  %w = f32[64,4]{1,0} parameter(0)
  ROOT %rs = f32[8,4]{1,0} reduce-scatter(%w), channel_id=4, replica_groups={}, dimensions={0}, \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/reduce/reduce_scatter"}
}, execution_thread="parallel"

%body (carry: (s32[], f32[16,4])) -> (s32[], f32[16,4]) {
  %carry = (s32[], f32[16,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = f32[16,4]{1,0} get-tuple-element(%carry), index=1
  %cp = (f32[16,4]{1,0}, f32[16,4]{1,0}, u32[], u32[]) collective-permute-start(%x), \
channel_id=5, source_target_pairs={{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}
  %cpd = f32[16,4]{1,0} collective-permute-done(%cp)
  %old = f32[16,4]{1,0} all-reduce-start(%cpd), channel_id=6, replica_groups=[2,4]<=[8], \
use_global_device_ids=true, to_apply=%add
  %oldd = f32[16,4]{1,0} all-reduce-done(%old)
  %new = ((f32[16,4]{1,0}), f32[16,4]{1,0}) all-reduce-start(%oldd), channel_id=7, \
replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, to_apply=%add
  %newd = f32[16,4]{1,0} all-reduce-done(%new)
  ROOT %next = (s32[], /*index=1*/f32[16,4]{1,0}) tuple(%i, %newd)
}

%condition (carry.1: (s32[], f32[16,4])) -> pred[] {
  %carry.1 = (s32[], f32[16,4]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (p: f32[8,4], q: s4[128]) -> (f32[8,4], s4[256]) {
  %p = f32[8,4]{1,0} parameter(0)
  %q = s4[128]{0:E(4)} parameter(1)
  %zero = s32[] constant(0)
  %ag = ((f32[8,4]{1,0}, f32[8,4]{1,0}), (f32[16,4]{1,0}, f32[16,4]{1,0})) \
all-gather-start(%p, %p), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, \
use_global_device_ids=true, metadata={op_name="jit(step)/\
(jvp(forward)/gather/all_gather:transpose(jvp(forward))/gather/all_gather)"}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %agd = (f32[16,4]{1,0}, f32[16,4]{1,0}) all-gather-done(%ag)
  %piece = f32[16,4]{1,0} get-tuple-element(%agd), index=0
  %packed = s4[256]{0:E(4)} all-gather(%q), channel_id=2, replica_groups={{0,4},{1,5},{2,6},{3,7}},\
 dimensions={0}, use_global_device_ids=true
  %start = (s32[], f32[16,4]{1,0}) tuple(%zero, %piece)
  %loop = (s32[], f32[16,4]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}
  %y = f32[16,4]{1,0} get-tuple-element(%loop), index=1
  %big = f32[64,4]{1,0} broadcast(%y), dimensions={0,1}
  %sugar = ((f32[64,4]{1,0}), f32[16,4]{1,0}) reduce-scatter-start(%big), channel_id=3, \
replica_groups=mesh['node'=2,'device'=4] {'device'}, dimensions={0}, \
use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/reduce/reduce_scatter"}
  %sugard = f32[16,4]{1,0} reduce-scatter-done(%sugar)
  %async = ((f32[64,4]{1,0}), f32[8,4]{1,0}, s32[]) async-start(%big), \
async_execution_thread="parallel", calls=%wrapped
  %asyncd = f32[8,4]{1,0} async-done(%async), calls=%wrapped
  ROOT %out = (f32[8,4]{1,0}, s4[256]{0:E(4)}) tuple(%asyncd, %packed)
}
"""


def test_asynchronous_gpu_collectives_count_once():
    report = comms(GPU_PROGRAM, make_mesh(2, 4))
    assert summary(report) == {
        # Two operands of 8 x 4 merged into one collective: 512 bytes gathered, half received.
        ("node", "all-gather", "forward gather+backward gather", "f32", 1, 256, 1024),
        # 256 packed int4 = 128 bytes gathered.
        ("node", "all-gather", "other", "s4", 1, 64, 256),
        ("node", "collective-permute", "other", "f32", 6, 6 * 256, 6 * 4 * 256),
        ("device", "all-reduce", "other", "f32", 6, 6 * 2 * 256 * 3 / 4, 0),
        ("node", "all-reduce", "other", "f32", 6, 6 * 2 * 256 / 2, 6 * 4 * 256),
        ("device", "reduce-scatter", "reduce", "f32", 1, 1024 * 3 / 4, 0),
        # Empty replica_groups: all devices.
        ("node+device", "reduce-scatter", "reduce", "f32", 1, 1024 * 7 / 8, 1024 * 7 / 8),
    }
    assert report.count(phase="forward gather") == report.count(phase="backward gather") == 1
    shapes = {c.name: [s.dims for s in c.results] for c in hlo.collectives(hlo.parse(GPU_PROGRAM))}
    assert shapes == {
        "ag": [(16, 4), (16, 4)],
        "packed": [(256,)],
        "cp": [(16, 4)],
        "old": [(16, 4)],
        "new": [(16, 4)],
        "sugar": [(16, 4)],
        "rs": [(8, 4)],
    }


def test_int4_without_a_packed_layout_takes_a_byte_each():
    report = comms(GPU_PROGRAM.replace("{0:E(4)}", "{0}"), make_mesh(2, 4))
    assert report.total_bytes(dtype="s4") == 128


def test_part_of_an_axis_is_that_axis_with_a_smaller_group():
    text = GPU_PROGRAM.replace("[2,4]<=[8]", "{{0,1},{2,3},{4,5},{6,7}}")
    (row,) = comms(text, make_mesh(2, 4)).select(axis="device", kind="all-reduce")
    assert (row.group_size, row.received_bytes) == (2, 6 * 2 * 256 / 2)


def test_both_branches_of_a_gpu_conditional_are_upper_bounds():
    text = GPU_PROGRAM.replace(
        "while(%start), condition=%condition, body=%body",
        "conditional(%zero, %start, %start), true_computation=%body, false_computation=%body",
    )
    report = comms(text, make_mesh(2, 4))
    assert report.count(kind="collective-permute") == 2
    assert all(row.conditional for row in report.select(kind="collective-permute"))


@pytest.mark.parametrize("kind", ["ragged-all-to-all", "collective-broadcast"])
def test_collective_without_a_byte_rule_is_refused(kind):
    text = GPU_PROGRAM.replace("s4[256]{0:E(4)} all-gather(", f"s4[256]{{0:E(4)}} {kind}(")
    with pytest.raises(NotImplementedError, match=f"'packed' is a '{kind}'"):
        comms(text, make_mesh(2, 4))


def test_program_of_another_mesh_is_refused():
    mesh = make_mesh(2, 4)
    lowered = lower(gather_hops, mesh, LEAF, P(), (64, 8))
    with pytest.raises(ValueError, match=r"compiled for 8 devices, the mesh .* has 4"):
        comms(lowered.compile(), make_mesh(2, 2))
    with pytest.raises(ValueError, match=r"names device 7, but the mesh has 4 devices"):
        comms(lowered, make_mesh(2, 2))


def test_text_that_is_no_hlo_is_refused():
    mesh = make_mesh(2, 4)
    lowered = lower(gather_hops, mesh, LEAF, P(), (64, 8))
    with pytest.raises(ValueError, match="not HLO text"):
        comms(lowered.as_text(), mesh)
    with pytest.raises(ValueError, match="not function"):
        comms(gather_hops, mesh)


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


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (5.25, "5.2 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (8_020_000, "8.02 MB"),
        (999_600, "1 MB"),
        (35e9, "35 GB"),
        (1.4e12, "1.4 TB"),
    ],
)
def test_bytes_are_written_in_decimal_units(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_memory_report_counts_shards_and_donated_outputs_once():
    mesh = make_mesh(2, 4)
    split = NamedSharding(mesh, LEAF)
    step = jax.jit(lambda w: w + 1, in_shardings=split, out_shardings=split, donate_argnums=0)
    lowered = step.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32))
    report = memory(lowered.compile())
    shard_bytes = 64 * 64 * 4 // 8
    assert report.argument_bytes == report.output_bytes == report.alias_bytes == shard_bytes
    assert report.total_bytes == shard_bytes + report.temp_bytes
    assert report.to_dict()["total_bytes"] == report.total_bytes
    assert "2,048" in str(report)
    with pytest.raises(ValueError, match=r"not Lowered; call \.compile\(\)"):
        memory(lowered)


def split_tree(mesh):
    def put(shape, spec, dtype=jnp.float32):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    return {
        "embed": {"embedding": put((512, 256), P("device", "node"))},
        "block": {
            "kernel": put((256, 256), LEAF),
            "out": put((256, 256), P(None, ("device", "node"))),
            "bias": put((256,), P()),
        },
        "head": {"kernel": put((256, 128), LEAF, jnp.bfloat16)},
    }


# Per device, in float32 an eighth of the three matrices and all of the bias, the head in bfloat16.
SPLIT_TREE_BYTES = (512 * 256 // 8 + 2 * 256 * 256 // 8 + 256) * 4 + 256 * 128 // 8 * 2


def test_live_bytes_count_every_shard_once():
    mesh = make_mesh(2, 4)
    tree = split_tree(mesh)
    held = array_bytes_per_device(tree)
    assert held == dict.fromkeys(jax.devices(), SPLIT_TREE_BYTES)
    one = jax.device_put(jnp.zeros(100, jnp.int32), jax.devices()[3])
    tied = {"tree": tree, "again": tree["head"], "host": np.zeros(9), "rate": 0.1, "one": one}
    held = array_bytes_per_device(tied)
    assert held.pop(jax.devices()[3]) == SPLIT_TREE_BYTES + 400
    assert set(held.values()) == {SPLIT_TREE_BYTES}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array


def bars_by_column(axes):
    heights = {}
    for container in axes.containers:
        for bar in container:
            x = round(bar.get_x() + bar.get_width() / 2, 6)
            heights[x] = heights.get(x, 0) + bar.get_height()
    return [heights[x] for x in sorted(heights)]


def pieces_of(axes, name):
    """(left, width) of each device's filled part, as shares of its box."""
    patches = [p for p in axes.patches if str(p.get_label()).startswith(f"{name} on ")]
    boxes = sorted({round(p.get_x(), 6) for p in axes.patches if p.get_linewidth() == 0.6})
    return [
        (round((p.get_x() - max(b for b in boxes if b <= p.get_x() + 1e-6)) / 0.8, 4),
         round(p.get_width() / 0.8, 4))
        for p in patches
    ]  # fmt: skip


def test_placement_picture_shows_each_device_its_piece(tmp_path):
    mesh = make_mesh(2, 4)
    tree = split_tree(mesh)
    figure = plot_placement(tree, mesh, path=tmp_path / "placement.png")
    bars, grid = figure.axes
    assert bars_by_column(bars) == [SPLIT_TREE_BYTES] * 8
    # Device-major: shard index = device * 2 + node, columns run over node, then device.
    expected = [((device * 2 + node) / 8, 1 / 8) for node in range(2) for device in range(4)]
    assert pieces_of(grid, "block/kernel") == expected
    assert pieces_of(grid, "block/bias") == [(0, 1)] * 8
    texts = [text.get_text() for text in grid.texts]
    assert texts.count("262 kB, 1/8 on each device") == 2
    assert "1.02 kB, whole on each device" in texts
    assert (tmp_path / "placement.png").read_bytes().startswith(b"\x89PNG")


def test_placement_picture_of_a_state_draws_the_leaves_of_its_parameters():
    mesh = make_mesh(2, 4)
    params = split_tree(mesh)
    whole = NamedSharding(mesh, P())
    state = State(
        step=jax.device_put(jnp.zeros((), jnp.int32), whole),
        params=params,
        opt_state=(split_tree(mesh), split_tree(mesh)),
        key=jax.device_put(jax.random.key(0), whole),
    )
    figure = plot_placement(state, mesh, max_leaves=3)
    bars, grid = figure.axes
    assert bars_by_column(bars) == [3 * SPLIT_TREE_BYTES + 4] * 8
    legend = [text.get_text() for text in bars.get_legend().get_texts()]
    assert legend == ["params", "opt_state", "others"]
    names = [label.get_text() for label in grid.get_yticklabels()]
    assert names == ["block/kernel  256x256", "block/out  256x256", "embed/embedding  512x256"]
    assert "2 smaller leaves are not drawn" in figure.get_supxlabel()


def test_placement_picture_works_from_shapes_and_needs_shardings():
    mesh = make_mesh(2, 4)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), split_tree(mesh)
    )
    bars, _ = plot_placement({"params": shapes}, mesh).axes
    assert bars_by_column(bars) == [SPLIT_TREE_BYTES] * 8
    legend = [text.get_text() for text in bars.get_legend().get_texts()]
    assert legend == ["embed", "block", "head"] or legend == ["block", "embed", "head"]
    with pytest.raises(ValueError, match="no arrays with a sharding"):
        plot_placement({"a": np.zeros(3)}, mesh)


def test_comms_picture_stacks_the_bytes_of_the_report(tmp_path):
    report = comms(GPU_PROGRAM, make_mesh(2, 4))
    figure = plot_comms(report, path=tmp_path / "comms.png")
    received, sent = figure.axes
    assert sum(bars_by_column(received)) == report.total_bytes()
    # Stacked: the highest edge in each column is the sum of its segments.
    edges = [
        max(container[i].get_y() + container[i].get_height() for container in received.containers)
        for i in range(3)
    ]
    assert edges == bars_by_column(received)
    assert sum(bars_by_column(sent)) == report.cross_host_bytes()
    labels = [label.get_text().replace("\n", " ") for label in received.get_xticklabels()]
    assert labels == ["forward gather + backward gather", "reduce", "other"]
    assert (tmp_path / "comms.png").read_bytes().startswith(b"\x89PNG")


def test_comms_picture_on_one_node_has_no_host_panel():
    mesh = make_mesh(1, 8)
    report = comms(lower(gather_hops, mesh, LEAF, P(), (64, 8)), mesh)
    (received,) = plot_comms(report).axes
    assert bars_by_column(received) == [report.total_bytes()]


def test_comms_picture_of_a_single_device_is_empty():
    mesh = make_mesh(1, 1)
    report = comms(lower(gather_hops, mesh, LEAF, P(), (64, 8)), mesh)
    (received,) = plot_comms(report).axes
    assert report.rows == ()
    assert bars_by_column(received) == []
