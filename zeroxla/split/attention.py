"""The rule of cuDNN's attention: it can be split by heads, and by nothing else.

Without a GPU, where a plan is proved on a small instance, the same attention is computed with all
scores at once.
"""

from __future__ import annotations

import jax
from jax import lax

from zeroxla.program.primitives import ATTENTION_FORWARD
from zeroxla.program.trace import Equation
from zeroxla.split.atoms import Dims, atoms_in, block, dim_of
from zeroxla.split.rules import (
    Args,
    DimsOf,
    Rule,
    bind,
    connect_unknown,
    fresh,
    same,
    shape_of,
)
from zeroxla.split.split_axis import SplitAxis


def _connect(eq: Equation, ins: list[Dims]) -> list[Dims]:
    """Join the heads of queries, keys and values; consecutive query heads share a key head."""
    query, key, value, bias = ins[:4]
    params = eq.params
    if params["layout"] or params["is_training"] or params["dropout_rate"]:
        return connect_unknown(eq, ins)
    same(eq, key[2], value[2])
    num_shared = shape_of(eq.inputs[0])[2] // shape_of(eq.inputs[1])[2]
    same(eq, query[2], (*key[2], *dim_of(num_shared)))
    for atom in atoms_in(key[2]):
        atom.is_heads = True
    whole = [query[1], query[3], key[1], key[3], value[1], value[3]]
    has_bias, _ = params["variadic_args"]
    if has_bias:
        for dim, size, of_query in zip(bias, shape_of(eq.inputs[3]), (0, 2), strict=False):
            if size > 1:
                same(eq, dim, query[of_query])
        whole += bias[2:]
    for dims in (query, key, value):
        whole.append(dims[0])
    for dims in ins[4 if has_bias else 3 :]:
        whole += dims
    for dim in whole:
        block(dim, "attention needs it whole")
    (out,) = eq.outputs
    found = list(fresh(out))
    found[2] = query[2]
    for i in (0, 1, 3):
        block(found[i], "attention needs it whole")
    return [tuple(found)]


def _run(axis: SplitAxis, dims: DimsOf, eq: Equation, args: Args) -> list[jax.Array]:
    del axis, dims

    def kernel(*args: jax.Array) -> list[jax.Array]:
        return bind(eq, args)

    def plain(*args: jax.Array) -> list[jax.Array]:
        return [_with_all_scores(eq, args)]

    return lax.platform_dependent(*args, cuda=kernel, default=plain)


def _with_all_scores(eq: Equation, args: Args) -> jax.Array:
    """Compute cuDNN's attention in XLA."""
    params = eq.params
    query, key, value, bias, query_lengths, key_lengths = args[:6]
    has_bias, _ = params["variadic_args"]
    mask, window = params["mask_type"].name, params["sliding_window_length"]
    padded = mask.startswith("PADDING")
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        bias if has_bias else None,
        scale=params["scale"],
        is_causal=mask.endswith("CAUSAL"),
        query_seq_lengths=query_lengths if padded else None,
        key_value_seq_lengths=key_lengths if padded else None,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="xla",
    )


ATTENTION_RULES = dict.fromkeys(ATTENTION_FORWARD, Rule(_connect, _run))
