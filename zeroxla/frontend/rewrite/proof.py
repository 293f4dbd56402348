"""Tries rewrites by computing: a small instance runs as it was written and as it is rewritten."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zeroxla.frontend.rewrite.evaluate import evaluate
from zeroxla.frontend.rewrite.found import Rewritten
from zeroxla.program.on_cpu import on_cpu
from zeroxla.program.trace import Program, is_float, trace

TOLERANCE = 1e-5
"""The largest error of float32, relative to the largest element."""

OF_ZEROS = 0.1
"""The largest element against which errors are held where all are zero as written. A gradient that
is exactly zero as written may be rounding as rewritten, and an instance is made of values of order
one."""

ROUNDINGS = 8
"""The same for shorter dtypes, in units of their rounding error."""

OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options: an instance runs a few times, for microseconds."""

DRAWS = ("random", "true", "false", "ones", "zeros")
"""The instances: random arrays; the same with bools that are all alike, as masks are where a row
sees all or nothing; and arrays of ones and of zeros, as masks of numbers are there."""

ALIKE = ("ones", "zeros")
"""Those whose gradients may be nothing but rounding errors; they must be NaN in the same places."""

_IMPLS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """Tries rewrites, and remembers what it has found.

    Attributes:
      known: by the small program and the name of the rewrite, what was found.
    """

    known: dict[tuple[str, str], str | None] = dataclasses.field(default_factory=dict)

    def objection(
        self,
        name: str,
        fun: Callable[..., Any],
        shapes: Sequence[Any],
        rewrite: Callable[[Program], Rewritten],
    ) -> str | None:
        """Return what speaks against a rewrite; None if it computes the same on a small instance,
        and its derivative too.

        Args:
          name: a name of the rewrite, that says all that the small program does not.
          fun: the small instance as it was written, a function of arrays.
          shapes: the abstract values of its arguments.
          rewrite: rewrites its program. What it raises speaks against it.

        Cost: two compilations of the instance. The same instance is tried once.
        """

        def tried() -> str | None:
            key = str(jax.make_jaxpr(fun)(*map(_shape, shapes))), name
            if key not in self.known:
                self.known[key] = _objection(fun, shapes, rewrite)
            return self.known[key]

        with ThreadPoolExecutor(1) as apart:  # this thread is tracing
            return apart.submit(tried).result()


def _objection(
    fun: Callable[..., Any], shapes: Sequence[Any], rewrite: Callable[[Program], Rewritten]
) -> str | None:
    try:
        program, _ = trace(fun, *map(_shape, shapes))
        found = rewrite(program)
        same = _is_same(program, found, shapes)
    except Exception as error:  # whatever it is, the model itself may run
        words = str(error).strip().splitlines() or [""]
        return f"no small instance of it runs: {type(error).__name__}: {words[0]}"
    return None if same else "a small instance computed something else"


def _is_same(program: Program, found: Rewritten, shapes: Sequence[Any]) -> bool:
    """Return whether two programs compute the same from random arrays."""
    floats = [i for i, x in enumerate(shapes) if is_float(x.dtype)]

    def both(args: Sequence[Any], seed: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        filled = [_key(shapes[i]) if x is None else x for i, x in enumerate(args)]
        runs = (lambda args: program(*args)), (lambda args: evaluate(found, args))
        return tuple(_differentiated(run, filled, floats, seed) for run in runs)  # pyright: ignore

    with on_cpu():
        instances = [_drawn(shapes, draw) for draw in DRAWS]
        seed = jnp.uint32(0)
        compiled = jax.jit(both).lower(instances[0], seed).compile(OPTIONS)
        for draw, args in zip(DRAWS, instances, strict=True):
            written, rewritten = compiled(args, seed)
            num = len(program.outputs) if draw in ALIKE else len(written)
            if not all(map(is_close, written[:num], rewritten[:num])):
                return False
            if not all(map(_is_finite_alike, written[num:], rewritten[num:])):
                return False
    return True


def _differentiated(
    run: Callable[[list[Any]], list[jax.Array]],
    args: Sequence[Any],
    floats: Sequence[int],
    seed: jax.Array,
) -> list[jax.Array]:
    """Return the results of a function, and the gradients of its floating arguments."""

    def of(some: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        filled = list(args)
        for i, x in zip(floats, some, strict=True):
            filled[i] = x
        found = run(filled)
        return [x for x in found if is_float(x.dtype)], found

    of_floats, pullback, results = jax.vjp(of, [args[i] for i in floats], has_aux=True)
    key = jax.random.key(seed)
    cts = [
        jax.random.normal(jax.random.fold_in(key, i), x.shape, jnp.float32).astype(x.dtype)
        for i, x in enumerate(of_floats)
    ]
    (grads,) = pullback(cts)
    return [*results, *grads]


def is_close(a: jax.Array, b: jax.Array) -> bool:
    """Return whether two arrays are equal up to rounding. Elements that are not finite must be the
    same."""
    one, other = np.asarray(a), np.asarray(b)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not is_float(one.dtype):
        return np.array_equal(one, other)
    rounding = ROUNDINGS * float(jnp.finfo(one.dtype).eps)
    wide = np.complex128 if jnp.issubdtype(one.dtype, jnp.complexfloating) else np.float64
    one, other = one.astype(wide), other.astype(wide)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return False
    largest = np.abs(one[finite]).max(initial=0.0) or OF_ZEROS
    error = np.abs(one[finite] - other[finite])
    return bool(np.all(error <= max(TOLERANCE, rounding) * largest))


def _is_finite_alike(a: jax.Array, b: jax.Array) -> bool:
    return np.array_equal(np.isfinite(np.asarray(a)), np.isfinite(np.asarray(b)))


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _key(aval: Any) -> jax.Array:
    keys = jax.random.key(1, impl=_IMPLS[str(aval.dtype)])
    return keys if not aval.shape else jax.random.split(keys, aval.shape)


def _drawn(shapes: Sequence[Any], draw: str) -> list[np.ndarray | None]:
    """Return random arrays; None stands for a random key."""
    generator = np.random.default_rng(DRAWS.index(draw))
    found: list[np.ndarray | None] = []
    for x in shapes:
        if str(x.dtype) in _IMPLS:
            found.append(None)
        elif draw in ALIKE:
            found.append(np.full(x.shape, draw == "ones").astype(x.dtype))
        elif is_float(x.dtype):
            found.append(generator.standard_normal(x.shape).astype(x.dtype))
        elif x.dtype == bool:
            drawn = generator.integers(0, 2, x.shape).astype(bool)
            found.append(drawn if draw == "random" else np.full(x.shape, draw == "true"))
        else:
            found.append(generator.integers(0, 3, x.shape).astype(x.dtype))
    return found
