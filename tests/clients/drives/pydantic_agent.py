"""pydantic-ai: an agent that runs its tool by itself, over chat and over Responses."""

from checking import KEY, MODEL, SEEN, TALK, TALKED, URL, WEATHER, get_weather, run
from openai import AsyncOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0))


def text() -> None:
    assert Agent(OpenAIChatModel(MODEL, provider=provider)).run_sync(TALK).output == TALKED


def tool_round_trip() -> None:
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), tools=[get_weather])
    assert SEEN in agent.run_sync(WEATHER).output


def responses() -> None:
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), tools=[get_weather])
    assert SEEN in agent.run_sync(WEATHER).output


run({"text": text, "tool round trip": tool_round_trip, "responses": responses})
