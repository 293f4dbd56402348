"""Ring attention: causal attention along a split sequence, in which keys travel around the axis.

Queries stay. Keys and values go from device to device, and each device adds what its queries see of
them, with a softmax that is corrected as it goes. Nothing has the length of the whole sequence.

Under a causal mask a device with late positions would have more to do than one with early ones. So
positions are dealt anew: the sequence is cut into 2 n halves for n devices, and device i takes the
halves i and 2n - 1 - i, an early one and a late one (*zigzag*). Of the four pairs of halves of two
devices, queries then see two, whichever devices they are, and each device computes the same number
of blocks.

Everything here runs inside `shard_map`. Shape letters are those of `ring_blocks`; L are a device's
positions, which follow each other.

Source: Liu et al., Ring Attention, arXiv 2310.01889; Brandon et al., Striped Attention, arXiv
2311.09431, for the balance; zigzag as in Llama 3, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from zeroxla.split.ring_blocks import Blocks, Keys, Queries, Seen, attend, cotangents


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def ring_attention(
    axis: str,
    length: int,
    q_BLKGH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    mask_BL: jax.Array | None,
) -> jax.Array:
    """Mix values by softmax(q k / sqrt(H)) over the positions up to each query's own.

    Args:
      axis: the mesh axis.
      length: its length, n.
      q_BLKGH: this device's queries.
      k_BLKH, v_BLKH: its keys and values.
      mask_BL: nonzero at real tokens; None if all are.

    Returns:
      This device's results, [B, L, K, G, H] in the values' dtype. L must be even.

    Cost: forward receives n - 1 times the keys and values of a device, and once its queries, keys,
    values and results to deal positions; backward receives the keys and values again, n times their
    float32 cotangents, and once the four cotangents. It has a first derivative in reverse mode, and
    no other.
    """
    return _forward(axis, length, q_BLKGH, k_BLKH, v_BLKH, mask_BL)[0]


def _forward(
    axis: str,
    length: int,
    q_BLKGH: jax.Array,
    k_BLKH: jax.Array,
    v_BLKH: jax.Array,
    mask_BL: jax.Array | None,
) -> tuple[jax.Array, Any]:
    zigzag = _Zigzag(axis, length)
    q, k, v = (zigzag.dealt(x) for x in (q_BLKGH, k_BLKH, v_BLKH))
    mask = None if mask_BL is None else zigzag.dealt(mask_BL)
    blocks, own = Blocks(q.shape[1] // 2), zigzag.first(q.shape[1] // 2)
    keys, seen = Keys(k, v, mask, own), Seen.nothing(q)
    for turn in range(length):
        following = zigzag.passed_on(keys) if turn + 1 < length else keys
        seen = attend(blocks, seen, q, own, keys, zigzag.pairs(blocks, turn))
        keys = following
    out = (seen.total_BSKGH / seen.sum_BSKG[..., None]).astype(v.dtype)
    kept = (q, k, v, out, seen.largest_BSKG, seen.sum_BSKG)
    q, k, v, out, largest, total = (checkpoint_name(x, "attention") for x in kept)
    return zigzag.undone(out), (q, k, v, mask, out, largest, total)


def _backward(axis: str, length: int, kept: Any, d_out_BLKGH: jax.Array) -> tuple[Any, ...]:
    zigzag = _Zigzag(axis, length)
    q, k, v, mask, out, largest, total = kept
    d_out = zigzag.dealt(d_out_BLKGH)
    blocks, own = Blocks(q.shape[1] // 2), zigzag.first(q.shape[1] // 2)
    common = jnp.sum(d_out.astype(jnp.float32) * out, axis=-1)
    queries, keys = Queries(q, d_out, common, largest, total, own), Keys(k, v, mask, own)
    dq, dk, dv = (jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    for turn in range(length):
        following = zigzag.passed_on(keys) if turn + 1 < length else keys
        pairs = zigzag.pairs(blocks, turn)
        dq, dk, dv = cotangents(blocks, (dq, dk, dv), queries, keys, pairs)
        dk, dv = zigzag.passed_on((dk, dv))  # to the device that has these keys next
        keys = following
    found = zip((dq, dk, dv), (q, k, v), strict=True)
    return (*(zigzag.undone(x.astype(of.dtype)) for x, of in found), None)


ring_attention.defvjp(_forward, _backward)


class _Zigzag:
    """How positions are dealt to the devices.

    Attributes:
      axis: the mesh axis.
      length: its length, n.
    """

    def __init__(self, axis: str, length: int) -> None:
        self.axis, self.length = axis, length

    @property
    def index(self) -> jax.Array:
        """This device's place along the axis."""
        return lax.axis_index(self.axis)

    def first(self, half: int) -> jax.Array:
        """Return int32[2], the first positions of this device's halves, of so many positions."""
        return half * jnp.stack([self.index, 2 * self.length - 1 - self.index]).astype(jnp.int32)

    def passed_on(self, arrays: Any) -> Any:
        """Return what the device before has."""
        ring = [(i, (i + 1) % self.length) for i in range(self.length)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, ring), arrays)

    def pairs(self, blocks: Blocks, turn: int) -> jax.Array:
        """Return the pairs of blocks of a turn, int32[pairs, 2]. The keys that are here then come
        from the device so many places before, around the axis."""
        if turn == 0:
            return jnp.asarray(blocks.own)
        earlier, later = (jnp.asarray(blocks.visiting(are_earlier=x)) for x in (True, False))
        return jnp.where(self.index >= turn, earlier, later)

    def dealt(self, x: jax.Array) -> jax.Array:
        """Turn a device's consecutive positions, dim 1, into its two halves."""
        even, odd = (
            lax.ppermute(x, self.axis, to) for x, to in zip(_cut(x), self._to, strict=True)
        )
        is_even = self.index % 2 == 0
        early, late = jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)
        return jnp.concatenate([early, late], axis=1)

    def undone(self, x: jax.Array) -> jax.Array:
        """Undo `dealt`."""
        is_even, (early, late) = self.index % 2 == 0, _cut(x)
        sent = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
        pairs = zip(sent, self._to, strict=True)
        found = [lax.ppermute(x, self.axis, [(b, a) for a, b in to]) for x, to in pairs]
        return jnp.concatenate(found, axis=1)

    @property
    def _to(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(from, to) of the first halves of devices, which have even numbers, and of the second."""
        first, second = (
            [(i, min(h, 2 * self.length - 1 - h)) for i, h in enumerate(halves)]
            for halves in (range(0, 2 * self.length, 2), range(1, 2 * self.length, 2))
        )
        return first, second


def _cut(x: jax.Array) -> Sequence[jax.Array]:
    return jnp.split(x, 2, axis=1)
