"""What each tenant had of the device, by weight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.tenants import TenantBooks


@pytest.mark.parametrize(("weight", "lead"), [(1.0, 6.0), (2.0, 3.0), (0.5, 12.0)])
def test_a_weight_divides_what_is_counted(weight: float, lead: float) -> None:
    """Six seconds of a key of weight 2 count as three."""
    books = TenantBooks()
    books.arrived("ada", weight)
    books.arrived("bob")
    books.charge("ada", 6.0)
    assert books.leads()("ada") == lead
    assert books.leads()("bob") == 0.0


@given(st.floats(0.1, 100), st.floats(0.1, 100))
def test_whoever_had_least_goes_next_so_shares_are_as_weights(ada: float, bob: float) -> None:
    """Slices of one second to whoever leads by less: after many, both had parts as their weights say."""
    books = TenantBooks()
    books.arrived("ada", ada)
    books.arrived("bob", bob)
    had = {"ada": 0, "bob": 0}
    for _ in range(2000):
        leads = books.leads()
        tenant = min(had, key=leads)
        books.charge(tenant, 1.0)
        had[tenant] += 1
    assert abs(had["ada"] - 2000 * ada / (ada + bob)) <= 2


def test_a_weight_that_changes_counts_from_then_on() -> None:
    """What was counted before stays."""
    books = TenantBooks()
    books.arrived("ada", 1.0)
    books.arrived("bob")
    books.charge("ada", 2.0)
    books.arrived("ada", 4.0)
    books.charge("ada", 4.0)
    assert books.leads()("ada") == 3.0
