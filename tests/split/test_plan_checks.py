"""A plan that splits too little is refused, or a warning gives the work of a device."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tools.quick import quick_compilation  # noqa: F401

from zeroxla.program.trace import trace
from zeroxla.split.axis_costs import AxisCosts
from zeroxla.split.plan_proof import PlanProof
from zeroxla.step.axes.axis_planner import AxisPlanner

pytestmark = pytest.mark.usefixtures("quick_compilation")


def plan(loss, params, batch, axis, parts):
    program, _ = trace(loss, params, batch)
    planner = AxisPlanner(name=axis, length=parts, costs=AxisCosts(), proof=PlanProof())
    return planner.plan(program, [len(jax.tree.leaves(params)), 0, 1, 0], None)


def two_products(params, x):
    return jnp.mean(jnp.tanh(x @ params["first"]) @ params["second"])


def zeros(**shapes):
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def test_an_axis_that_repeats_work_gives_both_figures():
    """The first product has odd sizes alone: both devices compute it."""
    params = zeros(first=(15, 33), second=(33, 4))
    repeated, halved = 2 * 8 * 15 * 33, 2 * 8 * 33 * 4 // 2
    with_axis, without = repeated + halved, (repeated + 2 * halved) // 2
    text = rf"tensor=2: a device computes {with_axis:,} FLOPs .* the {without:,} that .* repeat dot"
    with pytest.warns(UserWarning, match=text):
        plan(two_products, params, np.zeros((8, 15), np.float32), "tensor", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = zeros(first=(16, 32), second=(32, 4))
        plan(two_products, params, np.zeros((8, 16), np.float32), "tensor", 2)


def sorted_experts(params, x):
    chosen = jnp.argmax(x @ params["router"], -1)
    sizes = jnp.bincount(chosen, length=params["bank"].shape[0])
    return jnp.mean(lax.ragged_dot(x[jnp.argsort(chosen)], params["bank"], sizes) ** 2)


def each_its_own(params, x):
    weights = jax.nn.softmax(x @ params["router"]).T[..., None]
    return jnp.mean(jnp.einsum("ebd,edi->ebi", weights * x, params["bank"]))


def test_banks_that_the_axis_does_not_divide_are_refused_by_name():
    """Though the router's rows are split."""
    x, params = np.zeros((8, 16), np.float32), zeros(router=(16, 3), bank=(3, 16, 8))
    text = r"expert=2 splits no product with a bank of experts.* must divide by 2.*32\[3,16,8\]"
    with pytest.raises(ValueError, match=text):
        plan(sorted_experts, params, x, "expert", 2)
    plan(sorted_experts, zeros(router=(16, 4), bank=(4, 16, 8)), x, "expert", 2)
    plan(each_its_own, params, x, "expert", 2)  # by rows


def test_a_model_without_banks_has_its_rows_split():
    params = zeros(first=(15, 33), second=(33, 4))
    found = plan(two_products, params, np.zeros((8, 15), np.float32), "expert", 2)
    assert all(way.is_split for eq, way in found.steps if eq.name == "dot_general")
