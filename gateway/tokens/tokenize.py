"""POST /tokenize and /detokenize as routes of `gateway.single_answers`. Decides only."""

from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from gateway.openai.decode import decode
from gateway.openai.translate import chat_to_generate
from gateway.request_body import decode_plain
from gateway.single_work import SingleWork
from gateway.tokens.schema import (
    DetokenizeAnswer,
    DetokenizeRequest,
    PromptFields,
    TokenizeAnswer,
    TokenizeChat,
    TokenizeText,
)
from protocol.failures import Failure, FailureKind
from protocol.generation import Detokenize, Detokenized, RequestEvent, TextPrompt, Tokenize, Tokenized
from protocol.ids import ModelName, RequestId

_HERE = frozenset({"add_special_tokens", "add_generation_prompt", "continue_final_message", "return_token_strs"})


class Tokenizing:
    """Which tokens a text or a chat is."""

    def accept(self, body: bytes, request_id: RequestId) -> SingleWork[TokenizeText | TokenizeChat] | Failure:
        """See `SingleRoute`."""
        shape = decode_plain(body, PromptFields)
        if isinstance(shape, Failure):
            return shape
        if shape.messages is UNSET:
            return self._accept_text(body, request_id)
        if shape.prompt is not UNSET:
            message = "Send `messages` or `prompt`, not both."
            return Failure(kind=FailureKind.INVALID_REQUEST, message=message, param="prompt")
        return self._accept_chat(body, request_id)

    def answer(self, asked: SingleWork[TokenizeText | TokenizeChat], end: RequestEvent) -> Iterator[bytes]:
        """See `SingleRoute`."""
        if not isinstance(end, Tokenized):
            raise TypeError(f"a Tokenize ended with {type(end).__name__}")
        answer = TokenizeAnswer(
            count=len(end.token_ids),
            max_model_len=end.context_tokens,
            tokens=end.token_ids,
            token_strs=end.tokens if asked.request.return_token_strs else None,
        )
        yield msgspec.json.encode(answer)

    def failure(self, asked: SingleWork[TokenizeText | TokenizeChat], failure: Failure) -> Failure:
        """See `SingleRoute`. The worker's names are this API's."""
        del asked
        return failure

    def _accept_text(self, body: bytes, request_id: RequestId) -> SingleWork[TokenizeText | TokenizeChat] | Failure:
        decoded = decode(body, TokenizeText)
        if isinstance(decoded, Failure):
            return decoded
        request = decoded.request
        return SingleWork(
            request=request,
            model=ModelName(request.model),
            work=Tokenize(
                request_id=request_id,
                prompt=TextPrompt(text=request.prompt),
                special_tokens="leave" if request.add_special_tokens is False else "add",
            ),
            ignored=decoded.ignored,
        )

    def _accept_chat(self, body: bytes, request_id: RequestId) -> SingleWork[TokenizeText | TokenizeChat] | Failure:
        decoded = decode(body, TokenizeChat)
        if isinstance(decoded, Failure):
            return decoded
        request = decoded.request
        for name, is_asked in (
            ("add_special_tokens", request.add_special_tokens),
            ("add_generation_prompt", request.add_generation_prompt is False),
            ("continue_final_message", request.continue_final_message),
            ("chat_template", request.chat_template),
        ):
            if is_asked:
                message = f"`{name}`: a chat is rendered here as it is for an answer. Leave it out, or send `prompt`."
                return Failure(kind=FailureKind.UNSUPPORTED, message=message, param=name)
        commands = chat_to_generate(request, request_id=request_id, cache_scope=b"")
        if isinstance(commands, Failure):
            return commands
        return SingleWork(
            request=request,
            model=ModelName(request.model),
            work=Tokenize(request_id=request_id, prompt=commands[0].prompt),
            ignored=tuple(name for name in decoded.ignored if name not in _HERE),
        )


class Detokenizing:
    """Which text these tokens are."""

    def accept(self, body: bytes, request_id: RequestId) -> SingleWork[DetokenizeRequest] | Failure:
        """See `SingleRoute`."""
        decoded = decode(body, DetokenizeRequest)
        if isinstance(decoded, Failure):
            return decoded
        request = decoded.request
        return SingleWork(
            request=request,
            model=ModelName(request.model),
            work=Detokenize(request_id=request_id, token_ids=tuple(request.tokens)),
            ignored=decoded.ignored,
        )

    def answer(self, asked: SingleWork[DetokenizeRequest], end: RequestEvent) -> Iterator[bytes]:
        """See `SingleRoute`."""
        del asked
        if not isinstance(end, Detokenized):
            raise TypeError(f"a Detokenize ended with {type(end).__name__}")
        yield msgspec.json.encode(DetokenizeAnswer(prompt=end.text))

    def failure(self, asked: SingleWork[DetokenizeRequest], failure: Failure) -> Failure:
        """See `SingleRoute`. The worker's names are this API's."""
        del asked
        return failure
