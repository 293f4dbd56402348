"""Which gathered leaves are kept for their next use, under both limits."""

from hypothesis import given
from hypothesis import strategies as st

from zeroxla.config.fetch_limits import FetchLimits
from zeroxla.fetch.reuse import kept_uses

# Forward and backward of an embedding e, two layers a and b, and the embedding as the head.
USES = ["e", "a", "b", "e", "e", "b", "a", "e"]
SIZES = {"e": 100, "a": 10, "b": 20}


def kept(max_live, max_reuse, uses=USES):
    return sorted(kept_uses(uses, SIZES, FetchLimits(max_live=max_live, max_reuse=max_reuse)))


def test_nothing_is_kept_by_default():
    assert kept(0, 0) == [] == sorted(kept_uses(USES, SIZES, FetchLimits()))


def test_everything_is_kept_without_limits():
    later = [(i, k) for i, k in enumerate(USES) if k in USES[i + 1 :]]
    assert kept(10**9, 10**9) == sorted(later)


def test_the_reuse_distance_counts_the_elements_gathered_between():
    # The head's two uses follow each other; 200 elements lie between b's, 30 between e's.
    assert kept(10**9, 0) == [(3, "e")]
    assert kept(10**9, 30) == [(0, "e"), (3, "e"), (4, "e")]
    assert kept(10**9, 199) == [(0, "e"), (3, "e"), (4, "e")]
    assert kept(10**9, 200) == [(0, "e"), (2, "b"), (3, "e"), (4, "e")]


def test_live_elements_are_bounded_nearest_reuses_first():
    assert kept(99, 10**9) == [(1, "a"), (2, "b")]
    assert kept(100, 10**9) == [(0, "e"), (3, "e"), (4, "e")]
    assert kept(120, 10**9) == [(0, "e"), (2, "b"), (3, "e"), (4, "e")]
    assert kept(29, 10**9) == [(2, "b")]


def test_one_use_needs_nothing():
    assert kept(10**9, 10**9, ["e", "a", "b"]) == []


@given(
    uses=st.lists(st.sets(st.sampled_from("abe")), max_size=8),
    max_live=st.integers(0, 150),
    max_reuse=st.integers(0, 300),
)
def test_the_limits_hold_at_every_moment(uses, max_live, max_reuse):
    uses = [sorted(u) for u in uses]
    found = kept_uses(uses, SIZES, FetchLimits(max_live=max_live, max_reuse=max_reuse))
    for then, leaf in found:
        assert leaf in uses[then]
        now = next(t for t in range(then + 1, len(uses)) if leaf in uses[t])
        assert sum(SIZES[k] for u in uses[then + 1 : now] for k in u) <= max_reuse
    for t in range(len(uses)):
        live = 0
        for then, leaf in found:
            now = next(s for s in range(then + 1, len(uses)) if leaf in uses[s])
            live += SIZES[leaf] if then <= t < now else 0
        assert live <= max_live
