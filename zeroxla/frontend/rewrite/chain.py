"""Runs norms and activation functions so that backward keeps their inputs, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from zeroxla.frontend.rewrite.chain_site import ChainSite, find_chains
from zeroxla.frontend.rewrite.cut_dims import Cut, block_shape
from zeroxla.frontend.rewrite.found import Replacement, Rewritten
from zeroxla.frontend.rewrite.proof import Proof
from zeroxla.frontend.rewrite.recipe import Recipe
from zeroxla.frontend.rewrite.report import Finding
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.program import compat
from zeroxla.program.trace import Equation, Program, Value, is_float, run

SMALL = 3
"""The size to which the rows of a small instance are cut."""


def chains_in(
    scope: TracedScope, taken: Collection[Equation], proof: Proof, times: int
) -> tuple[Mapping[Equation, Replacement], list[Finding]]:
    """Return what runs in the place of norms and activation functions, and what was found; see
    `attention.attention_in`.

    Args:
      scope: the program.
      taken: equations that something else runs in the place of.
      proof: tries what is found on a small instance.
      times: how often the program runs.
    """
    replaced: dict[Equation, Replacement] = {}
    findings: list[Finding] = []
    for site in find_chains(scope, taken):
        last, words = site.equations[-1], None
        reason = _objection(scope, site, proof)
        if reason is None:
            replaced[last] = Replacement(
                inputs=site.inputs,
                outputs=(site.result,),
                run=KeptInputs(site.equations, site.inputs, site.result),
            )
            words = "its inputs are kept"
        shape = site.result.aval.str_short()
        findings.append(Finding.at(site.kind, last, times, shape, words, reason or ""))
    return replaced, findings


class KeptInputs:
    """A chain of equations whose backward keeps its inputs, and computes it again.

    It has a first derivative in reverse mode, and no other.
    """

    def __init__(
        self, equations: Sequence[Equation], inputs: Sequence[Value], result: Value
    ) -> None:
        self._equations, self._inputs, self._result = equations, inputs, result

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the result."""

        @jax.custom_vjp
        def kept_inputs(*args: jax.Array) -> jax.Array:
            return self._run(args)

        def forward(*args: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
            return self._run(args), args

        kept_inputs.defvjp(forward, self._backward)
        return [kept_inputs(*arrays)]

    def _run(self, args: Sequence[Any]) -> jax.Array:
        env = dict(zip(self._inputs, args, strict=True))
        run(self._equations, env)
        return env[self._result]

    def _backward(self, args: tuple[jax.Array, ...], ct: jax.Array) -> tuple[jax.Array | None, ...]:
        floats = [i for i, x in enumerate(args) if is_float(x.dtype)]
        # Without the barrier the compiler would keep what forward has computed.
        given = lax.optimization_barrier(tuple(args[i] for i in floats))

        def of_floats(*some: jax.Array) -> jax.Array:
            filled = list(args)
            for i, x in zip(floats, some, strict=True):
                filled[i] = x
            return self._run(filled)

        grads = dict(zip(floats, jax.vjp(of_floats, *given)[1](ct), strict=True))
        return tuple(grads.get(i) for i in range(len(args)))


def _objection(scope: TracedScope, site: ChainSite, proof: Proof) -> str | None:
    """Return what speaks against keeping a chain's inputs, from a few of its rows."""
    summed = {d for eq in site.equations if eq.name == "reduce_sum" for d in eq.params["axes"]}
    shape = site.result.aval.shape
    cuts: list[Cut | None] = [
        None if d in summed or n <= SMALL else Cut(f"dim {d}") for d, n in enumerate(shape)
    ]
    if site.kind == "norm" and cuts[-1] is not None:
        cuts[-1] = None
    recipe = Recipe(scope, {"a label that nothing has"}, inner=set(site.equations))
    number = recipe.add(site.result, tuple(cuts))
    window = {cut.label: (0, SMALL) for cut in cuts if cut is not None}
    roots = recipe.roots()
    shapes = []
    for _, root in roots:
        aval = root.operand.aval  # pyright: ignore[reportAttributeAccessIssue]
        small = block_shape(aval.shape, root.cuts, window)
        shapes.append(compat.array_type(small, aval.dtype))

    def written(*arrays: jax.Array) -> list[jax.Array]:
        given = {i: x for (i, _), x in zip(roots, arrays, strict=True)}
        return recipe.run([number], given, window)

    def rewrite(program: Program) -> Rewritten:
        (result,) = program.outputs
        if not isinstance(result, Value) or not program.equations:
            raise ValueError("the small instance computes nothing")
        run_kept = KeptInputs(program.equations, program.inputs, result)
        made = Replacement(inputs=program.inputs, outputs=(result,), run=run_kept)
        last = next(eq for eq in program.equations if result in eq.outputs)
        return Rewritten.of(program, {last: made}, {})

    return proof.objection("inputs", written, shapes, rewrite)
