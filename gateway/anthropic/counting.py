"""POST /v1/messages/count_tokens as a route of `gateway.single_answers`: how many tokens a prompt has. Decides only."""

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from gateway.anthropic.decode import decode
from gateway.anthropic.schema import PromptRequest
from gateway.anthropic.translate import prompt_of
from gateway.dialects import pointing_at
from gateway.single_work import SingleWork
from protocol.failures import Failure
from protocol.generation import RequestEvent, Tokenize, Tokenized
from protocol.ids import ModelName, RequestId

_PROMPT_FIELD = "messages"


class TokenCount(Struct, frozen=True, kw_only=True):
    """The answer: what the same request of /v1/messages would be billed for, its three input numbers together."""

    input_tokens: int


class CountingTokens:
    """Needs no place in the queue and no weights."""

    def accept(self, body: bytes, request_id: RequestId) -> SingleWork[PromptRequest] | Failure:
        """See `SingleRoute`."""
        decoded = decode(body, PromptRequest)
        if isinstance(decoded, Failure):
            return decoded
        prompt = prompt_of(decoded.request)
        if isinstance(prompt, Failure):
            return prompt
        return SingleWork(
            request=decoded.request,
            model=ModelName(decoded.request.model),
            work=Tokenize(request_id=request_id, prompt=prompt),
            ignored=decoded.ignored,
        )

    def answer(self, asked: SingleWork[PromptRequest], end: RequestEvent) -> Iterator[bytes]:
        """See `SingleRoute`."""
        del asked
        if not isinstance(end, Tokenized):
            raise TypeError(f"a Tokenize ended with {type(end).__name__}")
        yield msgspec.json.encode(TokenCount(input_tokens=len(end.token_ids)))

    def failure(self, asked: SingleWork[PromptRequest], failure: Failure) -> Failure:
        """See `SingleRoute`."""
        del asked
        return pointing_at(_PROMPT_FIELD, failure)
