"""Every route that callers have, with what it reads and what it answers: what /openapi.json is made of. Pure."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.answer_details import DetailsObject
from gateway.anthropic.answers import Event as MessageEvent
from gateway.anthropic.answers import MessageObject
from gateway.anthropic.counting import TokenCount
from gateway.anthropic.models import LIMIT_MAX, ModelInfo, ModelPage
from gateway.anthropic.schema import MessagesRequest, PromptRequest
from gateway.cache_terms import (
    CacheForgotten,
    CacheWarm,
    OwnForgetRequest,
    PinDeleted,
    PinList,
    WarmChat,
    WarmCompletion,
)
from gateway.explain import Explanation
from gateway.in_flight import RequestView, RequestViews
from gateway.openai.answers import ChatChunk, ChatCompletion, TextCompletion
from gateway.openai.schema import ChatRequest, CompletionRequest
from gateway.openapi import Operation
from gateway.operations import Health, ModelList, ModelObject, Readiness
from gateway.responses.answers import InputTokens, ItemList, ResponseDeleted, ResponseObject
from gateway.responses.events import Event as ResponseEvent
from gateway.responses.schema import CountRequest, CreateRequest
from gateway.tokens.schema import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeChat, TokenizeText
from gateway.vectors.schema import EmbeddingRequest, RerankAnswer, RerankRequest, VectorsUsage


class EmbeddingObject(Struct, frozen=True, kw_only=True):
    """One input's vector: numbers, or its floats as base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the inputs. Written by hand in `vectors.embeddings`, for they are large."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: VectorsUsage
    mlxd: DetailsObject | UnsetType = UNSET


_Class = Annotated[
    str, Meta(description="interactive, standard or batch; for another word the key's default. The answer's says which")
]
_Details = Annotated[
    str,
    Meta(
        description="1 adds the object mlxd to the answer, or to a stream's last data: the request's id, its timings "
        "and, where a cache could help, what it did"
    ),
]
_CLASS = {"x-mlxd-class": _Class, "x-mlxd-details": _Details}
_ANTHROPIC = {"anthropic-version": str}
_MODEL_PAGES = {
    "limit": Annotated[int, Meta(ge=1, le=LIMIT_MAX)],
    "after_id": str,
    "before_id": str,
}
_ITEM_PAGES = {"limit": Annotated[int, Meta(ge=1, le=100)], "after": str, "order": Literal["asc", "desc"]}


def _at(paths: tuple[str, ...], **said: Any) -> tuple[Operation, ...]:
    return tuple(Operation(path=path, **said) for path in paths)


PUBLIC_ROUTES: tuple[Operation, ...] = (
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="OpenAI Chat Completions",
        body=ChatRequest,
        answer=ChatCompletion,
        event=ChatChunk,
        headers=_CLASS,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        summary="OpenAI's legacy completions",
        body=CompletionRequest,
        answer=TextCompletion,
        event=TextCompletion,
        headers=_CLASS,
    ),
    Operation(
        method="post",
        path="/v1/messages",
        summary="Anthropic Messages",
        body=MessagesRequest,
        answer=MessageObject,
        event=MessageEvent,
        errors_as="anthropic",
        headers=_CLASS | _ANTHROPIC,
    ),
    Operation(
        method="post",
        path="/v1/messages/count_tokens",
        summary="What the same request of /v1/messages would be billed for",
        body=PromptRequest,
        answer=TokenCount,
        errors_as="anthropic",
    ),
    Operation(
        method="post",
        path="/v1/responses",
        summary="OpenAI Responses",
        body=CreateRequest,
        answer=ResponseObject,
        event=ResponseEvent,
        headers=_CLASS,
    ),
    Operation(
        method="post",
        path="/v1/responses/input_tokens",
        summary="How many tokens a response's prompt has",
        body=CountRequest,
        answer=InputTokens,
    ),
    Operation(method="post", path="/v1/responses/compact", summary="Not offered: always 400"),
    Operation(
        method="get",
        path="/v1/responses/{response_id}",
        summary="A stored response",
        answer=ResponseObject,
        queries={"stream": bool},
    ),
    Operation(
        method="delete", path="/v1/responses/{response_id}", summary="Forget a stored response", answer=ResponseDeleted
    ),
    Operation(
        method="post",
        path="/v1/responses/{response_id}/cancel",
        summary="End a response in the background",
        answer=ResponseObject,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response_id}/input_items",
        summary="What a stored response was made of",
        answer=ItemList,
        queries=_ITEM_PAGES,
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        summary="OpenAI's embeddings",
        body=EmbeddingRequest,
        answer=EmbeddingList,
        headers=_CLASS,
    ),
    *_at(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        method="post",
        summary="Jina's and Cohere's rerank",
        body=RerankRequest,
        answer=RerankAnswer,
        headers=_CLASS,
    ),
    *_at(
        ("/tokenize", "/v1/tokenize"),
        method="post",
        summary="Text or chat to tokens",
        body=(TokenizeText, TokenizeChat),
        answer=TokenizeAnswer,
    ),
    *_at(
        ("/detokenize", "/v1/detokenize"),
        method="post",
        summary="Tokens to text",
        body=DetokenizeRequest,
        answer=DetokenizeAnswer,
    ),
    Operation(
        method="post",
        path="/v1/cache/warm",
        summary="Compute a prompt's prefix and keep it",
        body=(WarmChat, WarmCompletion),
        answer=CacheWarm,
    ),
    Operation(method="get", path="/v1/cache/pins", summary="The caller's own pinned prefixes", answer=PinList),
    Operation(
        method="delete", path="/v1/cache/pins/{name}", summary="Let a pinned prefix age like others", answer=PinDeleted
    ),
    Operation(
        method="post",
        path="/v1/cache/forget",
        summary="Drop the caller's own blocks, in memory and on disk",
        body=OwnForgetRequest,
        body_is="optional",
        answer=CacheForgotten,
    ),
    Operation(method="get", path="/v1/requests", summary="The caller's own open requests", answer=RequestViews),
    Operation(method="get", path="/v1/requests/{asked_id}", summary="One of them", answer=RequestView),
    Operation(
        method="get",
        path="/v1/requests/{asked_id}/explain",
        summary="Why a request reused no more of its prompt",
        answer=Explanation,
    ),
    Operation(
        method="get",
        path="/v1/models",
        summary="All models; with the header anthropic-version in pages, as Anthropic's API has them",
        answer=(ModelList, ModelPage),
        errors_as="either",
        queries=_MODEL_PAGES,
        headers=_ANTHROPIC,
    ),
    Operation(
        method="get",
        path="/v1/models/{model_id}",
        summary="One model. Slashes of its id stay as they are",
        answer=(ModelObject, ModelInfo),
        errors_as="either",
        headers=_ANTHROPIC,
    ),
    Operation(method="get", path="/openapi.json", summary="This document", answer=dict[str, Any]),
    Operation(method="get", path="/health", summary="The process lives", answer=Health, key="unneeded"),
    Operation(method="get", path="/", summary="Somebody is there", key="unneeded"),
    Operation(
        method="get", path="/ready", summary="No loaded model is stuck; 503 if one is", answer=Readiness, also=(503,)
    ),
)
