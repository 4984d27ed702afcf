"""POST /v1/embeddings as a route of `gateway.single_answers`. Decides only."""

import base64
import sys
from array import array
from collections.abc import Iterator

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from gateway.answer_details import vectors_details
from gateway.openai.decode import decode
from gateway.single_work import SingleWork
from gateway.vectors.schema import MOST_INPUTS, EmbeddingRequest, VectorsUsage
from protocol.failures import Failure, FailureKind
from protocol.generation import Embed, Embedded, RequestEvent, TextPrompt, TokenPrompt
from protocol.ids import ModelName, RequestId

_BYTES_OF_FLOAT = 4
_encode = msgspec.json.encode


class Embeddings:
    """The route."""

    def accept(self, body: bytes, request_id: RequestId) -> SingleWork[EmbeddingRequest] | Failure:
        """See `SingleRoute`."""
        decoded = decode(body, EmbeddingRequest)
        if isinstance(decoded, Failure):
            return decoded
        request = decoded.request
        inputs = inputs_of(request.input)
        if isinstance(inputs, Failure):
            return inputs
        return SingleWork(
            request=request,
            model=ModelName(request.model),
            work=Embed(
                request_id=request_id,
                inputs=inputs,
                dimensions=request.dimensions,
                overlong="cut" if request.truncate else "refuse",
            ),
            service_tier=request.service_tier,
            priority=request.priority,
            ignored=decoded.ignored,
        )

    def answer(self, asked: SingleWork[EmbeddingRequest], end: RequestEvent) -> Iterator[bytes]:
        """See `SingleRoute`."""
        if not isinstance(end, Embedded):
            raise TypeError(f"an Embed ended with {type(end).__name__}")
        yield b'{"object":"list","data":['
        size = end.dimensions * _BYTES_OF_FLOAT
        for index, start in enumerate(range(0, len(end.vectors), size)):
            vector = end.vectors[start : start + size]
            yield b'%s{"object":"embedding","index":%d,"embedding":' % (b"," if index else b"", index)
            if asked.request.encoding_format == "base64":
                yield b'"%s"}' % base64.b64encode(vector)
            else:
                yield _encode(_floats(vector)) + b"}"
        usage = VectorsUsage(prompt_tokens=end.prompt_tokens, total_tokens=end.prompt_tokens)
        yield b'],"model":%s,"usage":%s' % (_encode(asked.request.model), _encode(usage))
        details = vectors_details(end, asked.details)
        yield b"}" if details is UNSET else b',"mlxd":%s}' % _encode(details)

    def failure(self, asked: SingleWork[EmbeddingRequest], failure: Failure) -> Failure:
        """See `SingleRoute`. A client that sent one input knows no `input[0]`."""
        sent = asked.request.input
        is_one = isinstance(sent, str) or isinstance(sent[0], int)
        if not is_one or failure.param != "input[0]":
            return failure
        return replace(failure, param="input", message=failure.message.replace("input[0]", "input", 1))


def inputs_of(sent: str | list[str | int | list[int]]) -> tuple[TextPrompt | TokenPrompt, ...] | Failure:
    """One text, one list of token ids, or a list of either."""
    if isinstance(sent, str):
        return (TextPrompt(text=sent),) if sent else _empty("input")
    if not sent:
        return _empty("input")
    first = sent[0]
    if isinstance(first, int):
        numbers = tuple(item for item in sent if isinstance(item, int))
        return (TokenPrompt(token_ids=numbers),) if len(numbers) == len(sent) else _mixed()
    if len(sent) > MOST_INPUTS:
        message = f"`input`: at most {MOST_INPUTS} inputs in one request, and there are {len(sent)}. Send several."
        return Failure(kind=FailureKind.INVALID_REQUEST, message=message, param="input")
    inputs: list[TextPrompt | TokenPrompt] = []
    for index, item in enumerate(sent):
        if isinstance(item, int) or type(item) is not type(first):
            return _mixed()
        if not item:
            return _empty(f"input[{index}]")
        inputs.append(TextPrompt(text=item) if isinstance(item, str) else TokenPrompt(token_ids=tuple(item)))
    return tuple(inputs)


def _floats(vector: bytes) -> list[float]:
    floats = array("f", vector)
    if sys.byteorder == "big":
        floats.byteswap()
    return floats.tolist()


def _empty(param: str) -> Failure:
    message = f"`{param}`: must not be empty. Send at least one character or token."
    return Failure(kind=FailureKind.INVALID_REQUEST, message=message, param=param)


def _mixed() -> Failure:
    message = "`input`: must be one text, one list of token ids, or a list of texts or of such lists, not mixed."
    return Failure(kind=FailureKind.INVALID_REQUEST, message=message, param="input")
