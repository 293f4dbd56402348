"""Import and export of weights: Hugging Face's logits, bit-equal tensors, one leaf in memory at a
time."""

import json
import tracemalloc

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tools.hugging_face import (
    assert_same_tensors,
    forward,
    gpt_tree,
    hub_folder,
    llama_tree,
    read_export,
    recorded,
)
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla.checkpoint.checkpointer import Checkpointer
from zeroxla.checkpoint.weights import export_files, safetensors_writer
from zeroxla.checkpoint.weights.export import export_params
from zeroxla.checkpoint.weights.pretrained import from_pretrained
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader
from zeroxla.checkpoint.weights.safetensors_writer import make_plan
from zeroxla.checkpoint.weights.sources import StateSource
from zeroxla.models import GPT, Llama, from_hugging_face
from zeroxla.models.losses import next_token_loss
from zeroxla.program.paths import paths_of

pytest.importorskip("safetensors", reason="safetensors is not installed")
pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(5)
BATCH = {"tokens": np.random.default_rng(1).integers(0, 61, (24, 9), np.int32)}
# On (3, 2) a step is taken, which takes the imported arrays' place.
QUICK = [("d_gpt2", True, (2, 4))]
SLOW = [
    ("d_llama_gqa_tied", True, (3, 2)),
    ("d_llama_mha", True, (1, 8)),
    ("d_gpt2", False, (1, 8)),
    ("d_llama_gqa_tied", False, (2, 4)),
]


def padded_loss(apply, batch, *, train):
    """The loss of left-padded rows as Transformers computes it."""
    logits = apply(
        batch["tokens"], positions_BL=batch["positions"], mask_BL=batch["attention_mask"]
    )
    return next_token_loss(logits[:, :-1], {"tokens": batch["tokens"], "mask": batch["mask"]})


def make_step(model, shape, loss=None):
    nodes, devices = shape
    mesh = zeroxla.make_mesh(nodes=nodes, devices_per_node=devices)
    config = zeroxla.ZeroConfig(persistence_threshold=100)
    return zeroxla.make_step(model, mesh, optax.adam(1e-3), loss=loss, config=config)


def trained(model, shape=(2, 4)):
    """(step, state): a model of which nothing is at its initial value."""
    step = make_step(model, shape)
    state, _ = step(step.init(KEY, BATCH), BATCH)
    return step, state


@pytest.fixture(scope="module")
def gpt():
    model = GPT.tiny(tie=False, vocab=61)  # 61 divides by no mesh
    return model, *trained(model)


def assert_same_params(found, expected):
    found, expected = dict(paths_of(found)), dict(paths_of(expected))
    assert found.keys() == expected.keys()
    for path, x in found.items():
        np.testing.assert_array_equal(x, expected[path], err_msg="/".join(path))


@pytest.mark.parametrize(("name", "scan", "shape"), thinned(QUICK, slow=SLOW, rows=True))
def test_imported_weights_give_the_recorded_logits_and_come_back_bit_by_bit(
    tmp_path, name, scan, shape
):
    config, tensors, data = recorded(name)
    folder = hub_folder(tmp_path / "hub", name)
    model = from_hugging_face(folder, scan=scan)
    step = make_step(model, shape, padded_loss)
    keys = {"tokens": "input_ids", "positions": "position_ids", "attention_mask": "attention_mask"}
    batch = {ours: np.tile(data[theirs], (6, 1)) for ours, theirs in keys.items()}
    batch["mask"] = np.tile(data["labels"][:, 1:] != -100, (6, 1))
    step.abstract_state(batch)
    state = from_pretrained(model, folder, step, key=KEY)

    params = zeroxla.full_params(state)
    if not scan:
        tree = gpt_tree if name == "d_gpt2" else llama_tree
        assert_same_params(params, jax.tree.map(np.asarray, tree(tensors)))
    logits = forward(
        model, params, *(data[k] for k in ("input_ids", "position_ids", "attention_mask"))
    )
    real = data["attention_mask"] != 0
    np.testing.assert_allclose(logits[real], data["logits_leftpad"][real], atol=1e-5)
    if scan:  # on the sharded state itself
        np.testing.assert_allclose(step.eval(state, batch)["loss"], data["loss"], atol=1e-5)

    export_params(state, tmp_path / "out", model=model, max_shard_size="300KB")
    assert_same_tensors(read_export(tmp_path / "out"), tensors)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == config["model_type"]
    for shapes, x in zip(jax.tree.leaves(step.shapes()), jax.tree.leaves(state), strict=True):
        assert x.sharding.is_equivalent_to(shapes.sharding, x.ndim)
    if shape == (3, 2):
        _, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"], data["loss"], atol=1e-5)


@pytest.mark.parametrize(
    ("tie", "shape"), thinned([(True, (3, 2))], slow=[(False, (2, 4))], rows=True)
)
def test_a_model_comes_back_as_it_went_out_scanned_or_not(tmp_path, tie, shape):
    model = Llama.tiny(tie=tie, vocab=61, rope_scaling={"rope_type": "linear", "factor": 2.0})
    step = make_step(model, shape)
    state = step.init(KEY, BATCH)
    export_params(state, tmp_path, model=model)
    tensors = read_export(tmp_path)
    assert ("lm_head.weight" in tensors) != tie
    again = from_pretrained(model, tmp_path, step, key=KEY)
    assert_same_params(zeroxla.full_params(again), zeroxla.full_params(state))
    np.testing.assert_array_equal(*(jax.random.key_data(x.key) for x in (again, state)))
    assert int(again.step) == 0
    built = from_hugging_face(tmp_path, scan=False)
    unrolled = make_step(built, (1, 8))
    unrolled.abstract_state(BATCH)
    other = from_pretrained(built, tmp_path, unrolled)
    assert_same_params(zeroxla.full_params(other), jax.tree.map(np.asarray, llama_tree(tensors)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.slow
def test_narrow_tensors_are_rounded_to_nearest_and_widened_back(tmp_path, gpt, dtype):
    model, step, state = gpt
    export_params(state, tmp_path / "32", model=model)
    export_params(state, tmp_path / "16", model=model, dtype=dtype)
    wide, narrow = read_export(tmp_path / "32"), read_export(tmp_path / "16")
    # Rounding of the mantissa to nearest, ties to even, done in integers where it is bfloat16.
    if dtype == "bfloat16":
        bits = {name: x.view(np.uint32) for name, x in wide.items()}
        bits = {
            n: ((b + 0x7FFF + ((b >> 16) & 1)) >> 16).astype(np.uint16) for n, b in bits.items()
        }
        expected = {n: b.view(jnp.bfloat16) for n, b in bits.items()}
    else:
        expected = {name: x.astype(np.float16) for name, x in wide.items()}
    assert_same_tensors(narrow, expected)
    assert json.loads((tmp_path / "16" / "config.json").read_text())["torch_dtype"] == dtype
    state = from_pretrained(model, tmp_path / "16", step)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
    export_params(state, tmp_path / "again", model=model, dtype=dtype)
    assert_same_tensors(read_export(tmp_path / "again"), narrow)


@pytest.mark.smoke
def test_shards_have_an_index_and_replace_an_older_export(tmp_path, gpt, monkeypatch):
    model, _, state = gpt
    export_params(state, tmp_path / "one", model=model)
    (tmp_path / "one" / "tokenizer.json").write_text("{}")
    one = read_export(tmp_path / "one")
    names = lambda: sorted(file.name for file in (tmp_path / "one").iterdir())  # noqa: E731
    assert names() == ["config.json", "model.safetensors", "tokenizer.json"]
    monkeypatch.setattr(safetensors_writer, "_BLOCK_BYTES", 1000)  # some rows of a tensor
    for size, limit in (("20KB", 20_000), (40_000, 40_000)):
        files = export_params(state, tmp_path / "one", model=model, max_shard_size=size)
        assert names() == sorted(
            ["config.json", "tokenizer.json", "model.safetensors.index.json"]
            + [file.name for file in files]
        )
        assert files[1].name == f"model-00002-of-{len(files):05d}.safetensors"
        assert_same_tensors(read_export(tmp_path / "one"), one)
        assert all(file.stat().st_size <= limit + 4000 for file in files)
    export_params(state, tmp_path / "one", model=model)
    assert names() == ["config.json", "model.safetensors", "tokenizer.json"]


def test_files_are_filled_in_the_order_of_numbers():
    shapes = {f"h.{i}.w": (5,) for i in (10, 2, 1, 3)} | {"h.11.w": (1, 11)}
    plan = make_plan(shapes, dtype="float32", max_shard_bytes=40)
    files = [[name for name, x in plan.tensors.items() if x.file == file] for file in plan.sizes]
    assert files == [["h.1.w", "h.2.w"], ["h.3.w", "h.10.w"], ["h.11.w"]]


def test_the_library_reads_what_was_written(tmp_path, gpt):
    from safetensors import safe_open
    from safetensors.numpy import load_file

    model, _, state = gpt
    for dtype in ("float32", "bfloat16"):
        (file,) = export_params(state, tmp_path, model=model, dtype=dtype, config={"bos": 7})
        assert json.loads((tmp_path / "config.json").read_text())["bos"] == 7
        assert_same_tensors(load_file(file), read_export(tmp_path))
        with safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
        # Of this the library takes no slice.
        empty = TensorReader(tmp_path).read("transformer.wte.weight", (slice(3, 3), slice(0, 5)))
        assert (empty.shape, empty.dtype.name) == ((0, 5), dtype)


class Net(nn.Module):
    """Padded, small, scalar and empty leaves; batch statistics."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, use_fast_variance=False)(nn.Dense(13)(x))
        empty = self.param("empty", nn.initializers.normal(), (0, 3))
        scalar = self.param("scalar", nn.initializers.normal(), ())
        return nn.Dense(3)(x) * scalar + empty.sum()

    def loss(self, batch, *, train):
        return jnp.mean(self(batch["x"], train) ** 2)


def test_any_model_has_flat_names_from_a_state_and_from_its_checkpoint(tmp_path):
    step = make_step(Net(), (2, 4))
    batch = {"x": np.ones((8, 7), np.float32)}
    state = step.init(KEY, batch)
    export_params(state, tmp_path / "state", model=Net())
    found = read_export(tmp_path / "state")
    params = zeroxla.full_params(state)
    assert found.keys() == {
        *("BatchNorm_0.bias", "BatchNorm_0.scale", "Dense_0.bias", "Dense_0.kernel"),
        *("Dense_1.bias", "Dense_1.kernel", "empty", "scalar"),
    }
    for name, x in found.items():
        expected = params
        for key in name.split("."):
            expected = expected[key]
        np.testing.assert_array_equal(x, expected)
    with pytest.warns(UserWarning, match="it starts fresh, while the parameters do not"):
        again = step.init_from(state.params, KEY)
    assert_same_params(again.model_state, state.model_state)
    assert_same_params(again.opt_state, state.opt_state)
    with Checkpointer(tmp_path / "saved") as checkpointer:
        checkpointer.save(1, step.init(jax.random.key(6), batch))
        checkpointer.save(2, state)
    for source in ("saved", "saved/2", "saved/2/state"):
        export_params(tmp_path / source, tmp_path / "out")
        assert_same_tensors(read_export(tmp_path / "out"), found)
    export_params(tmp_path / "saved/1", tmp_path / "out")
    older = read_export(tmp_path / "out")
    assert older.keys() == found.keys()
    assert not np.array_equal(older["Dense_0.kernel"], found["Dense_0.kernel"])
    (spoilt,) = (tmp_path / "saved/1").rglob("about.json")
    spoilt.write_bytes(spoilt.read_bytes() + b" ")
    with pytest.raises(ValueError, match=r"saved/1 is damaged: .*; name the folder of another"):
        export_params(tmp_path / "saved/1", tmp_path / "out")


def test_one_leaf_is_in_host_memory_at_a_time(tmp_path):
    leaf_bytes = 4 << 20
    model = (
        lambda key, batch: {f"w{i}": jnp.full((1024, 1024), i, jnp.float32) for i in range(8)},
        lambda params, batch, key: sum(x.sum() for x in params.values()) * batch["x"].mean(),
    )
    step = make_step(model, (2, 4))
    state = step.init(KEY, {"x": np.ones((8,), np.float32)})
    said = []
    tracemalloc.start()
    try:
        export_params(state, tmp_path, progress=lambda done, whole: said.append((done, whole)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.6 * leaf_bytes  # the leaf, and a shard of it on its way
    assert said == [((i + 1) * leaf_bytes, 8 * leaf_bytes) for i in range(8)]
    assert read_export(tmp_path)["w7"][0, 0] == 7


def test_other_processes_take_part_and_write_nothing(tmp_path, monkeypatch, gpt):
    model, _, state = gpt
    read = []
    plain = StateSource.read
    monkeypatch.setattr(StateSource, "read", lambda self, p: (read.append(p), plain(self, p))[1])
    monkeypatch.setattr(export_files.jax, "process_index", lambda: 1)
    export_params(state, tmp_path / "out", model=model)
    assert len(read) == len(jax.tree.leaves(state.params))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_state_of_given_parameters_computes_no_others(gpt):
    _, step, _ = gpt
    state = step.init(KEY, BATCH)
    again = step.init_from(state.params, KEY)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(*map(np.asarray, (a, b))),
        (again.params, again.opt_state, again.loss_scale, jax.random.key_data(again.key)),
        (state.params, state.opt_state, state.loss_scale, jax.random.key_data(state.key)),
    )
    shapes = step.shapes()
    lowered = jax.jit(step.programs.init_from, static_argnums=4).lower(
        shapes.params, None, KEY, BATCH, shapes.placements
    )
    assert "erf_inv" not in lowered.as_text()  # of the normal distribution
