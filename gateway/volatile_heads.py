"""What clients put into a prompt and change every time, so that no prefix is ever found again. Decides only.

Two answers to it. Heads that are known to mean nothing to a model are taken off (`without_volatile_head`). Everything
else stays as the client sent it; `volatile_form` only lets the explanation of a miss say that two texts differ in
nothing but a date.
"""

import re
from typing import Literal, cast

from msgspec import Struct

VolatileKind = Literal["date", "time", "uuid", "id", "number"]

_HEAD_NAMES = ("x-anthropic-billing-header:",)
"""Claude Code's first system block: `x-anthropic-billing-header: cc_version=…; cc_entrypoint=cli; cch=…;`."""

_BEFORE_HEAD = " \t\r\n\ufeff"
_HEAD_MAX_CHARACTERS = 1024
_HEAD_FIELD = re.compile(r"[A-Za-z0-9_.-]{1,64}=[^\s;]{0,256}")

_READ_CHARACTERS = 128 * 1024
"""How much of a text is looked at. What lies behind must be equal as it is."""

_WEEKDAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day|(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)\b"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"[0-9]{1,2}(?:st|[nr]d|th)?"
_ZONE = r"(?:UTC|GMT|[A-Z]{1,3}T)\b"
_MIXED = r"(?=[A-Za-z]{0,63}[0-9])(?=[0-9]{0,63}[A-Za-z])"

# Every repetition has an upper bound and no repetition holds another unbounded one: linear in the text's length.
_VOLATILE = re.compile(
    r"(?P<uuid>(?<![0-9A-Za-z])[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}(?![0-9A-Za-z]))"
    r"|(?P<date>(?<![0-9])[0-9]{4}[-/.][0-9]{1,2}[-/.][0-9]{1,2}(?![0-9])"
    r"|(?<![0-9])[0-9]{1,2}[-/.][0-9]{1,2}[-/.][0-9]{4}(?![0-9])"
    rf"|\b{_MONTH}\.? {{1,2}}{_DAY}(?:,? [0-9]{{4}})?\b"
    rf"|(?<![0-9A-Za-z]){_DAY} (?:of )?{_MONTH}\b\.?(?:,? [0-9]{{4}}\b)?"
    rf"|\b(?:{_WEEKDAY}))"
    r"|(?P<time>(?<![0-9])(?:[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?(?: ?[AaPp]\.?[Mm]\b\.?)?"
    rf"(?:Z\b|[+-][0-9]{{2}}:?[0-9]{{2}}\b| {_ZONE})?|[0-9]{{1,2}} ?[AaPp]\.?[Mm]\b\.?))"
    rf"|(?P<id>(?<![0-9A-Za-z]){_MIXED}(?:[0-9A-Fa-f]{{7,64}}|[0-9A-Za-z]{{16,64}})(?![0-9A-Za-z]))"
    r"|(?P<number>[0-9]{1,30})"
)


def without_volatile_head(text: str) -> str:
    """A system text without the head that a client put in front of it; the same text if there is none.

    Only a whole first line of `name=value` fields counts as one: text that a model should read is never dropped.
    """
    start = len(text) - len(text.lstrip(_BEFORE_HEAD))
    name = next((name for name in _HEAD_NAMES if text[start : start + len(name)].lower() == name), None)
    if name is None:
        return text
    line, _, rest = text[start:].partition("\n")
    fields = [field.strip() for field in line[len(name) :].split(";")] if len(line) <= _HEAD_MAX_CHARACTERS else [" "]
    return rest if all(not field or _HEAD_FIELD.fullmatch(field) for field in fields) else text


class VolatileForm(Struct, frozen=True, kw_only=True):
    """A text with its volatile parts named instead of spelled, and what they were, in order, by kind."""

    text: str
    values: dict[VolatileKind, str]


def volatile_form(text: str) -> VolatileForm:
    """Two texts of one form differ in dates, times, uuids, other ids and numbers only, if in anything."""
    values: dict[VolatileKind, list[str]] = {}

    def name_it(match: re.Match[str]) -> str:
        kind = cast("VolatileKind", match.lastgroup)
        values.setdefault(kind, []).append(match[0])
        return f"\0{kind}\0"

    # A mark that the text spells itself could pass for one of ours.
    form = _VOLATILE.sub(name_it, text[:_READ_CHARACTERS].replace("\0", "\0\0"))
    return VolatileForm(
        text=form + text[_READ_CHARACTERS:], values={kind: "\0".join(found) for kind, found in values.items()}
    )


def volatile_words(kinds: tuple[VolatileKind, ...]) -> str:
    """`a date and a time`."""
    names = [_WORDS[kind] for kind in kinds]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


_WORDS: dict[VolatileKind, str] = {
    "date": "a date",
    "time": "a time",
    "uuid": "a uuid",
    "id": "an id",
    "number": "a number",
}
