"""GET /v1/models as clients of Anthropic's API want it: newest first, in pages. Decides only."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from gateway.anthropic.instants import rfc3339
from protocol.failures import Failure, FailureKind
from protocol.generation import Capability
from protocol.ids import ModelName

LIMIT_DEFAULT = 20
LIMIT_MAX = 1000


class Support(Struct, frozen=True, kw_only=True):
    """Whether the model can."""

    supported: bool


class EffortSupport(Support, frozen=True, kw_only=True):
    """Which efforts make a difference."""

    low: Support
    medium: Support
    high: Support
    xhigh: Support
    max: Support


class ThinkingTypes(Struct, frozen=True, kw_only=True):
    """Which values of `thinking.type` are taken."""

    enabled: Support
    adaptive: Support
    between_tools: Support
    disabled: Support


class ThinkingSupport(Support, frozen=True, kw_only=True):
    """Whether the model can be asked to think."""

    types: ThinkingTypes


class ServerTools(Support, frozen=True, kw_only=True):
    """None: no tool runs on this server."""

    web_search: Support
    code_execution: Support


class ModelCapabilities(Struct, frozen=True, kw_only=True):
    """The API's list, of which most is not for a text-only server."""

    batch: Support
    citations: Support
    code_execution: Support
    context_management: Support
    effort: EffortSupport
    image_input: Support
    pdf_input: Support
    server_tools: ServerTools
    structured_outputs: Support
    thinking: ThinkingSupport


class ModelInfo(Struct, frozen=True, kw_only=True):
    """One model. `capabilities` is null until a load has told. The last three are OpenAI's, for clients of both."""

    type: Literal["model"] = "model"
    id: ModelName
    display_name: str
    created_at: str
    max_input_tokens: int | None
    max_tokens: int | None
    capabilities: ModelCapabilities | None
    lifecycle: Literal["active"] = "active"
    created: int
    object: Literal["model"] = "model"
    owned_by: Literal["mlxd"] = "mlxd"


class ModelPage(Struct, frozen=True, kw_only=True):
    """A page of the list. `has_more` is in the direction that was asked for."""

    data: tuple[ModelInfo, ...]
    has_more: bool
    first_id: str | None
    last_id: str | None


def model_info(
    name: ModelName, *, created_unix: int, context_tokens: int | None, capabilities: Sequence[Capability] | None
) -> ModelInfo:
    """One model of the catalog."""
    return ModelInfo(
        id=name,
        display_name=name,
        created_at=rfc3339(created_unix),
        max_input_tokens=context_tokens,
        max_tokens=context_tokens,
        capabilities=None if capabilities is None else _capabilities(capabilities),
        created=created_unix,
    )


def model_page(models: Sequence[ModelInfo], query: Mapping[str, str]) -> ModelPage | Failure:
    """The page that `limit`, `after_id` and `before_id` of the URL's query ask for."""
    limit = _limit(query.get("limit"))
    if isinstance(limit, Failure):
        return limit
    after_id, before_id = query.get("after_id"), query.get("before_id")
    if after_id is not None and before_id is not None:
        return _invalid("after_id", "cannot be had together with `before_id`. Send one of them.")
    ordered = sorted(models, key=lambda model: (-model.created, model.id))
    ids = [model.id for model in ordered]
    for field, cursor in (("after_id", after_id), ("before_id", before_id)):
        if cursor is not None and cursor not in ids:
            return _invalid(field, "is not the id of a model of this list. Begin again without it.")
    if before_id is not None:
        end = ids.index(ModelName(before_id))
        start = max(0, end - limit)
        has_more = start > 0
    else:
        start = 0 if after_id is None else ids.index(ModelName(after_id)) + 1
        end = min(len(ordered), start + limit)
        has_more = end < len(ordered)
    page = tuple(ordered[start:end])
    return ModelPage(
        data=page,
        has_more=has_more,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
    )


def _limit(text: str | None) -> int | Failure:
    if text is None:
        return LIMIT_DEFAULT
    if text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= LIMIT_MAX:
        return int(text)
    return _invalid("limit", f"must be a number from 1 to {LIMIT_MAX}. Correct it.")


def _invalid(field: str, what: str) -> Failure:
    return Failure(kind=FailureKind.INVALID_REQUEST, message=f"`{field}`: {what}", param=field)


def _capabilities(known: Sequence[Capability]) -> ModelCapabilities:
    no = Support(supported=False)
    thinks = Support(supported="reasoning" in known)
    yes = Support(supported=True)
    return ModelCapabilities(
        batch=no,
        citations=no,
        code_execution=no,
        context_management=no,
        effort=EffortSupport(
            supported=thinks.supported, low=thinks, medium=thinks, high=thinks, xhigh=thinks, max=thinks
        ),
        image_input=no,
        pdf_input=no,
        server_tools=ServerTools(supported=False, web_search=no, code_execution=no),
        structured_outputs=Support(supported="structured_output" in known),
        thinking=ThinkingSupport(
            supported=thinks.supported,
            types=ThinkingTypes(enabled=thinks, adaptive=thinks, between_tools=yes, disabled=yes),
        ),
    )
