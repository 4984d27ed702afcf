"""POST /v1/rerank as a route of `gateway.single_answers`. Decides only."""

from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from gateway.answer_details import vectors_details
from gateway.openai.decode import decode
from gateway.single_work import SingleWork
from gateway.vectors.schema import (
    DocumentObject,
    RerankAnswer,
    RerankMeta,
    RerankRequest,
    RerankResult,
    RerankTokens,
    VectorsUsage,
)
from protocol.failures import Failure
from protocol.generation import RequestEvent, Rerank, Reranked
from protocol.ids import ModelName, RequestId


class Ranking:
    """The route."""

    def accept(self, body: bytes, request_id: RequestId) -> SingleWork[RerankRequest] | Failure:
        """See `SingleRoute`."""
        decoded = decode(body, RerankRequest)
        if isinstance(decoded, Failure):
            return decoded
        request = decoded.request
        return SingleWork(
            request=request,
            model=ModelName(request.model),
            work=Rerank(
                request_id=request_id,
                query=request.query,
                documents=tuple(_text(document) for document in request.documents),
                overlong="cut" if request.truncate else "refuse",
            ),
            service_tier=request.service_tier,
            priority=request.priority,
            ignored=decoded.ignored,
        )

    def answer(self, asked: SingleWork[RerankRequest], end: RequestEvent) -> Iterator[bytes]:
        """See `SingleRoute`."""
        if not isinstance(end, Reranked):
            raise TypeError(f"a Rerank ended with {type(end).__name__}")
        request = asked.request
        ranked = sorted(range(len(end.scores)), key=lambda index: (-end.scores[index], index))[: request.top_n]
        results = [
            RerankResult(
                index=index,
                relevance_score=end.scores[index],
                document=DocumentObject(text=_text(request.documents[index])) if request.return_documents else UNSET,
            )
            for index in ranked
        ]
        answer = RerankAnswer(
            id="rerank-" + asked.work.request_id.removeprefix("req_"),
            model=request.model,
            results=results,
            usage=VectorsUsage(prompt_tokens=end.prompt_tokens, total_tokens=end.prompt_tokens),
            meta=RerankMeta(tokens=RerankTokens(input_tokens=end.prompt_tokens)),
            mlxd=vectors_details(end, asked.details),
        )
        yield msgspec.json.encode(answer)

    def failure(self, asked: SingleWork[RerankRequest], failure: Failure) -> Failure:
        """See `SingleRoute`. The worker's names are this API's."""
        del asked
        return failure


def _text(document: str | DocumentObject) -> str:
    return document if isinstance(document, str) else document.text
