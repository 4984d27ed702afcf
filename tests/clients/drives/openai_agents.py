"""OpenAI's Agents SDK: its runner calls the tool by itself, over Responses and over chat."""

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from checking import KEY, MODEL, SEEN, URL, WEATHER, get_weather, run
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)  # else every run is sent to OpenAI
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
weather = function_tool(get_weather)


def responses() -> None:
    agent = Agent(name="one", model=OpenAIResponsesModel(model=MODEL, openai_client=client), tools=[weather])
    assert SEEN in Runner.run_sync(agent, WEATHER).final_output


def tool_round_trip() -> None:
    agent = Agent(name="one", model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client), tools=[weather])
    assert SEEN in Runner.run_sync(agent, WEATHER).final_output


run({"tool round trip": tool_round_trip, "responses": responses})
