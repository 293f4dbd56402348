"""Meshes, programs and arrays whose bytes are known, for the tests of `zeroxla.inspect`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zeroxla.inspect import comms

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
    """Return a report's rows as (axis, kind, phase, dtype, count, received, sent between hosts)."""
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
