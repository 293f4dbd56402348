"""The calls in which stages run have about the same work, so that no rank waits for another."""

import jax
import optax
import pytest
from tools.pipeline_equality import tokens
from tools.pipelines import step_of
from tools.products import products

from zeroxla import Pipeline
from zeroxla.models import GPT
from zeroxla.pipeline import split_call


def work_of(call):
    """Return the work of the products of a call's two parts."""
    both = call.program
    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in both.program.inputs]

    def env(args):
        return dict(zip(both.program.inputs, args, strict=True))

    kept = jax.eval_shape(lambda args: both.run_first(env(args))[1], shapes)
    first = products(lambda args: both.run_first(env(args)), shapes)
    return first, products(lambda args, kept: both.run_second(env(args), kept), shapes, kept)


@pytest.mark.slow
@pytest.mark.parametrize("stash", ["inputs", "activations"])
def test_ops_of_all_stages_take_as_long(stash, monkeypatch):
    """Also on the first stage, which has no gradient of its input, and on the last."""
    made, make = [], split_call.SplitCall.make

    def remember(*args, **options):
        made.append(make(*args, **options))
        return made[-1]

    monkeypatch.setattr(split_call.SplitCall, "make", staticmethod(remember))
    model = GPT.tiny(layers=8, width=64)
    pipeline = Pipeline.from_model(model, schedule="zb-h1", stash=stash)
    step = step_of(pipeline, 4, 1, 1, 4, optimizer=optax.sgd(0.1))
    batch = tokens(8)
    step.lower(step.abstract_state(batch), batch)
    found = [work_of(call) for call in made]
    if stash == "inputs":  # a backward runs the forward again
        ops = [(early / 2, late) for early, late in found]
    else:
        ops = [(f[0], b[0], b[1]) for f, b in zip(found[::2], found[1::2], strict=True)]
    assert len(ops) == 4
    every = [x for stage in ops for x in stage]
    assert max(every) <= 1.6 * min(every), ops
    middle = ops[1]
    assert ops[0] == middle == ops[2]
