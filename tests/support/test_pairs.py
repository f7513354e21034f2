"""pairs(): what it promises, and that it is short."""

from itertools import combinations, product

import pytest

from tests.support.pairs import pairs


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((3, 2), 6), ((3, 2, 4, 5), 22), ((11, 2, 2, 2, 2, 2), 24), ((22, 5, 3, 2, 2), 112)],
)
def test_any_two_values_meet(sizes, most):
    parameters = [[f"{i}{a}" for a in range(size)] for i, size in enumerate(sizes)]
    rows = pairs(*parameters)
    for i, j in combinations(range(len(sizes)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(parameters[i], parameters[j]))
    assert len(rows) <= most
    assert rows == pairs(*parameters)
