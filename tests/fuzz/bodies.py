"""Bodies as broken clients send them: good ones mixed, changed in a few places, then perhaps damaged as bytes.

A random body would be refused at its first field. Most of these are right in all places but a few, so that what lies
behind the schemas is reached: templates, tokenizers, grammars, the worker.
"""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

from hypothesis import strategies as st
from msgspec import Struct

DEEP = 10_000


class Route(Struct, frozen=True, kw_only=True):
    """A route with bodies that it answers, and the names of all fields that it knows."""

    path: str
    good: tuple[dict[str, Any], ...]
    names: tuple[str, ...]
    dialect: Literal["openai", "anthropic", "responses"] = "openai"


class Spelled(Struct, frozen=True, kw_only=True):
    """A JSON value that `json.dumps` cannot spell: its text as it stands in the body."""

    text: str


_ODD_TEXTS = (
    *("", " ", "\0", "\x7f\x1b[31m", "é" * 300, "\u202e", "\ufffd", "\uffff", "👩‍🚀" * 50, "a" * 5000),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>system\n", "<|SC04|>"),
    *(
        "{{ 7 * 7 }}",
        "{% raise %}",
        "../../etc/passwd",
        "http://127.0.0.1:9/x",
        "-1",
        "null",
        "auto",
        "required",
        "none",
    ),
    *("SC07", "SC09", "SC12", "SC15", "SC18", "root ::= root", "(((((", "a{1000}{1000}", '{"type": "object"}'),
)
_ODD_NUMBERS = (
    0,
    -1,
    1,
    2,
    3,
    5,
    33,
    2**31,
    2**32,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**30,
    0.5,
    -0.0,
    1e-320,
    1e308,
)
_SPELLED = tuple(
    Spelled(text=text)
    for text in (
        *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 400, "0.1e-999", "01", "+1", "1.", "0x10"),
        *('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\x"', "'a'", "nul", "undefined", "[1,]", '{"a":1,}'),
        *("[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, '"\t"', "/* */ 1", '{"a":1,"a":2}'),
    )
)
_ODD: st.SearchStrategy[Any] = (
    st.sampled_from(_ODD_TEXTS)
    | st.sampled_from(_ODD_NUMBERS)
    | st.sampled_from(_SPELLED)
    | st.sampled_from(
        [None, True, False, [], {}, [[]], [{}], [None], {"": None}, {"type": "text"}, {"type": "function"}]
    )
    | st.text(max_size=20)
    | st.integers(-3, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
)
ODD_VALUE = st.recursive(
    _ODD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
"""Any JSON, mostly from the corners. Copy it: what is sampled is one object each time."""


@st.composite
def body_for(draw: st.DrawFn, route: Route) -> bytes:
    """The bytes of a body for this route."""
    value: Any = json.loads(json.dumps(draw(st.sampled_from(route.good))))
    for _ in range(draw(st.integers(0, 3))):
        other = draw(st.sampled_from(route.good))
        key = draw(st.sampled_from(sorted(other)))
        value[key] = copy.deepcopy(other[key])
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 4]))):
        _change(draw, value, route.names)
    data = spelled(value).encode("utf-8", "surrogatepass")
    damage = draw(st.sampled_from([*[_whole] * 20, _cut, _flipped, _inserted, _behind_a_mark, _twice]))
    return damage(draw, data)


def spelled(value: Any) -> str:
    """JSON's text of it."""
    match value:
        case Spelled():
            return value.text
        case dict():
            return "{" + ", ".join(f"{json.dumps(key)}: {spelled(item)}" for key, item in value.items()) + "}"  # pyright: ignore
        case list():
            return "[" + ", ".join(spelled(item) for item in value) + "]"  # pyright: ignore
        case _:
            return json.dumps(value, ensure_ascii=False)


# --- changes of a value ----------------------------------------------------------------------------------------------


def _change(draw: st.DrawFn, value: dict[str, Any], names: Sequence[str]) -> None:
    """Replace, remove or double something somewhere, or add a field."""
    match draw(st.sampled_from(["replace", "replace", "replace", "add", "add", "remove", "double"])):
        case "add":
            value[draw(st.sampled_from(names) | st.text(max_size=8))] = copy.deepcopy(draw(ODD_VALUE))
        case "replace":
            place, key = draw(st.sampled_from(_places(value)))
            place[key] = copy.deepcopy(draw(ODD_VALUE))
        case "remove":
            place, key = draw(st.sampled_from(_places(value)))
            del place[key]
            value.setdefault("model", "gone")
        case _:
            place, key = draw(st.sampled_from(_places(value)))
            if isinstance(place, list):
                place.insert(key, place[key])
            else:
                place[key + "x"] = place[key]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys, all the way down. `model` is changed rarely: little lies behind it."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        holder = level.pop()
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))  # pyright: ignore
        found += [(holder, key) for key in keys if key != "model"]
        level += [holder[key] for key in keys if isinstance(holder[key], dict | list)]
    return found or [(value, next(iter(value)))]


# --- damage of bytes -------------------------------------------------------------------------------------------------

Damage = Callable[[st.DrawFn, bytes], bytes]


def _whole(_: st.DrawFn, data: bytes) -> bytes:
    return data


def _cut(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: draw(st.integers(0, len(data)))]


def _flipped(draw: st.DrawFn, data: bytes) -> bytes:
    at = draw(st.integers(0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]


def _inserted(draw: st.DrawFn, data: bytes) -> bytes:
    at = draw(st.integers(0, len(data)))
    return data[:at] + draw(st.binary(min_size=1, max_size=4)) + data[at:]


def _behind_a_mark(_: st.DrawFn, data: bytes) -> bytes:
    return b"\xef\xbb\xbf" + data


def _twice(_: st.DrawFn, data: bytes) -> bytes:
    return data + data
