"""Names of JAX's primitives, by what they do.

Every set of names by which zeroxla tells equations apart is here. `test_primitives.py` compares the
names with those of the installed JAX. Come here when JAX adds, renames or drops a primitive.
"""

from __future__ import annotations

import math


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj "
    "convert_element_type copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "imag integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul name ne neg "
    "nextafter not one_minus_square or population_count pow real reduce_precision rem round rsqrt "
    "select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor"
)
"""Each element of the result is computed from the operands' elements at the same place."""

EXPENSIVE = _names(
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 "
    "expm1 lgamma log log1p log2 logistic pow rem rsqrt sin sinh sqrt tan tanh"
)
"""The elementwise ones that compilers do not compute again for a second reader."""

NO_GRADIENT = frozenset({"ceil", "floor", "round", "sign", "stop_gradient"})
"""Their derivative is zero everywhere, so no gradient crosses them."""

REDUCTIONS = _names(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
)
"""They go through some dims and give one result for each element of the others."""

WINDOW_REDUCTIONS = frozenset(
    {"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"}
)
"""They give one result for each place of a window that moves through the operand."""

CONTRACTIONS = frozenset({"conv_general_dilated", "dot_general"})
"""Matrix products and convolutions."""

ATTENTION_FORWARD = frozenset({"dot_product_attention_fwd_wrapper"})
"""`jax.nn.dot_product_attention(implementation="cudnn")`: one kernel, which keeps scores inside."""

ATTENTION_BACKWARD = frozenset({"dot_product_attention_bwd_wrapper"})
"""Its derivative, one kernel too, which computes the scores again."""

RANDOM = _names("random_bits random_fold_in random_split random_unwrap random_wrap threefry2x32")
"""They make random bits or keys from keys."""

CASTS = frozenset({"convert_element_type", "copy"})
"""They give the operand again, perhaps in another dtype."""

PASSED = CASTS | {"name", "reduce_precision"}
"""They give the operand again, perhaps rounded or in another dtype."""

SAME_PLACE = ELEMENTWISE | {"bitcast_convert_type"}
"""Each element of the result follows from the operands' elements at its place, bit for bit."""

RENAMES = _names(
    "bitcast_convert_type copy name optimization_barrier reduce_precision reshape squeeze "
    "stop_gradient transpose"
)
"""Planning takes each result to share its operand's memory, and the equation to take no time."""

ARRANGEMENTS = _names("broadcast_in_dim copy reshape squeeze transpose")
"""They give the operand's elements in another shape, and compute nothing."""

KEEPS_EXTENT = ARRANGEMENTS | _names("name slice stop_gradient")
"""The result's elements are some of the operand's, and no others."""

CURVES = _names("erf erfc logistic tanh")
"""What activation functions are made of, besides exponentials."""

OF_NORMS = _names("div integer_pow pow rsqrt sqrt")
"""What norms divide by, or multiply by, is computed by one of them."""

OF_CHAINS = (ELEMENTWISE - {"name"}) | _names("broadcast_in_dim reduce_sum reshape squeeze")
"""What norms and activation functions are made of, all in all."""

FUSED = (
    (ELEMENTWISE - RENAMES)
    | RANDOM
    | _names("broadcast_in_dim concatenate dynamic_slice iota pad rev slice split")
)
"""Compilers compute them inside the equations that read them; the result need not be in memory."""

CUTS_OR_JOINS = _names("concatenate convert_element_type dynamic_slice pad select_n slice split")
"""They cut, join or cast arrays: what is in the result was in an operand."""

NO_LARGER = ARRANGEMENTS | _names(
    "abs concatenate convert_element_type dynamic_slice gather max min name neg reduce_max "
    "reduce_min rev select_n slice split stop_gradient"
)
"""No element of their results is larger than the largest one of their operands."""

SLICES = frozenset({"dynamic_slice", "gather", "slice"})
"""They take a part of their first operand."""

CALLBACKS = _names("debug_callback io_callback pure_callback")
"""They call a Python function on the host while the program runs."""

INFINITE_AT_POLES = _names(
    "atanh digamma div erf_inv integer_pow lgamma log log1p log2 pow rsqrt tan"
)
"""They give infinity at some finite operands, zero for example, however large floats may be."""

WRITES = REDUCTIONS | {"dynamic_update_slice"}
"""They compute inside themselves what is fused into them, and write their result to memory."""

LINEAR = _names(
    "broadcast_in_dim convert_element_type copy neg reduce_sum reshape squeeze transpose"
)
"""The result is linear in their only operand."""

SUMS = frozenset({"add", "add_any", "sub"})
"""The result is linear in all operands together."""

LOCAL = ELEMENTWISE | _names(
    "broadcast_in_dim iota optimization_barrier pad reshape slice squeeze transpose"
)
"""They combine no elements along a dim, so devices that each have a part of the operands need not
exchange anything. Contractions, reductions and loops are examples of others."""

PARTITIONED = (
    LOCAL
    | REDUCTIONS
    | RANDOM
    | _names(
        "bitcast_convert_type concatenate dynamic_slice dynamic_update_slice gather rev split "
        "sharding_constraint stack unstack"
    )
)
"""XLA computes them on parts of their operands. At most small results are sent to all devices."""

FACTORIZATION_FLOPS = {
    "cholesky": 1 / 3,
    "eig": 25.0,
    "eigh": 9.0,
    "householder_product": 4 / 3,
    "lu": 2 / 3,
    "qr": 4 / 3,
    "schur": 25.0,
    "svd": 20.0,
    "triangular_solve": 1.0,
    "tridiagonal": 4 / 3,
}
"""Factorizations and solves of matrices, and their FLOPs for a matrix of n x n, in units of n^3.
All dims of their operands but the last two are batch dims."""

LOOPS = frozenset({"scan", "while"})
"""They run a body several times."""

NEVER_FUSED = (
    CONTRACTIONS | ATTENTION_FORWARD | ATTENTION_BACKWARD | LOOPS | {"cond", "pallas_call"}
)
"""XLA never computes them inside an equation that reads their result."""

OVERWRITES = FUSED | WRITES | LOOPS | {"cond"}
"""Their results may take the memory of operands that nothing reads afterwards."""

CALLS = frozenset({"call", "closed_call", "eval_jaxpr", "jit"})
"""They run their body once. Inlining the body changes nothing."""

CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
"""They run their body once; their derivative is one that the model wrote."""

READS_OF_LEAVES = CONTRACTIONS | CUSTOM_RULES | {"gather", "ragged_dot_general"}
"""What most of a model's parameters are read by: products, lookups, and derivatives of a model's
own that may hold both."""

WINDOWS = {
    "conv_general_dilated": 0.0,
    "reduce_window_max": -math.inf,
    "reduce_window_min": math.inf,
    "reduce_window_sum": 0.0,
}
"""What goes through an array in windows, and the value of its padding."""

NEUTRAL = {
    "argmax": -math.inf,
    "argmin": math.inf,
    "cumlogsumexp": -math.inf,
    "cummax": -math.inf,
    "cummin": math.inf,
    "cumprod": 1,
    "cumsum": 0,
    "dot_general": 0,
    "reduce_and": True,
    "reduce_max": -math.inf,
    "reduce_min": math.inf,
    "reduce_or": False,
    "reduce_prod": 1,
    "reduce_sum": 0,
}
"""What goes through a dim of its first operand, and the value there that changes no result."""

REMATS = frozenset({"remat2"})
"""They run their body once, and again in backward: `jax.checkpoint`."""

HLO_KINDS = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "all_to_all": "all-to-all",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "ppermute": "collective-permute",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "unreduced_pmax": "all-reduce",
    "unreduced_pmin": "all-reduce",
    "unreduced_psum": "all-reduce",
    "unreduced_reduce_scatter": "reduce-scatter",
}
"""The collectives whose bytes planning counts, with the HLO instruction that each becomes."""

COLLECTIVES = frozenset(HLO_KINDS) | _names(
    "all_gather_done all_gather_reduced_start all_gather_start all_to_all_done all_to_all_start "
    "pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start ppermute_done ppermute_start "
    "precv preduced psend psum_done psum_invariant_start psum_start pvary ragged_all_to_all "
    "reduce_scatter_done reduce_scatter_start reduced_vary_cast reduced_vary_cast_p "
    "unreduced_psum_start unreduced_reduce_scatter_start vary_unreduced_cast "
    "vary_unreduced_cast_p"
)
"""They talk to other devices, or their derivatives do. Each must run exactly where it stands."""

BY_ROWS = (ELEMENTWISE | REDUCTIONS | ARRANGEMENTS | CASTS) | _names(
    "concatenate dot_general gather pad slice split top_k"
)
"""They compute a row from the same row, wherever it is, if their rule does not block the rows.
Running sums and `iota` depend on the place."""

SUMS_OF_MANY = _names("concatenate scatter scatter-add select_n")
"""The result is linear in all their floating operands together."""

KEEPS_VALUES = _names("name slice")
"""They give on their operand, or a part of it, as it is."""

SCALINGS = _names("div mul")
"""The result is linear in the first operand."""

LINEAR_IN_ONE = LINEAR | SUMS | SUMS_OF_MANY | _names("div dot_general gather mul name slice")
"""The result is linear in one floating operand, or in all of them together."""

RUN_BESIDE = frozenset({"all_to_all", "reduce_scatter"})
"""Collectives that on GPUs run beside the equations that follow them. Their operands stay in memory
until something reads their results. `all_gather` does so too, but its operands are shards, which
stay anyway."""

SINCE = {
    "log2": (0, 11, 2),
    "one_minus_square": (0, 11, 2),
    "pbroadcast_dynamic": (0, 12, 0),
    "reduced_vary_cast": (0, 12, 0),
    "unreduced_pmax": (0, 11, 1),
    "unreduced_pmin": (0, 11, 1),
    "vary_unreduced_cast": (0, 12, 0),
}
"""The first JAX version that has a name, for names that 0.10.2 does not have yet."""

UNTIL = {
    "call": (0, 11, 0),
    "closed_call": (0, 11, 0),
    "pbroadcast_done": (0, 11, 0),
    "pbroadcast_start": (0, 11, 0),
    "psum_start": (0, 11, 0),
    "reduced_vary_cast_p": (0, 11, 2),
    "unreduced_psum_start": (0, 11, 0),
    "unreduced_reduce_scatter_start": (0, 11, 0),
    "vary_unreduced_cast_p": (0, 11, 2),
}
"""The last JAX version that has a name, for names that 0.12 no longer has."""
