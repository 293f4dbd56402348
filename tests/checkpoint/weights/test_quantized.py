"""Folders whose weights are kept in 8 bits or 4, against NumPy."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tools.families import FAMILIES, leaves_in, tensors_of
from tools.hugging_face import read_export
from tools.quick import quick_compilation  # noqa: F401

import zeroxla
from zeroxla import export_params, from_pretrained, make_step
from zeroxla.checkpoint.weights.dequantize import Quantized
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader
from zeroxla.models import from_hugging_face

pytestmark = pytest.mark.usefixtures("quick_compilation")

FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24]}
CHANNELS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
INT8 = {"quant_method": "compressed-tensors", "format": "int-quantized"}
BITS = {"quant_method": "bitsandbytes", "load_in_8bit": True}
LARGEST = float(ml_dtypes.finfo(ml_dtypes.float8_e4m3fn).max)


def blocks(x):
    """Return the largest sizes of blocks, and them for each number."""
    high, wide = FP8["weight_block_size"]
    rows, columns = -(-x.shape[0] // high), -(-x.shape[1] // wide)
    found = np.zeros((rows, columns), np.float32)
    for i in range(rows):
        for j in range(columns):
            found[i, j] = np.abs(x[i * high : (i + 1) * high, j * wide : (j + 1) * wide]).max()
    wide = found.repeat(high, 0).repeat(wide, 1)[: x.shape[0], : x.shape[1]]
    return found, wide


def quantized(method, name, x):
    """Return the tensors that stand for one, and what they mean."""
    if method is FP8:
        scale, wide = (s / LARGEST for s in blocks(x))
        values = (x / wide).astype(ml_dtypes.float8_e4m3fn)
        return {name: values, f"{name}_scale_inv": scale}, values.astype(np.float32) * wide
    rows = np.abs(x).max(axis=1, keepdims=True)
    if method is CHANNELS:
        scale = (rows / LARGEST).astype(np.float32)
        scale = scale.max(axis=0) if "o_proj" in name else scale  # one factor for the whole tensor
        values = (x / scale).astype(ml_dtypes.float8_e4m3fn)
        others = ("input_scale", "k_scale")  # of activations, and of cached keys
        more = {name.replace("weight", other): np.ones(1, "f4") for other in others}
        more[f"{name}_scale"] = scale
        return {name: values, **more}, values.astype(np.float32) * scale
    values = np.round(x / rows * 127).astype(np.int8)
    scale = (rows / 127).astype(np.float32)
    if method is INT8:
        return {name: values, f"{name}_scale": scale}, values.astype(np.float32) * scale
    stem = name.removesuffix("weight")
    more = {f"{stem}SCB": rows[:, 0].astype(np.float32), f"{stem}weight_format": np.uint8(0)}
    return {name: values, **more}, values.astype(np.float32) * scale


def folder_of(folder, name, method):
    """Write a folder whose products are quantized; return the tensors that it means."""
    files, meant = {}, {}
    for key, x in tensors_of(name).items():
        if x.ndim == 2 and "embed" not in key and "lm_head" not in key:
            own, meant[key] = quantized(method, key, x)
            files |= own
        else:
            files[key] = meant[key] = x
    folder.mkdir(parents=True)
    config = json.loads((FAMILIES / name / "config.json").read_text())
    config["quantization_config"] = method
    (folder / "config.json").write_text(json.dumps(config))
    files = {key: np.ascontiguousarray(x) for key, x in files.items()}
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    return meant


@pytest.mark.parametrize(
    ("name", "method"),
    [("phi3", FP8), ("qwen3_moe", FP8), ("llama3", CHANNELS), ("qwen2", INT8), ("llama3", BITS)],
    ids=["fp8", "fp8 experts", "channels", "int8", "bitsandbytes"],
)
def test_weights_of_8_bits_are_read_as_what_they_mean(tmp_path, name, method):
    meant = folder_of(tmp_path / "hub", name, method)
    model = from_hugging_face(tmp_path / "hub")
    step = make_step(model, zeroxla.make_mesh(nodes=2))
    step.abstract_state({"tokens": np.zeros((8, 9), np.int32)})
    state = from_pretrained(model, tmp_path / "hub", step)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    expected = leaves_in(plain, model)
    found = zeroxla.full_params(state)
    for path, x in expected.items():
        leaf = found
        for key in path:
            leaf = leaf[int(key) if key.isdecimal() and key not in leaf else key]
        np.testing.assert_allclose(leaf, x, rtol=1e-6, err_msg="/".join(path))

    # Devices read parts.
    reader, stored = TensorReader(tmp_path / "hub"), Quantized.of({"quantization_config": method})
    for key in (key for key, x in reader.tensors.items() if stored.holds(x)):
        part = tuple(slice(n // 3, n - 1) for n in meant[key].shape)
        found = stored.read(reader, key, part)
        np.testing.assert_allclose(found, meant[key][part], rtol=1e-6, err_msg=key)

    export_params(state, tmp_path / "out", model=model, like=tmp_path / "hub")
    assert {x.dtype.name for x in read_export(tmp_path / "out").values()} == {"float32"}
    written, said = (
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("out", "hub")
    )
    assert said.pop("quantization_config") == method
    assert written == said


FLOAT4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def test_experts_of_4_bits_are_read_as_what_they_mean(tmp_path):
    """Two numbers in a byte, 32 with one power of two, as gpt-oss keeps its experts."""
    config = json.loads((FAMILIES / "gpt_oss" / "config.json").read_text())
    config |= {"intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = json.loads((FAMILIES / "gpt_oss" / "tensors.json").read_text())
    draw = np.random.default_rng(0)
    files, meant = {}, {}
    for name, shape in shapes.items():
        shape = tuple({48: 64, 96: 128}.get(n, n) for n in shape)
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            files[name] = meant[name] = draw.normal(size=shape).astype("f4")
            continue
        experts, inputs, rows = shape
        codes = draw.integers(0, 16, (experts, rows, inputs // 32, 32)).astype(np.uint8)
        exponents = draw.integers(120, 130, codes.shape[:3]).astype(np.uint8)
        files[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        files[f"{name}_scales"] = exponents
        x = np.zeros(shape, np.float32)
        for e, row, i in np.ndindex(experts, rows, inputs):
            code = int(codes[e, row, i // 32, i % 32])
            size = FLOAT4[code % 8] * 2.0 ** (int(exponents[e, row, i // 32]) - 127)
            x[e, i, row] = -size if code >= 8 else size
        meant[name] = x
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    model = from_hugging_face(tmp_path)
    quantized = Quantized.of(config)
    found, expected = leaves_in(tmp_path, model, quantized), leaves_in(plain, model)
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, err_msg="/".join(path))

    reader = TensorReader(tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    part = (slice(1, 3), slice(13, 45), slice(5, 9))  # devices read parts
    read = quantized.read(reader, f"{name}_blocks", part)
    np.testing.assert_array_equal(read, meant[name][part])
    bad = {**files, f"{name}_scales": files[f"{name}_scales"][:, :1]}
    save_file(bad, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reader = TensorReader(tmp_path)
    with pytest.raises(ValueError, match=f"{name}_blocks has the shape .*blocks are"):
        quantized.read(reader, f"{name}_blocks", part)


def test_blocks_are_square_where_nothing_else_is_said():
    found = Quantized.of({"quantization_config": {"quant_method": "fp8"}})
    assert found is not None
    assert found.block == (128, 128)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            r"quantized as \{'quant_method': 'gptq', 'bits': 4\}",
        ),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path, config, message):
    folder_of(tmp_path / "hub", "llama3", BITS)
    said = json.loads((tmp_path / "hub" / "config.json").read_text())
    (tmp_path / "hub" / "config.json").write_text(
        json.dumps({**said, "quantization_config": config})
    )
    model = from_hugging_face(tmp_path / "hub")
    step = make_step(model, zeroxla.make_mesh(nodes=1))
    step.abstract_state({"tokens": np.zeros((8, 9), np.int32)})
    with pytest.raises(ValueError, match=message):
        from_pretrained(model, tmp_path / "hub", step)


def test_weights_in_the_tiles_of_a_gpu_are_refused(tmp_path):
    folder_of(tmp_path / "hub", "llama3", BITS)
    key, file = "model.layers.0.mlp.up_proj.weight", tmp_path / "hub" / "model.safetensors"
    files = {**load_file(file), f"{key}_format": np.array(2, np.uint8)}
    save_file(files, file, metadata={"format": "pt"})
    reader, found = TensorReader(tmp_path / "hub"), Quantized.of({"quantization_config": BITS})
    whole = tuple(slice(0, n) for n in files[key].shape)
    with pytest.raises(ValueError, match=f"{key} in .* tiles of a GPU .*is 2, and not 0"):
        found.read(reader, key, whole)


def test_factors_that_are_missing_or_do_not_fit_are_named(tmp_path):
    meant = folder_of(tmp_path / "hub", "llama3", FP8)
    model = from_hugging_face(tmp_path / "hub")
    step = make_step(model, zeroxla.make_mesh(nodes=1))
    step.abstract_state({"tokens": np.zeros((8, 9), np.int32)})
    key = "model.layers.0.mlp.up_proj.weight"
    values, _ = quantized(FP8, key, meant[key])
    for scale, message in (
        ({}, "factors .*up_proj.weight_scale_inv are missing"),
        ({f"{key}_scale_inv": np.ones((1, 2), np.float32)}, r"blocks of \[16, 24\]"),
    ):
        files = {**meant, key: values[key], **scale}
        save_file(files, tmp_path / "hub" / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            from_pretrained(model, tmp_path / "hub", step)
