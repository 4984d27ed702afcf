"""Whether a model of this kind can do this work: said before anything is loaded for it. Decides only."""

from typing import assert_never

from protocol.failures import Failure, FailureKind
from protocol.generation import Check, Detokenize, Embed, Generate, Rerank, Tokenize, Warm, Work
from protocol.ids import ModelName
from protocol.model_kind import ModelKind, capabilities_of

_ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
}


def cannot_do(model: ModelName, kind: ModelKind, work: Work) -> Failure | None:
    """Why not, in words that name what it can do. None when it can, or only the load will tell."""
    match work:
        case Generate() | Warm() | Check():
            wanted = "completions"
        case Embed():
            wanted = "embeddings"
        case Rerank():
            wanted = "rerank"
        case Tokenize() | Detokenize():
            return None
        case _:
            assert_never(work)
    able = capabilities_of(kind)
    if wanted in able:
        return None
    does = {"completions": "generate text", "embeddings": "embed", "rerank": "rerank"}[wanted]
    offers = ", ".join(f"{name} ({_ROUTES[name]})" for name in able)
    return Failure(
        kind=FailureKind.UNSUPPORTED,
        message=f"The model `{model}` cannot {does}. It is for: {offers}. GET /v1/models lists what each model can do.",
        param="model",
    )
