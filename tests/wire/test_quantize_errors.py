"""Errors for bad wire formats, and of the functions that use them: each says what to do."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zeroxla.quantize import (
    Wire,
    WireFormat,
    dequant_reduce,
    dequant_sum,
    dequantize,
    quantize,
    swizzled_quantize,
)

KEY = jax.random.key(0)
X = jnp.ones(40)
FORMAT = WireFormat(block=16)
STOCHASTIC = WireFormat(block=16, rounding="stochastic")
WIRE = Wire(jnp.zeros(FORMAT.num_bytes(40), jnp.uint8), 40, FORMAT)


def says(text):
    """A match for a whole text."""
    return f"^{re.escape(text)}$"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"bits": 5}, "WireFormat(bits=5): a code has 8 or 4 bits"),
        ({"bits": "8"}, "WireFormat(bits='8'): a code has 8 or 4 bits"),
        *(
            (
                {"block": block},
                f"WireFormat(block={block}): a block has a whole number of elements, at least 1; "
                "256 is usual",
            )
            for block in (0, -256, 256.0, True)
        ),
        (
            {"scale": "max"},
            'WireFormat(scale=\'max\'): take "bound", "mse" or "deepspeed", or None for the '
            "default of the width",
        ),
        (
            {"rounding": "up"},
            'WireFormat(rounding=\'up\'): take "nearest" or "stochastic"',
        ),
        *(
            (
                {"rounding": "stochastic", "scale": scale},
                f'WireFormat(rounding="stochastic", scale={scale!r}): that scale clips the peak, '
                'so the mean would be biased; take scale="bound"',
            )
            for scale in ("mse", "deepspeed")
        ),
        (
            {"scale_dtype": "float16"},
            "WireFormat(scale_dtype='float16'): take float32 or bfloat16 (a float16 ends at 65504 "
            "and at 6e-8, which gradients pass)",
        ),
        ({"hadamard": 16}, "WireFormat(hadamard=16): take 32, or 0 for no rotation"),
        (
            {"hadamard": 32, "block": 100},
            "WireFormat(hadamard=32, block=100): a rotated block is a multiple of 32; take "
            "block=128, or hadamard=0",
        ),
        (
            {"hadamard": 32, "scale": "deepspeed"},
            'WireFormat(hadamard=32, scale="deepspeed"): that scale is for parity with DeepSpeed, '
            'which has no rotation; take scale="bound" or "mse"',
        ),
    ],
    ids=str,
)
def test_a_format_refuses(wrong, text):
    with pytest.raises(ValueError, match=says(text)):
        WireFormat(**wrong)


@pytest.mark.smoke
def test_what_a_format_takes_where_nothing_is_said():
    for given, (scale, scale_dtype) in (
        ({}, ("bound", "float32")),
        ({"bits": 4}, ("mse", "float32")),
        ({"bits": 4, "rounding": "stochastic"}, ("bound", "float32")),
        ({"block": 255}, ("bound", "bfloat16")),
        ({"bits": 4, "block": 128}, ("mse", "bfloat16")),
        ({"block": 128, "scale": "deepspeed"}, ("deepspeed", "float32")),
        ({"block": 128, "scale_dtype": "float32"}, ("bound", "float32")),
        ({"scale_dtype": "bfloat16"}, ("bound", "bfloat16")),
    ):
        format = WireFormat(**given)
        assert (format.scale, format.scale_dtype) == (scale, scale_dtype), given
    # Formats are values: what is said and what is taken for granted are the same.
    assert WireFormat() == WireFormat(scale="bound", scale_dtype="float32")
    assert hash(WireFormat()) == hash(WireFormat(scale="bound", scale_dtype="float32"))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("quantize", lambda x: quantize(x, FORMAT)),
        ("swizzled_quantize", lambda x: swizzled_quantize(x, FORMAT, nodes=1, devices=1)),
    ],
)
def test_quantize_refuses_an_array(name, call):
    for x, dtype in ((np.ones((2, 3), np.int32), "int32"), (np.ones((2, 3), bool), "bool")):
        text = (
            f"{name}: an array of {dtype}, shape (2, 3); it takes float32, bfloat16 and float16: "
            "convert it, or leave it as it is on the wire"
        )
        with pytest.raises(ValueError, match=says(text)):
            call(x)
    with pytest.raises(
        ValueError, match=says(f"{name}: an array of shape (3, 0) has no elements to quantize")
    ):
        call(jnp.ones((3, 0)))


@pytest.mark.parametrize(
    "call",
    [
        lambda format, key: quantize(X, format, key=key),
        lambda format, key: swizzled_quantize(X, format, nodes=2, devices=2, key=key),
        lambda format, key: dequant_reduce(Wire(WIRE.buffer[None], 40, FORMAT), format, key=key),
    ],
    ids=["quantize", "swizzled_quantize", "dequant_reduce"],
)
def test_a_key_is_needed_for_stochastic_rounding_and_refused_without(call):
    advice = "stochastic rounding takes a PRNG key, and rounding to the nearest takes none"
    for format, key, found in ((STOCHASTIC, None, "None"), (FORMAT, KEY, "given")):
        text = f"key={found} with rounding={format.rounding!r}: {advice}"
        with pytest.raises(ValueError, match=says(text)):
            call(format, key)


def test_dequantize_refuses_another_size():
    with pytest.raises(
        ValueError,
        match=says(
            "dequantize: shape (6, 7) has 42 elements, and the wire stands for 40; give the shape "
            "of the quantized array"
        ),
    ):
        dequantize(WIRE, (6, 7))


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64"])
def test_dequantize_refuses_another_dtype(dtype):
    text = f"dequantize: dtype {dtype} is not float32, bfloat16 or float16"
    with pytest.raises(ValueError, match=says(text)):
        dequantize(WIRE, (40,), dtype)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dequantize", lambda wire: dequantize(wire, (40,))),
        ("dequant_sum", lambda wire: dequant_sum(wire, (40,))),
        ("dequant_reduce", dequant_reduce),
    ],
)
@pytest.mark.parametrize(
    ("buffer", "seen"),
    [
        (np.zeros((3, 47), np.uint8), "uint8[3, 47]"),
        (np.zeros((3, 0), np.uint8), "uint8[3, 0]"),
        (np.zeros((3, 48), np.int8), "int8[3, 48]"),
        (np.zeros((), np.uint8), "uint8[]"),
    ],
    ids=["long", "empty", "dtype", "scalar"],
)
def test_a_buffer_of_another_length_or_dtype_is_refused(name, call, buffer, seen):
    assert FORMAT.num_bytes(40) == 48
    text = (
        f"{name}: a buffer of {seen}, but a wire of 40 elements in {FORMAT} is uint8[..., 48]; "
        "pass the buffer as quantize made it"
    )
    with pytest.raises(ValueError, match=says(text)):
        call(Wire(jnp.asarray(buffer), 40, FORMAT))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dequant_sum", lambda wire: dequant_sum(wire, (40,))),
        ("dequant_reduce", dequant_reduce),
    ],
)
def test_a_reduction_needs_sources(name, call):
    for shape in ((48,), (0, 48)):
        text = (
            f"{name}: a buffer of shape {shape} has no sources; stack the wires along a first dim"
        )
        with pytest.raises(ValueError, match=says(text)):
            call(Wire(jnp.zeros(shape, jnp.uint8), 40, FORMAT))


@pytest.mark.parametrize("wrong", [{"nodes": 0}, {"devices": -4}, {"chunks": 0}], ids=str)
def test_swizzled_quantize_refuses_a_count(wrong):
    ((name, count),) = wrong.items()
    text = f"swizzled_quantize: {name}={count}; it is at least 1"
    with pytest.raises(ValueError, match=says(text)):
        swizzled_quantize(X, FORMAT, **{"nodes": 2, "devices": 2, **wrong})


def test_swizzled_quantize_refuses_a_size_that_does_not_divide():
    text = (
        "swizzled_quantize: 40 elements do not divide into 2 nodes x 3 devices x 2 chunks; pad x "
        "to a multiple of 12"
    )
    with pytest.raises(ValueError, match=says(text)):
        swizzled_quantize(X, FORMAT, nodes=2, devices=3, chunks=2)


def test_errors_come_while_tracing():
    with pytest.raises(ValueError, match="it takes float32, bfloat16 and float16"):
        jax.eval_shape(lambda x: quantize(x, FORMAT), jax.ShapeDtypeStruct((4,), jnp.int8))
    with pytest.raises(ValueError, match="the wire stands for 40"):
        jax.eval_shape(lambda wire: dequantize(wire, (41,)), WIRE)
