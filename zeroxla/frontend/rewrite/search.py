"""Searches a program, and loops and `jax.checkpoint` bodies inside it, for what is rewritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from zeroxla.config.rewrite import Rewrite
from zeroxla.frontend.rewrite.attention import attention_in
from zeroxla.frontend.rewrite.chain import chains_in
from zeroxla.frontend.rewrite.found import Replacement, Rewritten
from zeroxla.frontend.rewrite.head import heads_in
from zeroxla.frontend.rewrite.proof import Proof
from zeroxla.frontend.rewrite.report import Finding
from zeroxla.frontend.rewrite.runs_on import RunsOn
from zeroxla.frontend.rewrite.scope import TracedScope
from zeroxla.program.primitives import REMATS
from zeroxla.program.scan import Scan
from zeroxla.program.trace import Equation, Operand, Program, Value, flatten


class RewriteSearch:
    """A search of one program.

    Attributes:
      options: what is searched for.
      proof: tries what is found.
      runs_on: what the program runs on.
      findings: what was found where, in order.
    """

    def __init__(self, options: Rewrite, proof: Proof, runs_on: RunsOn) -> None:
        self.options, self.proof, self.runs_on = options, proof, runs_on
        self.findings: list[Finding] = []

    def program(self, program: Program) -> Rewritten:
        """Search a program."""
        return self._search(program, None, {}, 1)

    def _search(
        self,
        program: Program,
        outer: TracedScope | None,
        known: Mapping[Value, Operand],
        times: int,
    ) -> Rewritten:
        scope = TracedScope(program, outer, known)
        replaced: dict[Equation, Replacement] = {}
        bodies: dict[Equation, Rewritten] = {}
        for eq in program.equations:
            body = self._inside(eq, scope, times)
            if body is not None and body.is_changed:
                bodies[eq] = body
        inside: set[Equation] = set()
        arguments = scope, self.options, self.proof, times
        searches = []
        if self.options.attention:
            searches.append(attention_in(*arguments, self.runs_on))
        if self.options.loss:
            searches.append(heads_in(*arguments))
        for made, own, found in searches:
            replaced |= made
            inside |= own
            self.findings += found
        if self.options.norms:
            taken = {*replaced, *bodies, *inside}
            made, found = chains_in(scope, taken, self.proof, times)
            replaced |= made
            self.findings += found
        return Rewritten.of(program, replaced, bodies)

    def _inside(self, eq: Equation, scope: TracedScope, times: int) -> Rewritten | None:
        if eq.name == "scan":
            scan = Scan(eq)
            body = scan.body()
            pairs = zip(body.inputs[: scan.num_consts], scan.consts, strict=True)
            return self._search(body, scope, dict(pairs), times * scan.length)
        if eq.name in REMATS:
            body = flatten(eq.params["jaxpr"])
            return self._search(body, scope, _pairs(body.inputs, eq.inputs), times)
        return None


def _pairs(values: Sequence[Value], operands: Sequence[Operand]) -> dict[Value, Operand]:
    return dict(zip(values, operands, strict=True))
