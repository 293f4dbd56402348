"""Quantized gathers and secondary shards, against the quantizer's oracle and NumPy."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.wire import as_it_arrives, collectives_on

from zeroxla import WireFormat, make_mesh
from zeroxla.mesh.placement import place
from zeroxla.wire.hops import Hops
from zeroxla.wire.routes import LeafSource, Route

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Split along each dim, with padding and without, and with layer dims before and after.
LEAVES = [
    ((24, 6), ()),
    ((5, 70), ()),
    ((7, 3, 50), (0,)),
    ((3, 48), (0,)),
    ((2, 3, 24), (0, 1)),
    ((16, 5), (1,)),
    ((90,), ()),
]
# Shape of the mesh, devices of a secondary group: inside a node, and over nodes.
QUICK_GROUPS = [((2, 4), 2), ((8, 1), 2)]
SLOW_GROUPS = [
    ((2, 4), 4),
    *(((4, 2), size) for size in (2, 4)),
    *(((1, 8), size) for size in (2, 4)),
    ((8, 1), 4),
    ((3, 2), 2),
    ((2, 3), 3),
]
GROUPS = [*QUICK_GROUPS, *SLOW_GROUPS]
FORMAT = WireFormat(bits=8, block=16)


def values_of(seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape, _ in LEAVES]


def run(shape, size, route_of, function, **options):
    """Call `function(gathers, sources, routes)` on every device; return its results, whole."""
    mesh = make_mesh(nodes=shape[0], devices_per_node=shape[1])
    placements = [place(s, mesh.size, skip=skip) for s, skip in LEAVES]
    gathers = collectives_on(*shape, hpz_size=size, **options).gathers
    routes = [route_of(p) for p in placements]
    stored = [p.stored(jnp.asarray(x)) for p, x in zip(placements, values_of(), strict=True)]

    def local(shards):
        return function(gathers, [LeafSource(x) for x in shards], routes)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=([p.spec for p in placements],),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(mapped)(stored), placements


@pytest.mark.smoke
def test_the_groups_tile_the_mesh_and_keep_the_order_of_shards():
    """Walk every hop in NumPy, from shard numbers: each device must end with 0, 1, 2, ..."""
    for (nodes, devices), size in [*GROUPS, ((6, 4), 8), ((6, 4), 12), ((2, 12), 3), ((4, 6), 12)]:
        hops = Hops(nodes=nodes, devices=devices, hpz_size=size)
        held = {(n, d): [d * nodes + n] for n in range(nodes) for d in range(devices)}
        for part in (hops.outer, hops.inner):
            for hop in part:
                length = nodes if hop.axis == "node" else devices
                groups = hop.groups or (tuple(range(length)),)
                assert sorted(i for g in groups for i in g) == list(range(length))
                assert {len(g) for g in groups} == {hop.size}
                group_of = {i: g for g in groups for i in g}
                before = dict(held)
                for n, d in held:
                    peers = [
                        (i, d) if hop.axis == "node" else (n, i)
                        for i in group_of[n if hop.axis == "node" else d]
                    ]
                    held[n, d] = [s for peer in peers for s in before[peer]]
            if part is hops.outer:
                pieces = [tuple(x) for x in held.values()]
                assert all(len(x) == hops.num_outer for x in pieces)
                assert len(set(pieces)) == size
        assert all(x == list(range(hops.world)) for x in held.values())


@pytest.mark.parametrize("alone", thinned([10**9], slow=[0]))
@pytest.mark.parametrize("group", thinned(QUICK_GROUPS[:1], slow=GROUPS[1:]))
def test_leaves_arrive_as_their_shards_were_quantized(group, alone):
    shape, size = group

    def gather(gathers, sources, routes):
        return gathers.gather(sources, routes)

    def route(placement):
        return Route(placement=placement, weights=FORMAT)

    found, placements = run(shape, size, route, gather, alone_elements=alone)
    for got, leaf, p in zip(found, values_of(), placements, strict=True):
        want = as_it_arrives(leaf, p, shape[0] * shape[1], FORMAT)
        np.testing.assert_array_equal(got, want)


def id_of(value):
    """Return an id for a group of devices, a format or a form."""
    if isinstance(value, tuple):
        return "-".join(map(str, (*value[0], value[1])))
    return value if isinstance(value, str) else "int8" if value else "float32"


# Each form and each format is quick with one of the quick groups.
SECONDARY = [*itertools.product(GROUPS, ("wire", "values"), (None, FORMAT))]
QUICK_SECONDARY = [
    (QUICK_GROUPS[0], "values", FORMAT),
    (QUICK_GROUPS[0], "wire", None),
]


@pytest.mark.parametrize(
    ("group", "form", "weights"),
    thinned(
        QUICK_SECONDARY, slow=[row for row in SECONDARY if row not in QUICK_SECONDARY], rows=True
    ),
    ids=id_of,
)
def test_a_secondary_shard_gives_the_same_leaf(group, form, weights):
    shape, size = group

    def both(gathers, sources, routes):
        kept = gathers.secondary(sources, routes)
        assert all(k.form == ("values" if weights and form == "values" else "wire") for k in kept)
        bytes_of = [k.array.size * k.array.dtype.itemsize for k in kept]
        assert bytes_of == [gathers.secondary_bytes(r) for r in routes]
        on_the_way = gathers.start(sources, routes).secondary
        return (
            gathers.gather(sources, routes),
            gathers.gather(kept, routes),
            gathers.gather([on_the_way[i] for i in range(len(routes))], routes),
        )

    def route(placement):
        return Route(placement=placement, weights=weights, secondary=form)

    (direct, again, later), _ = run(shape, size, route, both)
    for a, b, c, leaf in zip(direct, again, later, values_of(), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
        np.testing.assert_allclose(a, leaf, atol=0.03 if weights else 0)


@pytest.mark.smoke
@pytest.mark.parametrize("form", thinned(["shard"], slow=["wire", "values"]))
def test_a_layer_of_a_stacked_leaf_is_found_in_every_form(form):
    """Slice a source as a loop does, gather the slice, and compare with the slice of the whole."""

    def route(placement):
        secondary = None if form == "shard" else form
        return Route(placement=placement, weights=FORMAT, secondary=secondary)

    def slices(gathers, sources, routes):
        if form != "shard":
            sources = gathers.secondary(sources, routes)
        found = []
        for source, r in zip(sources, routes, strict=True):
            for dim in r.placement.layer_dims:
                layer = jax.tree.map(lambda x: x[1], r.layers(source, dim))
                found += gathers.gather([layer], [r.unstack(dim)])
        return found, gathers.gather(sources, routes)

    (found, whole), placements = run((2, 4), 4, route, slices)
    expected = [
        np.take(np.asarray(x), 1, axis=dim)
        for x, p in zip(whole, placements, strict=True)
        for dim in p.layer_dims
    ]
    assert len(found) == len(expected) == 5
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("weights", "form"),
    thinned([(FORMAT, "wire")], slow=[(None, "values"), (FORMAT, "values")], rows=True),
)
def test_a_leaf_with_a_copy_sends_its_difference_to_the_copy(weights, form):
    """The new copy is the old one and the decoded difference. The leaf is gathered from it, at once
    and later, or from what it was quantized to; a leaf without a copy travels beside it as ever."""
    of_copy = 0.75  # of each leaf
    with_copy = [i for i in range(len(LEAVES)) if i % 2 == 0]

    def route(placement):
        return Route(
            placement=placement,
            weights=FORMAT,
            values=weights,
            differences=FORMAT,
            secondary=form,
        )

    def gather(gathers, sources, routes):
        plain = [dataclasses.replace(r, weights=None, secondary="wire") for r in routes]
        exact = gathers.secondary(sources, plain)
        for i in with_copy:
            sources[i] = dataclasses.replace(sources[i], copy=of_copy * exact[i].array)
        kept = gathers.secondary(sources, routes)
        arriving = gathers.start(sources, routes)
        coded = weights is not None and form == "wire"
        for i, source in enumerate(kept):
            assert source.form == ("coded" if coded and i in with_copy else form)
            assert (source.copy is not None) == (i in with_copy)
        for i in with_copy:
            arrays = [kept[i].copy, *([kept[i].array] if coded else [])]
            bytes_of = sum(x.size * x.dtype.itemsize for x in arrays)
            assert bytes_of == gathers.secondary_bytes(routes[i])
        assert sorted(arriving.secondary) == list(range(len(routes)))
        on_the_way = [arriving.secondary[i] for i in range(len(routes))]
        layers = []
        for i, r in enumerate(routes):
            for dim in r.placement.layer_dims:
                layer = jax.tree.map(lambda x: x[1], r.layers(kept[i], dim))
                layers += gathers.gather([layer], [r.unstack(dim)])
        floats = [dataclasses.replace(r, values=None) for r in routes]
        copies = [
            x if x.copy is None else dataclasses.replace(x, array=x.copy, form="values")
            for x in on_the_way
        ]
        return (
            gathers.finish(arriving, routes),
            gathers.gather(kept, routes),
            gathers.gather(on_the_way, routes),
            gathers.gather(copies, floats),
            layers,
        )

    (direct, later, again, copies, layers), placements = run((2, 4), 4, route, gather)
    slices = iter(layers)
    leaves = zip(direct, later, again, copies, values_of(), placements, strict=True)
    for i, (a, b, c, copy, leaf, p) in enumerate(leaves):
        for dim in p.layer_dims:
            np.testing.assert_array_equal(next(slices), np.take(np.asarray(b), 1, axis=dim))
        if i in with_copy:
            np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(a, c)
            p = dataclasses.replace(p, layer_dims=())
            difference = as_it_arrives(leaf - of_copy * leaf, p, 8, FORMAT)
            np.testing.assert_allclose(copy, of_copy * leaf + difference, rtol=0, atol=1e-6)
            np.testing.assert_allclose(a, copy, atol=0.03 if weights else 0)
        else:
            np.testing.assert_array_equal(a, as_it_arrives(leaf, p, 8, FORMAT))
            np.testing.assert_array_equal(copy, a)
