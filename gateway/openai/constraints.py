"""`response_format`, and what vLLM and llama-server call it → what the answer must be. Pure."""

from typing import Any

import msgspec

from gateway.openai.json_values import object_in, plain
from gateway.openai.refusals import invalid, unsupported
from gateway.openai.schema import GenerationOptions, ResponseFormat, StructuredOutputs
from protocol.tools import Constraint, Grammar, JsonObject, JsonSchema, OneOf, Regex

_TEXT_MAX_BYTES = 64 * 1024
_OPTIONS_MAX = 1024


def asked_constraint(request: GenerationOptions) -> Constraint | None:
    """What the answer must be, if the request says so, under whatever name. Raises Refusal, which names the field."""
    asked = [(at, constraint) for at, constraint in _all(request) if constraint is not None]
    if not asked:
        return None
    if len(asked) > 1:
        raise invalid(asked[1][0], f"says what the answer must be, and so does `{asked[0][0]}`. Send only one of them.")
    return asked[0][1]


def constraint_field(request: GenerationOptions) -> str | None:
    """Which field of an accepted request says what the answer must be."""
    return next((at for at, constraint in _all(request) if constraint is not None), None)


def _all(request: GenerationOptions) -> list[tuple[str, Constraint | None]]:
    structured = request.structured_outputs
    return [
        ("response_format", None if request.response_format is None else _format(request.response_format)),
        ("guided_json", _schema(request.guided_json, "guided_json")),
        ("guided_regex", _regex(request.guided_regex, "guided_regex")),
        ("guided_choice", _one_of(request.guided_choice, "guided_choice")),
        ("guided_grammar", _grammar(request.guided_grammar, "guided_grammar")),
        ("structured_outputs", None if structured is None else _structured(structured)),
        ("grammar", _grammar(request.grammar, "grammar")),
        ("json_schema", _schema(request.json_schema, "json_schema")),
    ]


def _format(asked: ResponseFormat) -> Constraint | None:
    match asked.type:
        case "text":
            return None
        case "json_object":
            # llama-server's and others' way to send a schema
            return _schema(asked.schema, "response_format.schema") or JsonObject()
        case "json_schema":
            at = "response_format.json_schema"
            if asked.json_schema is None:
                raise invalid(at, "is required for this type. Send its name and schema.")
            schema = _schema(asked.json_schema.schema, f"{at}.schema")
            if schema is None:
                raise invalid(f"{at}.schema", "is required. Send the JSON schema of the answer.")
            return schema
        case _:
            raise unsupported("response_format.type", "must be text, json_object or json_schema. Use one of these.")


def _structured(asked: StructuredOutputs) -> Constraint:
    """vLLM's newer spelling: one object with one of these in it."""
    at = "structured_outputs"
    if asked.structural_tag is not None:
        raise unsupported(f"{at}.structural_tag", "is not supported by this server. Use one of the others.")
    constraints = [
        _schema(asked.json, f"{at}.json"),
        _regex(asked.regex, f"{at}.regex"),
        _one_of(asked.choice, f"{at}.choice"),
        _grammar(asked.grammar, f"{at}.grammar"),
        JsonObject() if asked.json_object else None,
    ]
    given = [constraint for constraint in constraints if constraint is not None]
    if len(given) != 1:
        raise invalid(at, "must hold exactly one of json, regex, choice, grammar and json_object. Send one.")
    return given[0]


def _schema(schema: str | dict[str, Any] | None, at: str) -> JsonSchema | None:
    """A schema as an object, or as a string that holds one. Its keys keep their order: the answer's follow it."""
    if schema is None:
        return None
    document = object_in(schema) if isinstance(schema, str) else schema
    if document is None:
        raise invalid(at, "must be a JSON schema: an object, or a string that holds one. Correct it.")
    return JsonSchema(text=_bounded(msgspec.json.encode(plain(document, at)).decode(), at))


def _regex(pattern: str | None, at: str) -> Regex | None:
    return None if pattern is None else Regex(pattern=_bounded(pattern, at))


def _grammar(text: str | None, at: str) -> Grammar | None:
    # llama-server's clients send an empty one for none
    return Grammar(text=_bounded(text, at)) if text else None


def _one_of(options: list[str] | None, at: str) -> OneOf | None:
    if options is None:
        return None
    if not options or not all(options):
        raise invalid(at, "must hold at least one text, and no empty one. Correct it.")
    if len(options) > _OPTIONS_MAX:
        raise invalid(at, f"may hold {_OPTIONS_MAX} texts at most. Send fewer.")
    _bounded("".join(options), at)
    return OneOf(options=tuple(dict.fromkeys(options)))


def _bounded(text: str, at: str) -> str:
    if len(text.encode()) > _TEXT_MAX_BYTES:
        raise invalid(at, f"is over {_TEXT_MAX_BYTES} bytes. Send a smaller one.")
    return text
