"""Partitions: the heaviest stage against brute force and the recorded cuts, and bad input."""

from __future__ import annotations

import itertools
import time
from fractions import Fraction
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from zeroxla.pipeline.layer_cost import LayerCost, Machine
from zeroxla.pipeline.minimax import balanced, uniform
from zeroxla.pipeline.partition import Partition, make_partition

ALEXNET = [23296, 0, 0, 307392, 0, 0, 663936, 0, 884992, 0, 590080, 0]
ALEXNET += [0, 0, 0, 0, 37752832, 0, 0, 16781312, 0, 40970]

with np.load(Path(__file__).parents[1] / "fixtures" / "a_partition.npz") as recorded:
    RECORDED = dict(recorded)
CASES = [
    pytest.param(f"w{i:02d}", int(parts), id=f"{name}-{parts}")
    for i, name in enumerate(RECORDED["names"])
    for parts in RECORDED["parts"]
]


def with_bytes(sizes, across):
    """Layers with these numbers of parameters, and of bytes that pass on to the next layer."""
    return [
        LayerCost(name=str(i), kind="", parameters=size, bytes_after=n)
        for i, (size, n) in enumerate(zip(sizes, across, strict=True))
    ]


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=2, max_size=9),
    st.integers(2, 4),
)
def test_a_cut_goes_where_few_bytes_pass_if_it_is_nearly_even(layers, stages):
    """Of all cuts whose heaviest stage is at most 1.1 times as heavy as it must be, none has fewer
    bytes at its widest place, and none with so few is more even."""
    hypothesis.assume(len(layers) > stages)
    sizes, across = zip(*layers, strict=True)
    hypothesis.assume(sum(sizes) > 0)
    found = make_partition("parameters", with_bytes(sizes, across), stages).boundaries

    def widest(cut):
        return max(across[b - 1] for b in cut[1:-1])

    cuts = [
        (0, *inner, len(sizes))
        for inner in itertools.combinations(range(1, len(sizes)), stages - 1)
    ]
    most = 1.1 * min(heaviest(sizes, cut) for cut in cuts)
    allowed = [cut for cut in cuts if heaviest(sizes, cut) <= most]
    assert tuple(found) in allowed
    assert widest(found) == min(map(widest, allowed))
    as_narrow = [cut for cut in cuts if widest(cut) <= widest(found)]
    assert heaviest(sizes, found) == min(heaviest(sizes, cut) for cut in as_narrow)


def stage_costs(costs, boundaries):
    """Exact, for floats too."""
    return [sum(map(Fraction, costs[a:b])) for a, b in itertools.pairwise(boundaries)]


def heaviest(costs, boundaries):
    return max(stage_costs(costs, boundaries))


def squares(costs, boundaries):
    return sum(cost**2 for cost in stage_costs(costs, boundaries))


def lightest_heaviest(costs, stages):
    """The smallest heaviest stage, by recursion over every end of the first stage."""
    known = {}

    def best(first, stages):
        if stages == 1:
            return sum(costs[first:])
        if (first, stages) not in known:
            ends = range(first + 1, len(costs) - stages + 2)
            known[first, stages] = min(
                max(sum(costs[first:end]), best(end, stages - 1)) for end in ends
            )
        return known[first, stages]

    costs = [Fraction(cost) for cost in costs]
    return best(0, stages)


def every_cut(num_layers, stages):
    for inner in itertools.combinations(range(1, num_layers), stages - 1):
        yield [0, *inner, num_layers]


def layer(name="layer", kind="Dense", parameters=1, **rest):
    return LayerCost(name=name, kind=kind, parameters=parameters, **rest)


def check_form(boundaries, num_layers, stages):
    assert len(boundaries) == stages + 1
    assert (boundaries[0], boundaries[-1]) == (0, num_layers)
    assert all(a < b for a, b in itertools.pairwise(boundaries))


class TestBalance:
    @pytest.mark.smoke
    def test_alexnet(self):
        assert balanced(ALEXNET, 2) == [0, 19, 22]
        assert balanced(ALEXNET, 3) == [0, 16, 19, 22]
        assert balanced(ALEXNET, 4) == [0, 8, 16, 19, 22]

    @pytest.mark.parametrize(("name", "stages"), CASES)
    def test_recorded_lists_against_brute_force_and_deepspeed(self, name, stages):
        costs = RECORDED[name].tolist()
        found = balanced(costs, stages, allow_empty=True)
        assert heaviest(costs, found) <= heaviest(costs, RECORDED[f"bal_{name}_p{stages}"])
        if len(costs) >= stages:
            check_form(found, len(costs), stages)
            assert heaviest(costs, found) == lightest_heaviest(costs, stages)

    def test_random_lists_against_brute_force(self):
        random = np.random.default_rng(0)
        for _ in range(200):
            num_layers = int(random.integers(1, 25))
            stages = int(random.integers(1, min(num_layers, 8) + 1))
            costs = random.integers(0, 10 ** random.integers(1, 13), num_layers)
            costs[random.random(num_layers) < 0.3] = 0
            costs = costs.tolist()
            found = balanced(costs, stages)
            check_form(found, num_layers, stages)
            assert heaviest(costs, found) == lightest_heaviest(costs, stages)

    @hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
    @hypothesis.given(
        st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=1, max_size=8), st.data()
    )
    def test_choice_among_the_optima(self, costs, data):
        hypothesis.assume(any(costs))
        stages = data.draw(st.integers(1, len(costs)))
        cuts = every_cut(len(costs), stages)
        # The lightest heaviest stage, then the smallest sum of squares, then the latest cuts.
        expected = min(
            cuts, key=lambda b: (heaviest(costs, b), squares(costs, b), [-cut for cut in b])
        )
        assert balanced(costs, stages) == expected

    def test_parameter_counts_that_float64_would_round(self):
        # The last layer decides: 2**53 + 1 is no float64.
        assert balanced([2**53, 1, 2**53], 2) == [0, 2, 3]
        assert balanced([2**53 + 1, 1, 2**53], 2) == [0, 1, 3]
        costs = [10**12 + 1, 10**12, 10**12, 10**12 + 1]
        assert balanced(costs, 2) == [0, 2, 4]

    def test_floats_are_taken_exactly(self):
        costs = [0.1] * 10 + [1.0]
        exact = Fraction(0.1) * 10
        assert exact > 1  # while the float sum is below
        assert heaviest(costs, balanced(costs, 2)) == exact
        assert balanced([1e-300, 1e300, 1e-300], 2) in ([0, 1, 3], [0, 2, 3])

    def test_numpy_scalars_and_any_iterable(self):
        assert balanced(np.array([5, 1, 1, 1, 1, 1]), 2) == [0, 1, 6]
        assert balanced(np.array([5, 1, 1, 1, 1, 1], np.float32), 2) == [0, 1, 6]
        assert balanced((cost for cost in (5, 5)), 2) == [0, 1, 2]

    def test_layer_heavier_than_a_fair_share(self):
        assert balanced([1, 1, 100, 1, 1, 1], 3) == [0, 2, 3, 6]

    def test_layers_without_cost_stay_with_the_one_before(self):
        assert balanced([4, 0, 0, 4, 0], 2) == [0, 3, 5]

    def test_no_cost_at_all_counts_layers(self):
        assert balanced([0] * 7, 3) == [0, 3, 5, 7]

    def test_as_many_layers_as_stages(self):
        assert balanced([0, 9, 1], 3) == [0, 1, 2, 3]

    def test_large_models_are_cheap(self):
        random = np.random.default_rng(0)
        for costs in (random.integers(0, 10**12, 1000), [10**15, *[1] * 999]):
            start_s = time.process_time()
            found = balanced(costs, 64)
            assert time.process_time() - start_s < 5  # 0.3 on an idle core
            check_form(found, 1000, 64)


class TestUniform:
    @pytest.mark.parametrize(("name", "stages"), CASES)
    def test_recorded_boundaries(self, name, stages):
        expected = RECORDED[f"uni_{name}_p{stages}"].tolist()
        assert uniform(len(RECORDED[name]), stages) == expected


class TestTooFewLayers:
    def test_refused_with_the_numbers_and_the_remedy(self):
        message = "3 layers do not fill 4 stages; use at most 3 stages"
        with pytest.raises(ValueError, match=message):
            balanced([1, 2, 3], 4)
        for method in ("uniform", "parameters", "type:dense", "profile"):
            with pytest.raises(ValueError, match=message):
                make_partition(method, [layer(seconds=1.0)] * 3, 4)

    def test_empty_stages_come_last_if_asked_for(self):
        assert balanced([1, 2, 3], 5, allow_empty=True) == [0, 1, 2, 3, 3, 3]
        found = make_partition("uniform", [layer()] * 3, 5, allow_empty=True)
        assert found.boundaries == (0, 1, 2, 3, 3, 3)
        assert "none" in str(found)

    def test_empty_stages_are_not_made_where_layers_suffice(self):
        assert balanced([5, 0, 0], 2, allow_empty=True) == [0, 2, 3]

    def test_no_stage(self):
        with pytest.raises(ValueError, match="stages=0 must be at least 1"):
            balanced([1], 0)
        with pytest.raises(ValueError, match="stages=-1 must be at least 1"):
            uniform(1, -1)


class TestBadCosts:
    @pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
    def test_refused_by_layer(self, cost):
        with pytest.raises(ValueError, match=f"layer 1 costs {cost}"):
            balanced([1, cost], 1)


class TestResolve:
    def test_parameters(self):
        layers = [layer(parameters=count) for count in ALEXNET]
        found = make_partition("parameters", layers, 2)
        assert found.boundaries == (0, 19, 22)
        assert found.stage_costs == [40222528, 16822282]

    def test_uniform(self):
        layers = [layer(parameters=count) for count in ALEXNET]
        assert make_partition("uniform", layers, 2).boundaries == (0, 11, 22)

    @pytest.mark.parametrize("pattern", ["block", "BLOCK", "^decoderBlock$", "Blo.k|Nothing"])
    def test_type_counts_matches_in_upper_or_lower_case(self, pattern):
        kinds = ["Embed", *["DecoderBlock"] * 4, "Norm", "Dense"]
        layers = [layer(kind=kind, parameters=10**6 * (kind == "Dense")) for kind in kinds]
        assert make_partition(f"type:{pattern}", layers, 2).stage_costs == [2, 2]

    def test_type_that_matches_nothing_names_the_kinds(self):
        layers = [layer(kind="Dense"), layer(kind="Conv"), layer(kind="Dense")]
        with pytest.raises(ValueError, match="matches no layer; the kinds of layers are Conv, D"):
            make_partition("type:block", layers, 2)

    def test_type_that_is_no_expression(self):
        with pytest.raises(ValueError, match=r"'\(' in partition='type:\(' is no regular"):
            make_partition("type:(", [layer()] * 2, 2)
        with pytest.raises(ValueError, match="has no expression"):
            make_partition("type:", [layer()] * 2, 2)

    def test_profile_prefers_measured_seconds(self):
        layers = [layer(seconds=s, flops=1.0, bytes=1.0) for s in (3.0, 1.0, 1.0, 1.0)]
        found = make_partition("profile", layers, 2)
        assert found.boundaries == (0, 1, 4)
        assert found.stage_costs == [3.0, 3.0]

    def test_profile_by_roofline(self):
        machine = Machine(flops_per_s=100.0, bytes_per_s=10.0)
        # 4 s of arithmetic; 1 s of memory three times.
        layers = [layer(flops=400.0, bytes=1.0), *[layer(flops=1.0, bytes=10.0)] * 3]
        found = make_partition("profile", layers, 2, machine=machine)
        assert found.costs == (4.0, 1.0, 1.0, 1.0)
        assert found.boundaries == (0, 1, 4)

    def test_profile_without_figures(self):
        machine = Machine(flops_per_s=1.0, bytes_per_s=1.0)
        some = [layer(seconds=1.0), layer(name="late", flops=1.0, bytes=1.0)]
        with pytest.raises(ValueError, match="the seconds of 1 of 2 layers, not of late; measure"):
            make_partition("profile", some, 2, machine=machine)
        with pytest.raises(ValueError, match=r"last has flops=1\.0, bytes=None"):
            make_partition("profile", [layer(name="last", flops=1.0)], 1, machine=machine)
        with pytest.raises(ValueError, match="give machine=Machine"):
            make_partition("profile", [layer(flops=1.0, bytes=1.0)], 1)

    def test_machine_that_computes_nothing(self):
        with pytest.raises(ValueError, match=r"a machine of 0\.0 FLOP/s"):
            Machine(flops_per_s=0.0, bytes_per_s=1.0)

    def test_unknown_method(self):
        with pytest.raises(ValueError, match=r"partition='params' is unknown; use one of uniform"):
            make_partition("params", [layer()], 1)

    def test_explicit_boundaries(self):
        layers = [layer(parameters=count) for count in (6, 1, 1)]
        found = make_partition([0, 2, 3], layers, 2)
        assert found.boundaries == (0, 2, 3)
        assert found.stage_costs == [7, 1]
        assert make_partition((0, 2, 3), layers, 2).boundaries == (0, 2, 3)
        assert make_partition([0, 3, 3], layers, 2, allow_empty=True).boundaries == (0, 3, 3)

    @pytest.mark.parametrize(
        ("boundaries", "message"),
        [
            ([0, 3], r"are 2 numbers; 2 stages have 3, from 0 to 3"),
            ([1, 2, 3], "must start at 0 and end at 3"),
            ([0, 2, 4], "must start at 0 and end at 3"),
            ([0, 4, 3], "descend from 4 to 3"),
            ([0, 3, 3], "leave stage 1 empty"),
            ([0, 1.5, 3], "neither a method .* nor a list of whole numbers"),
            (2, "neither a method .* nor a list of whole numbers"),
        ],
    )
    def test_bad_boundaries(self, boundaries, message):
        with pytest.raises(ValueError, match=message):
            make_partition(boundaries, [layer()] * 3, 2)


class TestTable:
    def test_rows_show_layers_parameters_and_share(self):
        layers = [layer(name=f"f{i}", parameters=count) for i, count in enumerate((1500, 0, 500))]
        text = str(make_partition("parameters", layers, 2))
        assert "3 layers in 2 stages" in text
        assert "share of parameters" in text
        first, second = (line for line in text.splitlines() if "%" in line)
        assert all(word in first for word in ("0 to 1", "f0 to f1", "1,500", "75.0%"))
        assert all(word in second for word in ("f2", "500", "25.0%"))
        assert "2,000" in text

    def test_no_cost_has_no_share(self):
        layers = (layer(parameters=0),)
        found = Partition(boundaries=(0, 1), layers=layers, costs=(0,), unit="parameters")
        assert "%" not in str(found)
