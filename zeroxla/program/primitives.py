"""Names of JAX's primitives, by what they do."""

_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp conj "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 "
    "floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne "
    "neg nextafter not one_minus_square or population_count pow real reduce_precision rem round "
    "rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt "
    "square stop_gradient sub tan tanh xor"
)
_EXPENSIVE = (
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 "
    "expm1 lgamma log log1p logistic pow rem rsqrt sin sinh sqrt tan tanh"
)
_REDUCTIONS = (
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor"
)

ELEMENTWISE = frozenset(_ELEMENTWISE.split())
"""Each element of the result is computed from the elements at its place."""
EXPENSIVE = frozenset(_EXPENSIVE.split())
"""Of these, those that compilers do not compute a second time for a second use."""
REDUCTIONS = frozenset(_REDUCTIONS.split())
"""They go through some dims and have one result for each element of the others."""
