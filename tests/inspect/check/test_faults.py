"""Each check finds the faults that are planted for it, names them, and says what to do."""

from __future__ import annotations

import pytest
from tools import planted_faults as planted
from tools.quick import thinned

import zeroxla

FLOAT16 = zeroxla.ZeroConfig(compute_dtype="float16")
ALL = ("equality", "collectives", "gathered", "whole leaves", "overflow", "repeats")


def line_of(text):
    """Return "tools/planted_faults.py:N" for the line of the fixtures that holds a text."""
    with open(planted.__file__) as file:
        (number,) = (i for i, line in enumerate(file, start=1) if text in line)
    return f"tools/planted_faults.py:{number}"


def checked(loss, init=planted.init, config=None):
    return zeroxla.check((init, loss), planted.BATCH, config=config)


def only_fault(report, name, *besides):
    """Return the result of the one check that has found a fault."""
    assert not report.ok
    assert [r.name for r in report.results] == list(ALL)
    faults = {r.name for r in report.results if r.verdict == "fault"}
    assert faults == {name, *besides}
    assert report[name].remedy
    return report[name]


class TestEquality:
    def test_a_loss_that_sums_over_rows(self):
        found = only_fault(checked(planted.summed), "equality")
        assert "the loss sums over rows" in found.found
        assert "8 times its mean over the 8 devices' rows" in found.found
        assert 'metrics["weight"]' in found.remedy

    @pytest.mark.parametrize(
        ("loss", "worst"),
        thinned(
            [(planted.slightly_masked, "v")],
            slow=[(planted.masked, "v"), (planted.contrastive, "w")],
            rows=True,
        ),
    )
    def test_rows_that_see_each_other_or_weigh_differently(self, loss, worst):
        found = only_fault(checked(loss), "equality")
        assert "Rows see each other" in found.found
        assert f"most of all {worst} by" in found.found

    def test_of_a_loss_that_is_not_finite(self):
        found = only_fault(checked(planted.infinite), "equality")
        assert "the loss of the unsharded model is inf" in found.found

    @pytest.mark.slow
    def test_statistics_of_own_rows_are_a_notice(self):
        report = zeroxla.check(planted.Convolutions(), planted.BATCH)
        assert report.ok
        assert report["equality"].verdict == "notice"
        assert "statistics of its own rows" in report["equality"].found
        assert "BatchNorm_0/" in report["equality"].found
        assert "axis_name" in report["equality"].remedy


class TestCollectives:
    @pytest.mark.parametrize(
        ("loss", "line", "words"),
        [
            (planted.parting, "seen = jax.lax.cond(batch", "branch 0: none; branch 1: psum"),
            (planted.endless, "seen = jax.lax.while_loop", "how many turns it takes"),
        ],
    )
    def test_devices_that_part(self, loss, line, words):
        report = checked(loss)
        found = only_fault(report, "collectives")
        assert line_of(line) in found.found
        assert words in found.found
        assert "pmax" in found.remedy
        # The step did not run: it would not end.
        assert "not compared" in report["equality"].found
        assert "did not run" in report["repeats"].found

    def test_devices_that_decide_alike(self):
        report = checked(planted.agreed)
        assert {result.verdict for result in report.results} == {"ok"}


class TestGathered:
    @pytest.mark.parametrize(
        ("loss", "line"),
        thinned(
            [(planted.indexed, 'x = jnp.tanh(x @ params["layers"][i])')],
            slow=[(planted.counted, 'return jnp.tanh(x @ params["layers"][i])')],
            rows=True,
        ),
    )
    def test_stacked_layers_that_no_scan_slices(self, loss, line):
        found = only_fault(checked(loss, planted.init_stacked), "gathered")
        assert found.found.startswith("layers, 85% of this model")
        assert line_of(line) in found.found
        assert "jax.lax.scan" in found.remedy

    def test_a_custom_rule_over_many_leaves(self):
        found = only_fault(checked(planted.ruled), "gathered")
        assert found.found.startswith("v, w, 100% of this model")
        assert f"custom_vjp_call at {line_of('return squares(model(params, batch)')}" in found.found


class TestWholeLeaves:
    def test_a_leaf_whose_only_dim_a_loop_slices(self):
        found = only_fault(checked(planted.every_place, planted.init_places), "whole leaves")
        assert "65.3% of the parameters" in found.found
        assert "places 512 (a loop slices all its dims)" in found.found

    def test_a_large_table_in_the_loss_is_a_notice(self):
        report = checked(planted.with_table)
        assert report.ok
        assert report["whole leaves"].verdict == "notice"
        assert "arrays that the loss closes over" in report["whole leaves"].found
        assert "64x16" in report["whole leaves"].found


class TestOverflow:
    def test_scores_without_a_scale(self):
        found = only_fault(checked(planted.attention, config=FLOAT16), "overflow")
        line = line_of('scores = jnp.einsum("bqd,bkd->bqk"')
        assert f"dot_general at {line} makes a value of" in found.found
        assert "(float16[2x16x16] holds 65504)" in found.found
        assert "; " not in found.found  # what follows from these scores is not named
        assert "width**-0.5" in found.remedy

    def test_inside_a_loop(self):
        found = only_fault(checked(planted.growing, config=FLOAT16), "overflow")
        assert f"mul at {line_of('return 8 * x, None')} makes a value of" in found.found

    def test_a_mask_that_is_infinite(self):
        found = only_fault(checked(planted.masked_by_adding, config=FLOAT16), "overflow")
        assert f"mul at {line_of('(1 - mask) * -1e9')} makes the first NaN" in found.found
        assert "jnp.where" in found.remedy

    @pytest.mark.slow
    def test_of_a_model_that_float16_does_not_run(self):
        found = only_fault(checked(planted.transformed, config=FLOAT16), "overflow")
        assert "cannot be traced in float16" in found.found
        assert "RFFT input must be float32" in found.found

    def test_a_gradient_too_small_is_a_notice(self):
        config = zeroxla.ZeroConfig(compute_dtype="float16", init_loss_scale=64)
        report = checked(planted.faint, planted.init_faint, config)
        assert report.ok
        assert report["overflow"].verdict == "notice"
        words = "at a loss scale of 64 the whole gradient becomes zero in float16 of u"
        assert report["overflow"].found.endswith(words)
        assert "raise init_loss_scale" in report["overflow"].remedy

    @pytest.mark.slow
    def test_is_none_in_bfloat16(self):
        config = zeroxla.ZeroConfig(compute_dtype="bfloat16")
        report = checked(planted.attention, config=config)
        assert report.ok
        assert "and all fit" in report["overflow"].found


class TestRepeats:
    def test_numbers_that_numpy_draws(self):
        found = only_fault(checked(planted.drawn), "repeats", "equality")
        assert "another program each time it is traced" in found.found
        assert line_of('{**batch, "x": batch["x"] + noise}') in found.found
        assert "reads the constant" in found.found
        assert "jax.random" in found.remedy

    def test_python_code_with_a_memory(self):
        found = only_fault(checked(planted.remembering), "repeats", "equality")
        assert "two runs of the step from one state differ" in found.found
        assert line_of("lambda: np.float32(1 + next(_calls))") in found.found

    def test_python_code_without_a_memory_is_a_notice(self):
        report = checked(planted.called)
        assert report.ok
        assert report["repeats"].verdict == "notice"
        assert line_of("lambda: np.float32(2)") in report["repeats"].found
