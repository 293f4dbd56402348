"""Quantized gradients: the mean over all devices, on every mesh, for every shape and dtype."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import WireFormat, ZeroConfig

pytestmark = pytest.mark.usefixtures("quick_compilation")

MESHES = [(2, 4), (1, 8), (8, 1), (4, 2), (3, 2), (2, 3)]
DTYPES = ["float32", "bfloat16", "float16"]
SMALL = {"one": (1,), "seven": (7,), "odd": (13, 17, 3), "prime": (8191,), "matrix": (40, 96)}
LARGE = {"table": (50257, 64), "wide": (8192, 512)}
INT8 = WireFormat(bits=8, scale="bound")
INT4 = WireFormat(bits=4, scale="bound")
# Nothing stays whole and nothing is too small to be quantized.
ALL = {"persistence_threshold": 0, "quantize_threshold": 0, "unquantized": ()}


def step_of(shapes, gradient, mesh, **options):
    """A step of a model whose gradient on a device is `gradient(shape, leaf's number, row)`.

    A hop over `node` at the end of the step needs two micro-batches; both have the same rows.
    """

    def init(key, batch):
        return {name: jnp.zeros(shape) for name, shape in shapes.items()}

    def loss(params, batch, key):
        row = jax.tree.map(lambda x: x[0], batch)
        return sum(
            jnp.sum(params[name] * gradient(shape, i, row).astype(params[name].dtype))
            for i, (name, shape) in enumerate(shapes.items())
        )

    nodes, devices = mesh
    on = zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)
    at_the_end = options.get("inter_node_reduce") == "step"
    options["accumulate"] = 2 if at_the_end else 1
    config = ZeroConfig(**{**ALL, "init_loss_scale": 256, **options})
    return zeroxla.make_step((init, loss), on, optax.sgd(1.0), config=config)


def mean_gradient(step, world, **more):
    batch = {"rank": np.arange(world), **{k: np.full(world, v) for k, v in more.items()}}
    batch = {k: np.repeat(x, step.config.accumulate) for k, x in batch.items()}
    state = step.init(jax.random.key(0), batch)
    return jax.device_get(step.grad(state, batch)[1])


def uneven(shape, leaf, row):
    """Small whole numbers times powers of two: exact in every dtype, different on every device."""
    return _uneven(jnp, jax.lax.iota(jnp.int32, int(np.prod(shape))), leaf, row["rank"]).reshape(
        shape
    )


def _uneven(xp, i, leaf, rank):
    mantissa = (i * 7919 + rank * 10473 + leaf * 331) % 255 - 127
    return mantissa.astype(xp.float32) * xp.exp2(-((i // 97) % 6).astype(xp.float32))


def expected_and_bound(shape, leaf, mesh, formats):
    """The float64 mean, and how far each hop may be off: half a step of the largest block."""
    nodes, devices = mesh
    i = np.arange(np.prod(shape), dtype=np.int32)
    by_rank = np.stack([_uneven(np, i, leaf, np.int32(r)) for r in range(nodes * devices)])
    of_nodes = by_rank.astype(np.float64).reshape(nodes, devices, -1)

    def half_steps(peaks, format):
        rounding = 2.0**-7 if format.scale_dtype == "bfloat16" else 2.0**-14
        return peaks / (2**format.bits - 1) * (1 + rounding)

    error = np.zeros(nodes)
    if devices > 1:
        error = half_steps(np.abs(of_nodes).max(-1), formats[0]).sum(1)
    sums = of_nodes.sum(1)
    if nodes > 1:
        error = error + half_steps(np.abs(sums).max(-1) + error, formats[1])
    return sums.sum(0).reshape(shape) / (nodes * devices), error.sum() / (nodes * devices)


def check_mean(mesh, dtype, shapes, formats, **options):
    step = step_of(
        shapes,
        uneven,
        mesh,
        compute_dtype=dtype,
        # On a hop that is not there a format would be without effect.
        gradient_wire=formats[0] if mesh[1] > 1 else None,
        inter_node_gradient_wire=formats[1] if mesh[0] > 1 else None,
        **options,
    )
    found = mean_gradient(step, mesh[0] * mesh[1])
    for i, (name, shape) in enumerate(shapes.items()):
        want, bound = expected_and_bound(shape, i, mesh, formats)
        error = np.abs(found[name].astype(np.float64) - want).max()
        assert error <= bound + 1e-6 * np.abs(want).max(), (name, error, bound)


@pytest.mark.parametrize(
    ("mesh", "dtype"),
    thinned(
        [((4, 2), "float32")],
        slow=[
            ((2, 4), "bfloat16"),
            *((mesh, "float32") for mesh in MESHES if mesh != (4, 2)),
            ((3, 2), "float16"),
        ],
        rows=True,
    ),
)
def test_the_mean_is_within_the_bounds_of_both_hops(mesh, dtype):
    check_mean(mesh, dtype, SMALL, (INT8, INT4))


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.parametrize("formats", [(INT4, INT8)])
@pytest.mark.parametrize("when", thinned(["step"], slow=["microbatch"]))
def test_the_mean_in_other_formats_and_with_the_node_hop_at_the_end(formats, when):
    wide = dataclasses.replace(formats[0], block=48)
    check_mean((2, 4), "float32", SMALL, (wide, formats[1]), inter_node_reduce=when)


@pytest.mark.full
@pytest.mark.parametrize(
    "shapes", [SMALL, *({name: LARGE[name]} for name in LARGE)], ids=["small", *LARGE]
)
@pytest.mark.parametrize(("mesh", "dtype"), [*itertools.product(MESHES, DTYPES)])
def test_the_mean_of_every_shape_on_every_mesh_in_every_dtype(mesh, dtype, shapes):
    check_mean(mesh, dtype, shapes, (INT4, INT4))


@pytest.mark.parametrize(
    "config",
    [
        ZeroConfig.zeropp(**ALL),
        pytest.param(ZeroConfig.zeropp(inter_node_reduce="step", **ALL), marks=pytest.mark.slow),
        pytest.param(
            ZeroConfig.zeropp(gradient_wire=WireFormat(bits=4, scale="deepspeed"), **ALL),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["zeropp", "node hop at the end", "DeepSpeed's step"],
)
def test_two_by_two_ranks_give_exactly_minus_two_and_a_half(config):
    """Rank r holds -(r + 1) everywhere."""

    def gradient(shape, leaf, row):
        return jnp.full(shape, -(row["rank"] + 1.0))

    options = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    step = step_of({"a": (64, 57), "b": (4, 3, 5), "c": (3,)}, gradient, (2, 2), **options)
    for found in mean_gradient(step, 4).values():
        np.testing.assert_array_equal(found, np.full(found.shape, -2.5, np.float32))


def index_bit(shape, leaf, row):
    """1 where the element's own index has the bit, else -1."""
    i = jax.lax.iota(jnp.int32, int(np.prod(shape))).reshape(shape)
    return ((i >> row["bit"]) & 1) * 2.0 - 1.0


def check_places(mesh, shapes, **options):
    """Every element's gradient is its own index, bit by bit: read it back from the signs."""
    step = step_of(shapes, index_bit, mesh, gradient_wire=WireFormat(bits=4), **options)
    found = {name: np.zeros(shape, np.int64) for name, shape in shapes.items()}
    for bit in range(int(max(np.prod(s) for s in shapes.values())).bit_length()):
        for name, x in mean_gradient(step, mesh[0] * mesh[1], bit=bit).items():
            assert np.abs(np.abs(x) - 1).max() < 0.3
            found[name] |= (x > 0).astype(np.int64) << bit
    for name, shape in shapes.items():
        np.testing.assert_array_equal(found[name].ravel(), np.arange(np.prod(shape)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_no_element_lands_in_anothers_place(mesh):
    check_places(mesh, SMALL)


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "when"),
    [(m, when) for m in MESHES for when in ("microbatch", "step") if m[0] > 1 or when != "step"],
)
def test_no_element_of_a_large_leaf_lands_in_anothers_place(mesh, when):
    check_places(mesh, LARGE, inter_node_reduce=when)


@pytest.mark.slow
@pytest.mark.parametrize("bits", thinned([4], slow=[8]))
def test_a_rotation_saves_what_lies_beside_an_outlier(bits):
    def gradient(shape, leaf, row):
        i = jax.lax.iota(jnp.int32, int(np.prod(shape))).reshape(shape)
        return jnp.sin(i * 0.7) + 30.0 * (i % 128 == 5)

    errors, beside = [], np.arange(64 * 128).reshape(64, 128) % 128 != 5
    for rotation in (0, 32):
        format = WireFormat(bits=bits, block=128, hadamard=rotation)
        step = step_of({"w": (64, 128)}, gradient, (2, 4), gradient_wire=format)
        exact = step_of({"w": (64, 128)}, gradient, (2, 4))
        found, want = (mean_gradient(s, 8)["w"] for s in (step, exact))
        errors.append(np.linalg.norm((found - want)[beside]) / np.linalg.norm(want[beside]))
    assert errors[1] < 0.8 * errors[0]


def test_stochastic_rounding_is_unbiased():
    """The mean over many steps nears the exact mean as 1 / sqrt(steps): no bias is left."""
    format = WireFormat(bits=4, block=64, rounding="stochastic")
    step = step_of({"w": (16, 64)}, uneven, (2, 4), gradient_wire=format)
    exact = mean_gradient(step_of({"w": (16, 64)}, uneven, (2, 4)), 8)["w"]
    batch = {"rank": np.arange(8)}
    state = step.init(jax.random.key(0), batch)
    found = []
    for i in range(64):
        state = dataclasses.replace(state, step=jnp.int32(i))
        found.append(np.asarray(step.grad(state, batch)[1]["w"]))
    one = np.linalg.norm(found[0] - exact)
    assert not np.array_equal(found[0], found[1])
    assert np.linalg.norm(np.mean(found, 0) - exact) < 2 * one / np.sqrt(len(found))


def test_a_gradient_that_is_not_finite_is_noticed():
    def gradient(shape, leaf, row):
        return jnp.where(row["rank"] == 3, jnp.inf, 1.0) * jnp.ones(shape)

    step = step_of({"w": (16, 64)}, gradient, (2, 4), gradient_wire=WireFormat(bits=4))
    batch = {"rank": np.arange(8)}
    state = step.init(jax.random.key(0), batch)
    before = zeroxla.full_params(state)["w"]
    state, metrics = step(state, batch)
    assert not metrics["finite"]
    assert int(metrics["skipped"]) == 1
    np.testing.assert_array_equal(zeroxla.full_params(state)["w"], before)
