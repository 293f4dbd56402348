"""Where the backend drops barriers, data dependencies keep collectives in order.

XLA's CPU backend does not wait for the end of a loop before it starts instructions after it that do
not read its results. Such a collective would run beside the collectives of the loop, on each device
in another order.
"""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from tools.quick import quick_compilation, thinned  # noqa: F401

import zeroxla
from zeroxla import ZeroConfig
from zeroxla.models import GPT
from zeroxla.program import compat
from zeroxla.program.hlo.text import parse
from zeroxla.program.trace import trace
from zeroxla.program.walk import local_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

KINDS = ("all-gather", "all-to-all", "all-reduce", "reduce-scatter", "collective-permute")


def called(instruction, module):
    """The computations that an instruction runs, and those that they run."""
    for name in instruction.called:
        yield name
        for inner in module.computations[name].values():
            yield from called(inner, module)


def beside_each_other(module):
    """Yield loops with collectives, and what talks without following from them or they from it."""
    for name, instructions in module.computations.items():
        before = {}  # of each instruction, all that it follows from
        for one in instructions.values():
            operands = [o for o in one.operands if o in before]
            before[one.name] = set(operands).union(*(before[o] for o in operands))
        loops = [
            one.name
            for one in instructions.values()
            if one.opcode == "while"
            and any(
                inner.opcode in KINDS
                for computation in called(one, module)
                for inner in module.computations[computation].values()
            )
        ]
        talking = loops + [one.name for one in instructions.values() if one.opcode in KINDS]
        for loop in loops:
            for other in talking:
                if other != loop and other not in before[loop] and loop not in before[other]:
                    yield name, loop, other


@pytest.mark.parametrize("accumulate", thinned([2], slow=[1]))
@pytest.mark.parametrize("preset", thinned(["zero3"], slow=["zeropp_min", "zeropp_hq"]))
def test_nothing_talks_beside_a_loop_that_does(mesh24, preset, accumulate):
    options = {"persistence_threshold": 1000, "accumulate": accumulate}
    config = getattr(zeroxla.ZeroConfig, preset)(**options)
    step = zeroxla.make_step(GPT.tiny(width=64), mesh24, optax.sgd(0.1), config=config)
    batch = {"tokens": np.zeros((16, 33), np.int32)}
    module = parse(step.lower(step.abstract_state(batch), batch).compile().as_text())
    assert any(one.opcode == "while" for c in module.computations.values() for one in c.values())
    assert list(beside_each_other(module)) == []
    assert jax.default_backend() == "cpu"


def test_gradients_of_small_leaves_come_before_the_next_segments_backward():
    """Left to the end, as the compiler likes, they keep what they are computed from."""
    mesh = AbstractMesh((2, 4), ("node", "device"))
    model, layers, width = GPT.tiny(layers=3, width=64, scan=False), 3, 64
    config = ZeroConfig(persistence_threshold=300)
    step = zeroxla.make_step(model, mesh, optax.sgd(0.1), config=config)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 33), np.int32)}
    state = step.abstract_state(batch)
    program, _ = trace(step.programs.train, state, batch, opened=compat.forward_jaxpr)
    local = local_of(program)
    made = {v: eq.name for eq in local.equations for v in eq.outputs}
    waits = 0
    for eq in local.equations:
        if eq.name == "optimization_barrier":
            sums = [v for v in eq.values if v.aval.shape == (width,) and v in made]
            waits += bool(sums) and (1, 32, width) in [v.aval.shape for v in eq.values]
    assert waits == layers
