"""Tiny checkpoints of model families, as `fixtures/families/record.py` recorded them.

Shape letters: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from safetensors.numpy import save_file

from tools.family_weights import weights
from zeroxla.checkpoint.weights.dequantize import Quantized
from zeroxla.checkpoint.weights.leaf_in_files import leaves_in_files
from zeroxla.checkpoint.weights.pretrained import find_tensors
from zeroxla.checkpoint.weights.safetensors_reader import TensorReader
from zeroxla.checkpoint.weights.tensor_names import (
    abstract,
    format_leaves,
    format_of,
    param_shapes,
)

FAMILIES = Path(__file__).parents[1] / "fixtures" / "families"
NAMES = sorted(path.parent.name for path in FAMILIES.glob("*/recorded.npz"))
DECODERS = [name for name in NAMES if name != "bert"]


def recorded(name: str) -> Any:
    """Return what Transformers computed."""
    return np.load(FAMILIES / name / "recorded.npz")


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """Return the tensors of a checkpoint."""
    shapes = json.loads((FAMILIES / name / "tensors.json").read_text())
    return weights(shapes, plus_one=name.startswith("gemma"))


def write_folder(folder: Path, name: str, tensors: dict[str, np.ndarray]) -> Path:
    """Write a folder like the one in which Transformers saves a model."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text((FAMILIES / name / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def leaves_in(
    folder: Path, model: Any, quantized: Quantized | None = None
) -> dict[tuple[str, ...], np.ndarray]:
    """Return what the files of a folder hold, by the paths of the model's leaves."""
    module = abstract(model)
    format = format_of(module)
    leaves = format_leaves(param_shapes(module), format, module)
    reader = TensorReader(folder)
    names = find_tensors(reader, leaves, format, quantized)
    arrays = leaves_in_files(leaves, reader, names, quantized)
    return {leaf.path: arrays[leaf.path][tuple(slice(0, n) for n in leaf.shape)] for leaf in leaves}


def forward_of(model: Any) -> Any:
    """Return a function (leaves by path, tokens, **arguments of a call) -> the call's result."""
    if isinstance(model, nn.Module):
        return lambda leaves, tokens, **more: model.apply(
            {"params": traverse_util.unflatten_dict(leaves)}, tokens, **more
        )
    graphdef, params, rest = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))), nnx.Param, ...)
    flat = nnx.to_flat_state(params)

    def forward(leaves: Any, tokens: jax.Array, **more: Any) -> Any:
        filled = [(path, x.replace(leaves[tuple(map(str, path))])) for path, x in flat]
        return nnx.merge(graphdef, nnx.from_flat_state(filled), rest)(tokens, **more)

    return forward


def loss_of(forward: Any, leaves: Any, tokens_BL: jax.Array, mask_BL: jax.Array) -> jax.Array:
    """Return the mean cross-entropy of the next tokens that are no padding."""
    targets_BL = jnp.roll(tokens_BL, -1, axis=1)
    losses_BL = forward(leaves, tokens_BL, targets_BL=targets_BL, mask_BL=mask_BL)
    counts_BL = mask_BL[:, 1:]
    return (losses_BL[:, :-1] * counts_BL).sum() / counts_BL.sum()
