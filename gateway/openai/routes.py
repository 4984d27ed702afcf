"""POST /v1/chat/completions and /v1/completions."""

from litestar import Router, post
from litestar.types import ASGIApp

from gateway.answering import Answering
from gateway.http_errors import OPENAI_EXCEPTION_HANDLERS
from gateway.openai.dialect import CHAT, COMPLETIONS


def openai_router(answering: Answering) -> Router:
    """The routes of OpenAI's generation APIs."""

    @post("/chat/completions", status_code=200)
    async def chat_completions() -> ASGIApp:
        """OpenAI Chat Completions."""
        return answering.app(CHAT)

    @post("/completions", status_code=200)
    async def completions() -> ASGIApp:
        """OpenAI's legacy completions."""
        return answering.app(COMPLETIONS)

    return Router("/v1", route_handlers=[chat_completions, completions], exception_handlers=OPENAI_EXCEPTION_HANDLERS)
