"""The Responses API as a dialect of `gateway.answering`: one request, whose earlier items are there. Decides only."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.admission import KeyLimits, Load, rate_headers
from gateway.dialects import Accepted, Asked, Header
from gateway.error_answers import ErrorAnswer
from gateway.latency_class import service_tier_of
from gateway.request_body import Decoded
from gateway.request_tallies import Dialect as DialectName
from gateway.responses.answers import CacheDiagnostics, ResponseObject
from gateway.responses.failures import responses_error
from gateway.responses.output import ItemMaker
from gateway.responses.rendering import Envelope, ResponseRendering
from gateway.responses.schema import CreateRequest, TextOptions
from gateway.responses.sealed_reasoning import seal
from gateway.responses.translate import (
    SEALED_REASONING,
    Understood,
    asked_logprobs,
    command_of,
    sampling_of,
    understand,
)
from protocol.failures import Failure
from protocol.generation import CacheUse
from protocol.ids import ModelName, RequestId

BACKGROUND_TIER = "flex"
"""What a request in the background is served as unless it says otherwise: nobody looks at a screen for it."""

Diagnose = Callable[[str], CacheDiagnostics]


class ResponsesBody(Struct, frozen=True, kw_only=True):
    """A request and what it means."""

    request: CreateRequest
    understood: Understood


class ResponsesDialect:
    """One request. `items` are those of earlier answers and of its input; `diagnose` compares it with another response
    once it has ended."""

    prompt_field = "input"
    name: DialectName = "responses"

    def __init__(
        self,
        decoded: Decoded[CreateRequest],
        items: Sequence[tuple[str, msgspec.Raw]],
        *,
        store: Literal["asked", "unasked"],
        diagnose: Diagnose,
    ) -> None:
        self._decoded = decoded
        self._items = items
        self._store: Literal["asked", "unasked"] = store
        self._diagnose = diagnose

    def accept(self, body: bytes, asked: Asked) -> Accepted[ResponsesBody] | Failure:
        """See `Dialect`."""
        del body  # was read before, since what it refers to had to be fetched
        request = self._decoded.request
        caller = asked.caller
        understood = understand(request, self._items, cache_scope=caller.cache_scope)
        if isinstance(understood, Failure):
            return understood
        cache = CacheUse(scope=caller.cache_scope, owner=caller.cache_owner, disk_ttl_seconds=caller.cache_ttl_seconds)
        command = command_of(request, understood, request_id=asked.request_id, cache=cache)
        return Accepted(
            request=ResponsesBody(request=request, understood=understood),
            model=ModelName(request.model),
            work=(command,),
            answer="stream" if request.stream else "whole",
            service_tier=_tier(request),
            priority=request.priority,
            constraint_field="text.format",
            ignored=(*self._decoded.ignored, *understood.ignored),
        )

    def rendering(self, accepted: Accepted[ResponsesBody], asked: Asked) -> ResponseRendering:
        """See `Dialect`."""
        request, understood = accepted.request.request, accepted.request.understood
        bare_id = asked.request_id.removeprefix("req_")
        scope = asked.caller.cache_scope
        compared_with = request.prompt_cache_options and request.prompt_cache_options.comparison_response_id

        def diagnose() -> CacheDiagnostics | UnsetType:
            return self._diagnose(compared_with) if compared_with else UNSET

        return ResponseRendering(
            Envelope(
                frame=_frame(accepted, asked, bare_id=bare_id, store=self._store),
                maker=ItemMaker(
                    bare_id=bare_id,
                    origins=understood.tools.origins,
                    seal=(lambda text: seal(text, scope)) if SEALED_REASONING in (request.include or ()) else None,
                ),
                details_of=asked.request_id if asked.details == "asked" else None,
                diagnose=diagnose,
            )
        )

    def error(self, failure: Failure, request_id: RequestId) -> ErrorAnswer:
        """See `Dialect`."""
        del request_id  # is in a header already
        return responses_error(failure)

    def rate_headers(self, load: Load, limits: KeyLimits) -> tuple[Header, ...]:
        """See `Dialect`."""
        return rate_headers(load, limits)


def _tier(request: CreateRequest) -> str | None:
    if request.background and request.service_tier in (None, "auto"):
        return BACKGROUND_TIER
    return request.service_tier


def _frame(
    accepted: Accepted[ResponsesBody], asked: Asked, *, bare_id: str, store: Literal["asked", "unasked"]
) -> ResponseObject:
    """The response before it has any output: the request's settings, as they were understood."""
    request = accepted.request.request
    sampling = sampling_of(request)
    reasoning, options = request.reasoning, request.prompt_cache_options
    return ResponseObject(
        id=f"resp_{bare_id}",
        created_at=asked.created_unix,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_options=None if options is None else _given(options),
        prompt_cache_retention=request.prompt_cache_retention,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        safety_identifier=request.safety_identifier,
        service_tier=service_tier_of(accepted.latency_class),
        store=store == "asked",
        temperature=sampling.temperature,
        text=_text(request.text),
        tool_choice=_tool_choice(request),
        # On one line: an event's data may not hold a line's end.
        tools=tuple(msgspec.Raw(msgspec.json.format(bytes(tool), indent=-1)) for tool in request.tools or ()),
        top_logprobs=asked_logprobs(request) or 0,
        top_p=sampling.top_p,
        truncation="disabled",
        user=request.user,
        metadata=dict(request.metadata or {}),
    )


def _text(options: TextOptions | None) -> dict[str, Any]:
    asked = options.format if options is not None else None
    form: dict[str, Any] = {"type": "text"}
    if asked is not None and asked.type != "text":
        form = _given(asked) if asked.type == "json_schema" else {"type": asked.type}
    verbosity = options.verbosity if options is not None else None
    return {"format": form} if verbosity is None else {"format": form, "verbosity": verbosity}


def _tool_choice(request: CreateRequest) -> Any:
    choice = request.tool_choice
    return choice or "auto" if isinstance(choice, str | None) else _given(choice)


def _given(options: Struct) -> dict[str, Any]:
    """What was given of them."""
    return {name: value for name, value in msgspec.to_builtins(options).items() if value is not None}
