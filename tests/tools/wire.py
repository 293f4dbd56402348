"""The collectives of a mesh, and the result of a quantized gather computed in NumPy."""

import itertools

import jax.numpy as jnp
import numpy as np

from tools import quantize_oracle
from tools.quantize_cases import options
from zeroxla.wire.collectives import Collectives
from zeroxla.wire.gather import Gathers
from zeroxla.wire.hops import Hops
from zeroxla.wire.reduce import Reduces


def collectives_on(
    nodes, devices, *, hpz_size=None, compute_dtype="float32", reduce_dtype="float32", **options
):
    """Return the collectives of a mesh, without an offload or a config.

    Args:
      nodes, devices: lengths of the axes.
      hpz_size: number of devices that share a secondary shard. None means the devices of a node.
      compute_dtype: dtype of gathered leaves, also on the wire.
      reduce_dtype: wire dtype of gradients.
      **options: further arguments of both `Gathers` and `Reduces`, such as `alone_elements`.
    """
    hops = Hops(nodes=nodes, devices=devices, hpz_size=hpz_size or devices)
    dtype = jnp.dtype(compute_dtype)
    return Collectives(
        gathers=Gathers(hops=hops, compute_dtype=dtype, wire_dtype=dtype, **options),
        reduces=Reduces(hops=hops, dtype=jnp.dtype(reduce_dtype), **options),
    )


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
