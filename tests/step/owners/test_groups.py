"""Who owns which matrix: equal matrices are shared evenly, and the busiest owner has little more
than its part."""

import dataclasses

import pytest

from zeroxla.step.owners.groups import shares_of


@dataclasses.dataclass
class Matrices:
    """As much of an `OwnedGroup` as `shares_of` reads."""

    num_matrices: int
    flops: float


def owned(shares, num_owners):
    """The numbers of the matrices of each group, of all owners together."""
    return [
        sorted([*range(share.each * num_owners), *(i for mine in share.rest for i in mine)])
        for share in shares
    ]


@pytest.mark.parametrize("numbers", [(12, 12, 12, 12, 1, 1), (8,), (3, 5), (1, 1, 1), (48, 7)])
def test_every_matrix_has_one_owner(numbers):
    groups = [Matrices(n, 10.0 + i) for i, n in enumerate(numbers)]
    shares, _ = shares_of(groups, 8)
    assert owned(shares, 8) == [list(range(n)) for n in numbers]


def test_of_twelve_layers_the_busiest_of_eight_owners_has_little_more_than_an_eighth():
    """GPT-2's four products of a layer, in units of width^3; see the counts of Muon."""
    groups = [Matrices(12, flops) for flops in (14.0, 6.0, 18.0, 18.0)]
    _, busiest = shares_of(groups, 8)
    total = sum(group.num_matrices * group.flops for group in groups)
    assert busiest < 1.1 * total / 8


def test_what_is_left_goes_to_those_with_the_least_to_do():
    shares, busiest = shares_of([Matrices(1, 1.5), Matrices(4, 2.0), Matrices(1, 1.0)], 3)
    assert [share.each for share in shares] == [0, 1, 0]
    assert busiest == 2 + 2
    assert shares[0].rest == ((), (0,), ())
    assert shares[1].rest == ((3,), (), ())
    assert shares[2].rest == ((), (), (0,))


def test_one_large_matrix_takes_the_place_of_some_that_all_could_have():
    shares, busiest = shares_of([Matrices(1, 5.0), Matrices(4, 2.0), Matrices(1, 1.0)], 3)
    assert [share.each for share in shares] == [0, 0, 0]
    assert busiest == 5
    assert shares[1].rest == ((), (0, 2), (1, 3))
