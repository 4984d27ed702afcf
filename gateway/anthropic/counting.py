"""POST /v1/messages/count_tokens: how many tokens a prompt has. Needs no place in the queue and no weights."""

import asyncio

import msgspec
from litestar.types import ASGIApp, Receive, Scope, Send
from msgspec import Struct

from gateway import sse
from gateway.answering import (
    IGNORED_HEADER,
    cannot_serve,
    pointing_at,
    send_answer,
    send_error,
    unless_disconnected,
)
from gateway.anthropic.decode import Decoded, decode
from gateway.anthropic.schema import PromptRequest
from gateway.anthropic.translate import prompt_of
from gateway.anthropic_errors import anthropic_error
from gateway.dialects import names_header
from gateway.json_body import ClientGone, read_json_body
from gateway.ports import Generator, ModelLookup
from gateway.replies import Reply
from protocol.failures import Failure, FailureKind
from protocol.generation import Failed, Tokenize, Tokenized
from protocol.ids import ModelName, RequestId

PROMPT_FIELD = "messages"


class TokenCount(Struct, frozen=True, kw_only=True):
    """The answer: what the same request of /v1/messages would be billed for, its three input numbers together."""

    input_tokens: int


def count_tokens_app(generator: Generator, models: ModelLookup, *, max_body_bytes: int) -> ASGIApp:
    """The ASGI app of the route. The gate before it has put `request_id` into the scope's state."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        request_id: RequestId = scope["state"]["request_id"]
        body = await read_json_body(scope["headers"], receive, max_body_bytes=max_body_bytes)
        if isinstance(body, ClientGone):
            return
        asked = body if isinstance(body, Failure) else _understand(body, models, request_id)
        if isinstance(asked, Failure):
            await send_error(send, anthropic_error(asked, request_id))
            return
        decoded, work = asked
        disconnected = asyncio.create_task(sse.until_disconnected(receive))
        reply = generator.submit(ModelName(decoded.request.model), work)
        try:
            counted = await unless_disconnected(_count(reply), disconnected)
        finally:
            reply.cancel()
            disconnected.cancel()
        if isinstance(counted, Failure):
            await send_error(send, anthropic_error(pointing_at(PROMPT_FIELD, counted), request_id))
        elif counted is not None:
            headers = [(b"content-type", b"application/json")]
            if decoded.ignored:
                headers.append((IGNORED_HEADER, names_header(decoded.ignored).encode()))
            await send_answer(send, 200, headers, msgspec.json.encode(counted))

    return answer


def _understand(
    body: bytes, models: ModelLookup, request_id: RequestId
) -> tuple[Decoded[PromptRequest], Tokenize] | Failure:
    decoded = decode(body, PromptRequest)
    if isinstance(decoded, Failure):
        return decoded
    prompt = prompt_of(decoded.request)
    if isinstance(prompt, Failure):
        return prompt
    unservable = cannot_serve(models, decoded.request.model)
    return unservable or (decoded, Tokenize(request_id=request_id, prompt=prompt))


async def _count(reply: Reply) -> TokenCount | Failure:
    async for event in reply:
        match event:
            case Tokenized(token_ids=token_ids):
                return TokenCount(input_tokens=len(token_ids))
            case Failed(failure=failure):
                return failure
            case _:
                pass
    return Failure(kind=FailureKind.INTERNAL, message="The count ended as something else. Try again.")
