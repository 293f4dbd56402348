"""Options of wires that cannot work, and those that change nothing on a mesh."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh
from tools.quick import quick_compilation  # noqa: F401
from tools.zoo.base import leaves, mse, vectors

import zeroxla
from zeroxla import Feedback, Offload, WireFormat, ZeroConfig

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.smoke]

INT8, INT4 = WireFormat(bits=8), WireFormat(bits=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_wire": 8}, r"weight_wire=8 is no WireFormat; pass zeroxla.WireFormat\(bits=8\)"),
        ({"gradient_wire": "int4"}, r"gradient_wire='int4' is no WireFormat"),
        ({"secondary": "fp16"}, r"secondary='fp16'; take one of \('compute', 'wire'\)"),
        ({"inter_node_gather": "never"}, r"take one of \('microbatch', 'step'\)"),
        ({"inter_node_reduce": True}, r"inter_node_reduce=True; take one of"),
        ({"hpz_size": 0}, r'hpz_size=0; take "node", "auto", or a number of devices'),
        ({"hpz_size": "host"}, r"hpz_size='host'; take"),
        ({"hpz_size": True}, r"hpz_size=True; take"),
        (
            {"inter_node_gather": "step"},
            r'hpz_size=1 keeps none; set hpz_size="node"',
        ),
        (
            {"weight_differences": INT4, "hpz_size": 2},
            r'weight_differences needs a copy on each node, and hpz_size=2; set hpz_size="node"',
        ),
        (
            {"error_feedback": Feedback(), "gradient_wire": INT4},
            r"inter_node_reduce='microbatch' makes that hop in every micro-batch; set",
        ),
        (
            {"error_feedback": Feedback(), "inter_node_reduce": "step"},
            r"error_feedback has nothing to feed back: no gradient is quantized; set gradient_wire",
        ),
        ({"error_feedback": 0.5}, r"error_feedback=0.5; pass zeroxla.Feedback\(\), or None"),
        ({"unquantized": "("}, r"unquantized='\(' is no regular expression"),
        ({"quantize_threshold": -1}, r"quantize_threshold=-1 must be a whole number of 0 or more"),
        ({"gather_dtype": "int8"}, r"gather_dtype='int8' is not supported"),
        ({"micro_batch": 0}, r"micro_batch=0 must be a whole number of 1 or more"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        ZeroConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 1.0}, r"momentum=1.0\): take a number in \[0, 1\)"),
        ({"reset_every": 0}, r"reset_every=0\): take a number of steps, 1 or more"),
        ({"format": WireFormat(rounding="stochastic")}, r"the error is kept rounded to nearest"),
    ],
)
def test_feedback_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        Feedback(**options)


def loss(p, batch, key):
    return mse(jnp.tanh(batch["x"] @ p["a"]) @ p["b"], batch["y"])


MODEL = (leaves(a=(6, 64), b=(64, 3)), loss)
ALL = {"persistence_threshold": 0, "quantize_threshold": 0}


def make(mesh, config):
    return zeroxla.make_step(MODEL, mesh, optax.sgd(0.1), config=config)


@pytest.mark.parametrize(
    ("shape", "size", "sizes"),
    [((2, 4), 3, [1, 2, 4, 8]), ((2, 4), 16, [1, 2, 4, 8]), ((3, 2), 4, [1, 2, 6])],
)
def test_a_secondary_group_that_does_not_divide(shape, size, sizes):
    mesh = zeroxla.make_mesh(nodes=shape[0], devices_per_node=shape[1])
    with pytest.raises(ValueError, match=rf"hpz_size={size} on a mesh of node=") as error:
        make(mesh, ZeroConfig(hpz_size=size))
    assert f"use one of {sizes}" in str(error.value)


def test_an_integer_leaf_is_refused_with_its_name():
    init = lambda key, batch: {"table": jnp.zeros((8, 8), jnp.int8), "w": jnp.zeros((6, 3))}  # noqa: E731
    fun = lambda p, batch, key: jnp.sum(batch["x"] @ p["w"])  # noqa: E731
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = zeroxla.make_step((init, fun), mesh, config=ZeroConfig(gradient_wire=INT4, **ALL))
    with pytest.raises(ValueError, match=r"the leaf 'table' has dtype int8"):
        step.init(jax.random.key(0), vectors(16))


def test_a_batch_of_another_micro_batch_is_refused():
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = make(mesh, ZeroConfig(micro_batch=2, accumulate=2))
    step.init(jax.random.key(0), vectors(32))
    with pytest.raises(
        ValueError, match=r"batch of 16 .* 1 rows, and micro_batch=2; use a batch of 32"
    ):
        step.init(jax.random.key(0), vectors(16))


@pytest.mark.parametrize(
    ("shape", "names", "config", "words"),
    [
        (
            (8,),
            ("device",),
            ZeroConfig.zeropp(**ALL),
            ["hpz_size (one node: backward gathers inside it anyway)"],
        ),
        (
            (1, 8),
            ("node", "device"),
            ZeroConfig.zeropp_min(**ALL),
            ["hpz_size", "weight_differences", "inter_node_reduce", "inter_node_gradient_wire"],
        ),
        (
            (8, 1),
            ("node", "device"),
            ZeroConfig.zeropp_min(**ALL),
            ["hpz_size (one device per node", "weight_differences (one device per node"],
        ),
        (
            (2, 4),
            ("node", "device"),
            ZeroConfig(hpz_size=8, inter_node_gather="step", **ALL),
            ["hpz_size (a group of all devices", "inter_node_gather"],
        ),
        (
            (2, 4),
            ("node", "device"),
            ZeroConfig(secondary="wire", **ALL),
            ["secondary (hpz_size=1 keeps no secondary shard)"],
        ),
        (
            (2, 4),
            ("node", "device"),
            ZeroConfig(secondary="wire", hpz_size="node", **ALL),
            ["secondary (without weight_wire a secondary shard travels as it is kept)"],
        ),
    ],
    ids=[
        "no node axis",
        "one node",
        "one device a node",
        "one group",
        "no secondary shard",
        "no wire",
    ],
)
def test_what_changes_nothing_is_said_once_and_the_rest_works(shape, names, config, words):
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        step = make(mesh, config)
        state = step.init(jax.random.key(0), vectors(16))
        for _ in range(2):
            state, metrics = step(state, vectors(16))
    assert len(found) == 1
    text = str(found[0].message)
    assert text.startswith("without effect on the mesh ")
    assert all(word in text for word in words), text
    assert found[0].filename == __file__
    assert np.isfinite(float(metrics["loss"]))
    assert state.wire_state is None


def test_a_mesh_with_both_axes_has_nothing_to_say():
    for preset in ("zero3", "zeropp", "zeropp_hq", "zeropp_min"):
        make(zeroxla.make_mesh(nodes=2, devices_per_node=4), getattr(ZeroConfig, preset)())


def test_formats_that_meet_no_leaf_are_said_once():
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = make(mesh, ZeroConfig.zeropp())  # every leaf is below the persistence threshold
    told = "^weight_wire, gradient_wire without effect: of 2 leaves none is quantized. 2 have at"
    with pytest.warns(UserWarning, match=told):
        step.init(jax.random.key(0), vectors(16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step.init(jax.random.key(0), vectors(16))


@pytest.mark.parametrize(
    ("options", "elements", "largest"),
    [
        ({}, 1_000, 100_000),
        ({}, 10**9, 100_000),
        ({"weight_wire": WireFormat()}, 10**9, 100_000),
        ({"weight_wire": WireFormat()}, 10**7, 10_000),
        ({"gradient_wire": WireFormat()}, 30_000, 4095),
        ({"weight_wire": WireFormat(), "quantize_threshold": 0}, 30_000, 30),
        ({"weight_wire": WireFormat(), "persistence_threshold": 7_000}, 30_000, 7_000),
        ({"persistence_threshold": 0}, 30_000, 0),
    ],
)
def test_leaves_that_stay_gathered_leave_some_to_quantize(options, elements, largest):
    assert ZeroConfig(**options).largest_persistent(elements) == largest


def test_a_pattern_that_matches_no_leaf_is_said():
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    step = make(mesh, ZeroConfig.zeropp(unquantized=("router",), **ALL))
    with pytest.warns(UserWarning, match=r"unquantized=\['router'\] matches no leaf"):
        step.init(jax.random.key(0), vectors(16))


@pytest.mark.parametrize("all_stay", [True, False])
@pytest.mark.parametrize("place", ["none", "host"])
def test_secondary_shards_beside_leaves_that_all_stay_are_said_to_do_nothing(all_stay, place):
    """And they do nothing: the program is that without them. If no leaf may stay, they are used."""
    mesh = zeroxla.make_mesh(nodes=2, devices_per_node=4)
    state = make(mesh, ZeroConfig()).init(jax.random.key(0), vectors(16))
    elements = sum(x.size for x in jax.tree.leaves(zeroxla.full_params(state)))
    limits = {"max_live_parameters": elements * all_stay, "max_reuse_distance": 2 * elements}
    options = {"persistence_threshold": 0, **limits}
    there = make(mesh, ZeroConfig(hpz_size="node", offload=Offload(secondary=place), **options))
    names = "hpz_size" if place == "none" else "hpz_size and offload.secondary"
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        state = there.abstract_state(vectors(16))
    told = f"{names} without effect: with max_live_parameters={elements} and max_reuse_distance="
    assert [str(x.message).startswith(told) for x in found] == [True] * all_stay
    plain = make(mesh, ZeroConfig(**options))
    programs = [step.lower(state, vectors(16)).as_text() for step in (there, plain)]
    assert (programs[0] == programs[1]) is all_stay


def test_presets_take_other_options():
    config = ZeroConfig.zeropp(secondary="wire", gradient_wire=None, accumulate=4)
    assert (config.secondary, config.gradient_wire, config.accumulate) == ("wire", None, 4)
    assert config.weight_wire == INT8
    with pytest.raises(TypeError, match="sceondary"):
        ZeroConfig.zeropp(sceondary="wire")
