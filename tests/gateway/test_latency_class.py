"""The class of a request: four ways to ask, one ceiling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.latency_class import ClassAsked, ClassRights, class_asked, granted_class, service_tier_of
from protocol.latency import LatencyClass

INTERACTIVE, STANDARD, BATCH = LatencyClass.INTERACTIVE, LatencyClass.STANDARD, LatencyClass.BATCH
CLASSES = st.sampled_from(LatencyClass)
ASKED = st.builds(
    ClassAsked,
    header=st.sampled_from(["", "interactive", "standard", "batch", "bulk", "☃"]),
    service_tier=st.sampled_from([None, "auto", "default", "flex", "scale", "priority", "fast", "gold"]),
    priority=st.none() | st.integers(),
    client=st.sampled_from(["foreground", "background"]),
)


@pytest.mark.parametrize(
    ("headers", "tier", "priority", "granted"),
    [
        ({}, None, None, STANDARD),
        ({}, "priority", None, INTERACTIVE),
        ({}, "fast", None, INTERACTIVE),
        ({}, "auto", None, STANDARD),
        ({}, "default", None, STANDARD),
        ({}, "scale", None, STANDARD),
        ({}, "flex", None, BATCH),
        ({}, "platinum", None, STANDARD),
        ({}, None, -5, INTERACTIVE),
        ({}, None, 0, STANDARD),
        ({}, None, 7, BATCH),
        ({}, "auto", 7, BATCH),
        ({}, "priority", 7, INTERACTIVE),
        ({"x-mlxd-class": "batch"}, "priority", -1, BATCH),
        ({"x-mlxd-class": " Interactive "}, "flex", None, INTERACTIVE),
        ({"x-mlxd-class": "urgent"}, None, None, STANDARD),
        ({"x-mlxd-class": "urgent"}, "flex", None, BATCH),
        ({"x-app": "cli-bg"}, "priority", None, INTERACTIVE),
    ],
)
def test_the_first_that_says_something_counts(
    headers: dict[str, str], tier: str | None, priority: int | None, granted: LatencyClass
) -> None:
    """Header, then service_tier, then priority, then the key's default; a name nobody knows says nothing."""
    raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
    assert granted_class(class_asked(raw, service_tier=tier, priority=priority), ClassRights()) is granted


@pytest.mark.parametrize(
    ("headers", "default", "granted"),
    [
        ({"x-app": "cli"}, INTERACTIVE, INTERACTIVE),
        ({"x-app": "cli-bg"}, INTERACTIVE, STANDARD),
        ({"x-app": "cli-bg"}, BATCH, BATCH),
        ({"x-claude-code-agent-id": "a1"}, INTERACTIVE, STANDARD),
        ({"x-claude-code-agent-id": ""}, INTERACTIVE, INTERACTIVE),
    ],
)
def test_a_background_client_is_standard_at_most(
    headers: dict[str, str], default: LatencyClass, granted: LatencyClass
) -> None:
    """Claude Code's background calls and sub-agents: nobody looks at their screen."""
    raw = tuple((name.encode(), value.encode()) for name, value in headers.items())
    asked = class_asked(raw, service_tier=None, priority=None)
    assert granted_class(asked, ClassRights(default=default)) is granted


@given(ASKED, CLASSES, CLASSES)
def test_the_ceiling_holds(asked: ClassAsked, default: LatencyClass, highest: LatencyClass) -> None:
    """Whatever is asked, and whatever the default: never above the key's highest class."""
    assert granted_class(asked, ClassRights(default=default, highest=highest)).rank >= highest.rank


@given(CLASSES)
def test_what_is_echoed_asks_for_the_same(latency_class: LatencyClass) -> None:
    """A client that sends back the `service_tier` it was given stays where it is."""
    asked = ClassAsked(service_tier=service_tier_of(latency_class))
    assert granted_class(asked, ClassRights(default=STANDARD)) is latency_class
