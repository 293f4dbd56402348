"""The result of a quantized gather, computed in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np

from tools import quantize_oracle
from tools.quantize_cases import options


def as_it_arrives(leaf, placement, world, format):
    """Quantize each layer of each shard in NumPy; return the leaf made of the decoded shards."""
    stored = np.array(placement.stored(jnp.asarray(leaf)))
    shards = np.split(stored, world, axis=placement.dim)
    layers = [range(stored.shape[d]) for d in placement.layer_dims]
    for shard, at in itertools.product(shards, itertools.product(*layers)):
        index = tuple(
            at[placement.layer_dims.index(d)] if d in placement.layer_dims else slice(None)
            for d in range(stored.ndim)
        )
        data = quantize_oracle.quantize(np.ravel(shard[index]), **options(format))
        values = quantize_oracle.dequantize(data, shard[index].size, **options(format))
        shard[index] = values.reshape(shard[index].shape)
    whole = np.concatenate(shards, axis=placement.dim)
    return whole[tuple(slice(n) for n in leaf.shape)]
