"""Hypothesis strategies read off the message types themselves, so that a new field is tested the day it is added."""

from typing import Any

import msgspec.inspect as shapes
from hypothesis import strategies as st

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def messages(union: Any) -> st.SearchStrategy[Any]:
    """Any message that one direction's decoder reads."""
    return _of(shapes.type_info(union))


def _of(shape: shapes.Type) -> st.SearchStrategy[Any]:
    match shape:
        case shapes.UnionType(types=members):
            return st.one_of([_of(member) for member in members])
        case shapes.StructType(cls=kind, fields=fields):
            return st.builds(kind, **{field.name: _of(field.type) for field in fields})
        case shapes.VarTupleType(item_type=item):
            return st.lists(_of(item), max_size=3).map(tuple)
        case shapes.DictType(key_type=key, value_type=value):
            return st.dictionaries(_of(key), _of(value), max_size=3)
        case shapes.EnumType(cls=kind):
            return st.sampled_from(list(kind))
        case shapes.LiteralType(values=values):
            return st.sampled_from(values)
        case shapes.StrType():
            return st.text(max_size=20)
        case shapes.BytesType():
            return st.binary(max_size=20)
        case shapes.BoolType():
            return st.booleans()
        case shapes.IntType():
            return st.integers(-(2**63), 2**64 - 1)
        case shapes.FloatType():
            return st.floats(allow_nan=False)
        case shapes.NoneType():
            return st.none()
        case shapes.AnyType():
            return _JSON
        case _:
            raise NotImplementedError(f"no strategy for {shape}: add one here")
