"""LoRA on a base that is stored as int8 or int4 wires: stored bytes, bytes on the wire,
checkpoints, and weights in and out."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.lora import (
    CONFIG,
    KEY,
    RANK,
    lora_step,
    merged_by_hand,
    replaced,
    with_random_b,
)
from tools.quick import quick_compilation, thinned  # noqa: F401
from tools.reference import Reference, relative_errors, worst
from tools.zoo.base import tokens

import zeroxla
from zeroxla.frontend import adapt
from zeroxla.frontend.lora import at_rest
from zeroxla.frontend.lora.uses import DenseLeaf
from zeroxla.models import GPT, MLP, Llama

pytestmark = pytest.mark.usefixtures("quick_compilation")

# Every kernel has at least 4096 elements a layer.
GPTS = {
    "int8": lambda: GPT.tiny(width=64),
    "int4": lambda: GPT.tiny(width=64, layers=1, scan=False),
}
TARGETS = r"attn/.*kernel|c_fc/kernel"  # mlp/c_proj has no adapter, and is a wire all the same
BATCH = tokens(8)
# Bytes of a parameter at rest: codes, and a float32 step for 256 or a bfloat16 one for 64.
RATES = {"int8": 1 + 4 / 256, "int4": 0.5 + 2 / 64}


def dense_paths(tree):
    """The kernels and the untied head: all that is stored as wires."""
    paths = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    return [name for name in names if "kernel" in name or "lm_head" in name]


def by_path(tree):
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in paths}


@pytest.fixture(scope="module", params=thinned(["int4"], slow=["int8"]))
def trained(request, mesh24):
    """(frozen, model with adapters, its step, state after two steps, whole parameters before)."""
    lora, step = lora_step(GPTS[request.param](), mesh24, TARGETS, frozen=request.param)
    state = step.init(KEY, BATCH)
    before = zeroxla.full_params(state)
    for _ in range(2):
        state, _ = step(state, BATCH)
    return request.param, lora, step, state, before


def test_the_base_at_rest_has_so_many_bytes(trained):
    frozen, lora, step, state, _ = trained
    shapes = by_path(lora.plan.shapes)
    names = dense_paths(shapes)
    arrays = by_path(state.params["base"])
    assert {n for n, x in arrays.items() if x.dtype == jnp.uint8} == set(names)
    parameters = sum(shapes[n].size for n in names)
    for device in step.mesh.devices.flat:
        found = sum(
            shard.data.nbytes
            for n in names
            for shard in arrays[n].addressable_shards
            if shard.device == device
        )
        assert found == pytest.approx(RATES[frozen] * parameters / 8, rel=0.01)
    rows = {row.path: row for row in step.describe().rows}
    assert sum(rows[f"base/{n}"].shard_bytes for n in names) == found
    assert {rows[f"base/{n}"].wires for n in names} == {"as stored"}
    in_loop = [rows[f"base/{n}"].unit.endswith("of a loop") for n in names]
    assert set(in_loop) == {frozen == "int8"}  # the one that scans gathers layer by layer
    assert sum(rows[f"base/{n}"].gradient_bytes for n in names) == 0


def test_the_base_does_not_change_and_the_adapters_learn(trained):
    _, _, _, state, before = trained
    after = zeroxla.full_params(state)
    jax.tree.map(np.testing.assert_array_equal, before["base"], after["base"])
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before["lora"], after["lora"])
    assert all(jax.tree.leaves(changed))


@pytest.mark.slow
def test_gradients_are_those_of_the_dequantized_base(trained):
    frozen, lora, step, state, before = trained
    params = with_random_b(before)
    zeros = jax.tree.map(np.zeros_like, before["lora"])
    floats = lora.merge({**before, "lora": zeros})  # the base, dequantized
    plain = zeroxla.make_step(GPTS[frozen](), step.mesh, optax.sgd(0.1), config=CONFIG)
    own = by_path(zeroxla.full_params(plain.init(KEY, BATCH)))
    largest = {"int8": 0.01, "int4": 0.15}[frozen]
    for name, x in by_path(floats).items():
        error = np.linalg.norm(x - own[name]) / max(np.linalg.norm(own[name]), 1e-9)
        assert error < largest, name
        assert (error > 0) == (name in dense_paths(own)), name

    adapted = adapt(GPTS[frozen]())

    def loss(params, *args, **kwargs):
        return adapted.loss(merged_by_hand({"base": floats, "lora": params}), *args, **kwargs)

    reference = Reference(init=adapted.init, loss=loss, world=8)
    want, _, expected, _ = jax.jit(reference.gradients)(
        params["lora"], state.model_state, state.key, 0, BATCH
    )
    value, grads = step.grad(replaced(step, state, params), BATCH)
    assert float(value) == pytest.approx(float(want), rel=5e-6)
    assert worst(relative_errors(grads["lora"], expected))[1] < 1e-5


def test_the_merged_model_has_the_same_logits(trained):
    _, lora, step, _, before = trained
    params, adapted = with_random_b(before), step.adapted
    inputs = BATCH["tokens"][:, :-1]
    have = jax.jit(adapted.apply)(params, {}, inputs)
    want = jax.jit(adapted.base.apply)(lora.merge(params), {}, inputs)
    np.testing.assert_allclose(have, want, atol=1e-5)


def test_the_base_travels_as_it_is_stored(trained):
    """In the compiled step: uint8 by as many bytes as the wires, twice (forward and backward, but
    for what backward does not read), and as floats no more than what is stored so."""
    _, lora, step, state, _ = trained
    compiled = step.lower(step.abstract_state(BATCH), BATCH).compile()
    report = zeroxla.inspect.comms(compiled, step.mesh)
    shapes = by_path(lora.plan.shapes)
    wires = sum(by_path(state.params["base"])[n].nbytes for n in dense_paths(shapes))
    gathered = report.total_bytes(kind="all-gather", dtype="u8")
    assert 1.5 * wires * 7 / 8 < gathered <= 2.01 * wires * 7 / 8
    floats = report.total_bytes(kind="all-gather", dtype="f32")
    rest = [x for n, x in shapes.items() if n not in dense_paths(shapes)]
    rest += jax.tree.leaves(state.params["lora"])
    assert floats <= 3 * 4 * sum(x.size for x in rest) * 7 / 8  # the tied table is read twice


def test_a_checkpoint_opens_on_another_mesh(trained, tmp_path):
    frozen, _, step, state, _ = trained
    with zeroxla.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(2, state, config=step.config)
    mesh = zeroxla.make_mesh(nodes=3, devices_per_node=2)
    batch = tokens(12)
    _, other = lora_step(GPTS[frozen](), mesh, TARGETS, frozen=frozen)
    other.abstract_state(batch)
    with zeroxla.Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(other).state
    jax.tree.map(
        np.testing.assert_array_equal, zeroxla.full_params(restored), zeroxla.full_params(state)
    )
    loss = float(other.eval(restored, batch)["loss"])
    assert np.isfinite(loss)
    _, plain = lora_step(GPTS[frozen](), mesh, TARGETS)
    plain.abstract_state(batch)
    with zeroxla.Checkpointer(tmp_path) as checkpointer, pytest.raises(ValueError, match="uint8"):
        checkpointer.restore(plain)


@pytest.mark.slow
@pytest.mark.parametrize("preset", thinned(["zeropp_min"], slow=["zeropp", "zeropp_hq"]))
def test_it_trains_with_the_wires_of_zeropp(preset, mesh24):
    config = getattr(zeroxla.ZeroConfig, preset)(
        persistence_threshold=0, quantize_threshold=0, accumulate=2
    )
    model = Llama.tiny(width=64, hidden=128)
    _, step = lora_step(model, mesh24, r"proj/kernel|lm_head", frozen="int8", config=config)
    batch = tokens(16)
    state = step.init(KEY, batch)
    before = zeroxla.full_params(state)["base"]
    losses = []
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05
    jax.tree.map(np.testing.assert_array_equal, before, zeroxla.full_params(state)["base"])
    unit = {row.path: row for row in step.describe().rows}
    kernel = unit["base/layers/mlp/up_proj/kernel"]
    assert kernel.secondary_bytes == 2 * kernel.shard_bytes  # hpZ keeps it as it is stored


@pytest.mark.slow
def test_persistent_and_small_leaves(mesh24):
    """Wires that are whole through the step; leaves below 4096 elements a layer stay floats."""
    model = GPT.tiny(width=64)
    config = zeroxla.ZeroConfig(persistence_threshold=10**6)
    _, step = lora_step(model, mesh24, TARGETS, frozen="int8", config=config)
    state = step.init(KEY, BATCH)
    _, fetched = lora_step(model, mesh24, TARGETS, frozen="int8")
    loss = float(step.eval(state, BATCH)["loss"])
    assert loss == pytest.approx(float(fetched.eval(state, BATCH)["loss"]), rel=1e-6)
    assert {row.unit for row in step.describe().rows} == {"persistent"}
    _, tiny = lora_step(GPT.tiny(), mesh24, TARGETS, frozen="int8")
    base = by_path(tiny.abstract_state(BATCH).params["base"])
    assert {n for n, x in base.items() if x.dtype == jnp.uint8} == {
        "h/mlp/c_fc/kernel",
        "h/mlp/c_proj/kernel",
    }


@pytest.mark.slow
def test_weights_in_and_out(trained, tmp_path, mesh24):
    """A Hugging Face folder of the merged model; a state with a wire base read from a folder."""
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    frozen, lora, step, state, _ = trained
    model = GPTS[frozen]()
    zeroxla.export_params(state, tmp_path / "merged", model=lora)
    plain = zeroxla.make_step(model, mesh24, optax.sgd(0.1), config=CONFIG)
    plain.abstract_state(BATCH)
    read = zeroxla.from_pretrained(model, tmp_path / "merged", plain)
    merged = lora.merge(zeroxla.full_params(state))
    jax.tree.map(np.testing.assert_array_equal, zeroxla.full_params(read), merged)
    loss = float(plain.eval(read, BATCH)["loss"])
    assert loss == pytest.approx(float(step.eval(state, BATCH)["loss"]), abs=1e-5)
    with pytest.raises(ValueError, match="holds adapters beside their base"):
        zeroxla.export_params(state, tmp_path / "raw")

    again = zeroxla.from_pretrained(lora, tmp_path / "merged", step, key=KEY)
    same = lora.init_from(step, read.params, KEY)
    jax.tree.map(
        np.testing.assert_array_equal, zeroxla.full_params(again), zeroxla.full_params(same)
    )
    assert again.params["lora"].keys() == state.params["lora"].keys()
    assert RANK in jax.tree.leaves(again.params["lora"])[0].shape


@pytest.mark.parametrize(("frozen", "error"), [("int8", 0.0070), ("int4", 0.092)])
def test_the_documented_bytes_and_errors_of_a_gaussian_leaf(frozen, error):
    x = jax.random.normal(KEY, (2, 256, 512))
    leaf = DenseLeaf(shape=x.shape, layer_dims=(0,), contracted=(1,))
    wires = at_rest.as_wires(x, leaf, at_rest.FORMATS[frozen])
    assert wires.shape == (2, RATES[frozen] * 256 * 512)
    back = at_rest.from_wires(wires, leaf, at_rest.FORMATS[frozen])
    found = float(jnp.linalg.norm(back - x) / jnp.linalg.norm(x))
    assert found == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize(("side", "is_wire"), [(63, False), (64, True)])
def test_a_layer_of_4096_elements_is_stored_in_few_bits(side, is_wire):
    """However many layers there are."""
    leaf = DenseLeaf(shape=(64, 8, side), layer_dims=(1,), contracted=(0,))
    for frozen in ("int8", "int4"):
        assert (at_rest.format_of(leaf, frozen) is not None) == is_wire
    assert at_rest.format_of(leaf, None) is None


@pytest.mark.slow
def test_init_holds_less_than_the_largest_leaf(mesh24):
    """Beside the shards: a stack of layers is quantized layer by layer."""
    model = GPT.tiny(layers=8, width=128)
    _, step = lora_step(model, mesh24, TARGETS, frozen="int8")
    shapes = step.abstract_state(BATCH)
    init = jax.jit(
        lambda key, batch: step.programs.init(key, batch, shapes.placements),
        out_shardings=jax.tree.map(lambda x: x.sharding, shapes),
    )
    memory = init.lower(KEY, BATCH).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 8 * 128 * 512


def test_integers_that_are_no_wires_are_still_refused(mesh24):
    def init(key, batch):
        return {"w": jnp.ones((8, 8)), "flags": jnp.ones((8,), jnp.uint8)}

    step = zeroxla.make_step((init, lambda p, b, k: p["w"].sum()), mesh24)
    with pytest.raises(ValueError, match=r"flags.* has dtype uint8; parameters must be floating"):
        step.init(KEY, BATCH)


@pytest.mark.parametrize("frozen", ["int8", "int4"])
def test_a_form_that_no_leaf_is_large_enough_for_is_said(frozen):
    model = zeroxla.lora(MLP.tiny(), targets=r"dense_\d/kernel", rank=2, frozen=frozen)
    step = zeroxla.make_step(model, zeroxla.make_mesh(nodes=1))
    batch = {"image": np.zeros((8, 2, 2)), "label": np.zeros(8, int)}
    with pytest.warns(UserWarning, match=f"frozen='{frozen}' is without effect: no dense leaf"):
        step.abstract_state(batch)
    assert not model.plan.has_wires


@pytest.mark.parametrize(("frozen", "is_said"), [("int8", False), ("int4", True)])
def test_the_default_form_of_a_reference_may_have_no_effect(frozen, is_said):
    storage = zeroxla.rlhf.Storage(frozen=frozen, targets=r"dense_\d/kernel")
    step = zeroxla.make_step(storage.with_adapters(MLP.tiny()), zeroxla.make_mesh(nodes=1))
    batch = {"image": np.zeros((8, 2, 2)), "label": np.zeros(8, int)}
    with pytest.warns(UserWarning, match="without effect") if is_said else nullcontext():
        step.abstract_state(batch)
