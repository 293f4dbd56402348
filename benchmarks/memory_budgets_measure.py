"""Compiles and runs the steps of memory_budgets.py, in a process that simulates two devices."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from memory_budgets_models import CASES, gpt, tokens

import zeroxla
from zeroxla.fetch.keeping.budget import ActivationBudget
from zeroxla.fetch.keeping.places import PlaceFinder
from zeroxla.program import hlo
from zeroxla.program.hlo.flops import product_flops
from zeroxla.program.hlo.text import Instruction
from zeroxla.program.hlo.trip_counts import trip_count
from zeroxla.step.memory.device_facts import rates_of

NUM_DEVICES = 2
POLICIES = {
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_with_no_batch_dims_saveable": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
}
MOVES = frozenset(
    re.findall(
        r"\S+",
        """parameter constant tuple get-tuple-element bitcast copy reshape transpose broadcast slice
        concatenate dynamic-slice dynamic-update-slice pad iota reverse while call fusion
        conditional all-gather reduce-scatter all-reduce all-to-all collective-permute opt-barrier
        custom-call copy-start copy-done bitcast-convert convert gather scatter""",
    )
)
"""Instructions that compute nothing themselves."""


def keeping_gradients() -> optax.GradientTransformation:
    """Return an optimizer that changes nothing and whose state is the newest gradients."""

    def init(params: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(jnp.zeros_like, updates), updates

    return optax.GradientTransformation(init, update)


def flops_of(text: str) -> tuple[float, float]:
    """Return the FLOPs of a compiled program on a device: of products and convolutions, and all,
    with one for each element that another instruction makes or a reduction reads. Loops count as
    often as they run."""
    module = hlo.parse(text)

    def visit(name: str, times: float, *, counted: bool = True) -> np.ndarray:
        total = np.zeros(2)
        scope = module.computations[name]
        for instruction in scope.values():
            if counted:
                total += times * np.array(_own_flops(instruction, scope))
            runs = times
            if instruction.opcode == "while":
                runs *= trip_count(instruction, scope, module) or 1
            # The function of a reduction is counted with its operand.
            if instruction.opcode in ("fusion", "call", "while", "conditional"):
                for called in instruction.called:
                    total += visit(called, runs)
        return total

    products, others = visit(module.entry, 1.0)
    return float(products), float(products + others)


def _own_flops(instruction: Instruction, scope: dict[str, Instruction]) -> tuple[float, float]:
    """Return the FLOPs of a product, and of anything else."""
    if instruction.opcode in MOVES or not instruction.shapes:
        return 0.0, 0.0
    size = float(instruction.shapes[0].num_elements)
    if products := product_flops(instruction, scope):
        return products, 0.0
    if instruction.opcode in ("reduce", "reduce-window"):
        return 0.0, float(scope[instruction.operands[0]].shapes[0].num_elements)
    return 0.0, size


class Measure:
    """Measures one model.

    Args:
      name: a key of `CASES`.
    """

    def __init__(self, name: str) -> None:
        self.make, batch, rows = CASES[name]
        self.batch = batch(rows * NUM_DEVICES)
        self.mesh = zeroxla.make_mesh(nodes=1)

    def step(self, memory: int | None, policy: Any = None) -> dict[str, Any]:
        """Return the figures of a step, and its loss and gradients under "results"."""
        begin = time.monotonic()
        # The policies gather again in backward, and so do the budgets.
        config = zeroxla.ZeroConfig(memory=memory, max_live_parameters=0)
        model = self.make(policy)
        step = zeroxla.make_step(model, self.mesh, keeping_gradients(), config=config)
        state = step.init(jax.random.key(0), self.batch)
        try:
            compiled = step.lower(state, self.batch).compile()
        except ValueError as error:
            if (found := re.search(r"takes ([\d.]+ \w+) on each", str(error))) is None:
                raise
            return {"budget": memory, "fits": False, "refused": str(error), "smallest": found[1]}
        used = zeroxla.inspect.memory(compiled)
        products, flops = flops_of(compiled.as_text() or "")
        state, metrics = step(state, self.batch)
        results = [metrics["loss"], *jax.tree.leaves(state.opt_state)]
        row = {
            "budget": memory,
            "fits": memory is None or used.total_bytes <= memory,
            "total": used.total_bytes,
            "temporaries": used.temp_bytes,
            "products": products,
            "flops": flops,
            "results": [np.asarray(x) for x in results],
        }
        decided = getattr(step.describe(), "memory", None)
        if decided is not None:
            chosen = decided.chosen.keeping
            row["tries"] = [(t.temp_bytes, t.seconds) for t in decided.tries]
            row["added_by_model"] = chosen.share_again if chosen else 0.0
        return row | {"took_s": time.monotonic() - begin}

    def all(self, shares: Sequence[float], policies: Sequence[str]) -> list[dict[str, Any]]:
        """Return a row for each program, without arrays."""
        whole = self.step(None)
        rows = [{"kind": "none", **whole}]
        self._say(rows[-1])
        for share in shares:
            budget = int(whole["total"] - (1 - share) * whole["temporaries"])
            rows.append({"kind": "share", "share": share, **self.step(budget)})
            self._say(rows[-1])
        for name in policies:
            rows.append({"kind": "policy", "policy": name, **self.step(None, POLICIES[name])})
            self._say(rows[-1])
            same = self.step(rows[-1]["total"])
            rows.append({"kind": "as policy", "policy": name, **same})
            self._say(rows[-1])
        wanted = whole["results"]
        for row in rows:
            if (found := row.pop("results", None)) is not None:
                row["same_bits"] = all(map(np.array_equal, found, wanted))
                row["error"] = max(map(_relative_error, found, wanted))
        return rows

    def _say(self, row: dict[str, Any]) -> None:
        shown = {k: v for k, v in row.items() if k not in ("results", "refused")}
        print(shown, flush=True)


def _relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference over the largest element."""
    return float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-30))


def seconds_to_decide(layers: int) -> dict[str, float]:
    """Return the CPU seconds in which a written-out GPT's segments are cut, and traced, weighed and
    chosen for half of the bytes that all residuals take; no compilation is in it."""
    mesh = zeroxla.make_mesh(nodes=1)
    step = zeroxla.make_step(gpt(scan=False, layers=layers), mesh, optax.adamw(1e-3))
    batch = tokens(NUM_DEVICES)
    shapes = step.abstract_state(batch)
    budget = ActivationBudget(finder=PlaceFinder(rates_of(mesh, step.config)))
    programs = dataclasses.replace(step.programs, activations=budget)
    begin = time.process_time()
    with step.programs.tracing():
        jax.jit(programs.train).trace(shapes, step.batches.shapes(batch))
    traced = time.process_time()
    keeper = budget.keeper
    weighed = time.process_time()
    chosen = keeper.within(keeper.everything().num_bytes / 2)
    return {
        "layers": layers,
        "segments": len(chosen.places),
        "trace_s": traced - begin,
        "cut_s": weighed - traced,
        "choose_s": time.process_time() - weighed,
    }
