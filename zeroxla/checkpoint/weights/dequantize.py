"""Weights that a folder keeps in 8 bits or 4, with scales beside them, as float32.

Four formats that are documented are read:

    fp8                 float8_e4m3 [out, in] and `weight_scale_inv`, one factor for each block of
                        `weight_block_size`, 128 x 128 (DeepSeek-V3, Qwen3-FP8)
    compressed-tensors  float8_e4m3 or int8 [out, in] and `weight_scale`: one factor, or one for
                        each row (llm-compressor)
    bitsandbytes        int8 [out, in] and `SCB`, the largest size of each row, over 127
                        (LLM.int8, arXiv 2208.07339)
    mxfp4               of gpt-oss's experts: `NAME_blocks`, uint8 [E, out, in / 32, 16], two float4
                        (E2M1) in a byte, the first in its low bits, and `NAME_scales`, uint8
                        [E, out, in / 32], exponents of two plus 127 (OCP Microscaling Formats 1.0)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from zeroxla.checkpoint.weights.safetensors_reader import FLOAT8, StoredTensor, TensorReader

EIGHT_BITS = (FLOAT8, "I8")
"""Dtypes of quantized weights, as the headers of files call them."""

KEY = "quantization_config"
_SCALES = {"fp8": "_scale_inv", "compressed-tensors": "_scale"}
_BLOCKS, _EXPONENTS, _BLOCK = "_blocks", "_scales", 32
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_OF_FORMATS = ("_zero_point", "_shape", "_g_idx", "_packed")
"""Ends of names that only formats with fewer bits, or with zero points, have."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """How the weights of a folder are quantized.

    Attributes:
      method: "fp8", "compressed-tensors", "bitsandbytes" or "mxfp4".
      block: the rows and columns of a factor's block; for fp8.
    """

    method: str
    block: tuple[int, int] = (128, 128)

    @staticmethod
    def of(config: Mapping[str, Any]) -> Quantized | None:
        """Read a config.json; None if it says nothing of quantized weights.

        Raises:
          ValueError: the format is not read here.
        """
        said = config.get(KEY)
        if said is None:
            return None
        method = said.get("quant_method")
        if method == "fp8":
            block = said.get("weight_block_size") or (128, 128)
            return Quantized(method=method, block=(int(block[0]), int(block[1])))
        is_naive = said.get("format") in ("float-quantized", "int-quantized", "naive-quantized")
        if method == "compressed-tensors" and is_naive:
            return Quantized(method=method)
        if method == "bitsandbytes" and said.get("load_in_8bit"):
            return Quantized(method=method)
        if method == "mxfp4":
            return Quantized(method=method)
        shown = {key: said[key] for key in ("quant_method", "format", "bits") if key in said}
        raise ValueError(
            f"the config says that weights are quantized as {shown}; 8-bit weights of the methods "
            "'fp8', 'compressed-tensors' (not packed) and 'bitsandbytes', and 'mxfp4', are read: "
            "dequantize them with the program that made them"
        )

    def holds(self, stored: StoredTensor) -> bool:
        """Return whether a tensor is a quantized weight."""
        return stored.dtype in EIGHT_BITS or (self.method == "mxfp4" and stored.dtype == "U8")

    def weight_of(self, name: str) -> str:
        """Return the name of the weight that a tensor holds."""
        return name.removesuffix(_BLOCKS) if self.method == "mxfp4" else name

    def shape_of(self, stored: StoredTensor) -> tuple[int, ...]:
        """Return the shape of the weight that a tensor holds."""
        if self.method != "mxfp4" or not self.holds(stored):
            return stored.shape
        *first, rows, blocks, _ = stored.shape
        return (*first, blocks * _BLOCK, rows)

    def scale_of(self, name: str) -> str:
        """Return the name of the tensor with the factors of a weight."""
        if self.method == "bitsandbytes":
            return f"{name.removesuffix('weight')}SCB"
        if self.method == "mxfp4":
            return f"{name.removesuffix(_BLOCKS)}{_EXPONENTS}"
        return f"{name}{_SCALES[self.method]}"

    def is_beside(self, name: str, names: Mapping[str, Any]) -> bool:
        """Return whether a tensor only serves to read another one."""
        if self.method == "bitsandbytes":
            stem = name.removesuffix("SCB").removesuffix("weight_format")
            return stem != name and f"{stem}weight" in names
        if self.method == "mxfp4":
            return f"{name.removesuffix(_EXPONENTS)}{_BLOCKS}" in names
        # Activations that were quantized too have factors of their own, which weights do not need.
        for end in (_SCALES[self.method], "_scale", *_OF_FORMATS):
            if name.endswith(end) and name.removesuffix(end) in names:
                return True
        return name.endswith(("input_scale", "output_scale", "k_scale", "v_scale"))

    def read(self, reader: TensorReader, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Return a part of a weight, float32.

        Args:
          reader: the folder's files.
          name: the weight.
          index: a slice for each dim.

        Raises:
          ValueError: the factors are missing or do not fit the weight.
        """
        stored, scale = reader.tensors[name], self.scale_of(name)
        if scale not in reader.tensors:
            raise ValueError(
                f"the tensor {name} in {stored.file} is of the dtype {stored.dtype}, and its "
                f"factors {scale} are missing; download the folder anew"
            )
        factors = reader.tensors[scale].shape
        if self.method == "mxfp4":
            return self._of_pairs(reader, name, scale, index)
        values = reader.read_any(name, index).astype(np.float32)
        whole = tuple(slice(0, n) for n in factors)
        if self.method == "fp8" and len(factors) == 2 and len(stored.shape) == 2:
            return values * self._of_blocks(reader, name, scale, index)
        if np.prod(factors) not in (1, stored.shape[0]):
            raise ValueError(
                f"the tensor {scale} in {reader.tensors[scale].file} has the shape "
                f"{list(factors)}; one factor, or one for each of the {stored.shape[0]} rows of "
                f"{name}, can be read"
            )
        own = reader.read(scale, whole).astype(np.float32).reshape(-1)
        own = own[index[0]] if own.size > 1 else own
        if self.method == "bitsandbytes":
            self._check_row_by_row(reader, name)
            own = own / 127
        return values * own.reshape(-1, *(1,) * (values.ndim - 1))

    def _of_pairs(
        self, reader: TensorReader, name: str, scale: str, index: tuple[slice, ...]
    ) -> np.ndarray:
        """Return a part of a weight [E, in, out] whose inputs are kept two in a byte."""
        shapes = reader.tensors[name].shape, reader.tensors[scale].shape
        if len(shapes[0]) != 4 or shapes[0] != (*shapes[1], _BLOCK // 2):
            raise ValueError(
                f"the tensor {name} has the shape {list(shapes[0])}, and {scale} "
                f"{list(shapes[1])}; blocks are [E, out, in / 32, 16], their scales without the 16"
            )
        experts, inputs, rows = index
        blocks = slice(inputs.start // _BLOCK, -(-inputs.stop // _BLOCK))
        pairs = reader.read_any(name, (experts, rows, blocks, slice(0, _BLOCK // 2)))
        exponents = reader.read_any(scale, (experts, rows, blocks)).astype(np.int32) - 127
        values = np.stack([_FLOAT4[pairs & 15], _FLOAT4[pairs >> 4]], axis=-1)
        values = np.ldexp(values.reshape(*pairs.shape[:3], _BLOCK), exponents[..., None])
        first = inputs.start - blocks.start * _BLOCK
        flat = values.reshape(*pairs.shape[:2], -1)[..., first : first + inputs.stop - inputs.start]
        return np.swapaxes(flat, 1, 2)

    def _check_row_by_row(self, reader: TensorReader, name: str) -> None:
        """Check that bitsandbytes has not stored a weight in the tiles of some GPU.

        Raises:
          ValueError: it has; the numbers are not in the places that the shape says.
        """
        beside = f"{name}_format"
        stored = reader.tensors.get(beside)
        if stored is not None:
            form = reader.read_any(beside, tuple(slice(0, n) for n in stored.shape))
            if np.any(form != 0):
                raise ValueError(
                    f"the tensor {name} in {stored.file} is stored in the tiles of a GPU "
                    f"({beside} is {int(np.max(form))}, and not 0); save the model anew with a "
                    "later bitsandbytes"
                )

    def _of_blocks(
        self, reader: TensorReader, name: str, scale: str, index: tuple[slice, ...]
    ) -> np.ndarray:
        """Return the factor of each number of a part."""
        shape, factors = reader.tensors[name].shape, reader.tensors[scale].shape
        needed = tuple(-(-n // size) for n, size in zip(shape, self.block, strict=True))
        if factors != needed:
            raise ValueError(
                f"the tensor {scale} has the shape {list(factors)}, and blocks of "
                f"{list(self.block)} in {name} {list(shape)} need {list(needed)}"
            )
        parts = tuple(
            slice(own.start // size, -(-own.stop // size))
            for own, size in zip(index, self.block, strict=True)
        )
        found = reader.read(scale, parts).astype(np.float32)
        for dim, (own, size, part) in enumerate(zip(index, self.block, parts, strict=True)):
            places = np.arange(own.start, own.stop) // size - part.start
            found = np.take(found, places, axis=dim)
        return found
