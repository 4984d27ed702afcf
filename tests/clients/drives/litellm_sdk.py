"""litellm, as it reaches a server that speaks OpenAI's API, and one that speaks Anthropic's."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a price list when it is imported

import litellm
from checking import CITY, EMBEDDER, KEY, MODEL, SCHEMA, SEEN, TALK, TALKED, URL, WEATHER, get_weather, run

litellm.telemetry = False
OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "max_tokens": 500}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "weather", "parameters": SCHEMA}}


def text() -> None:
    answer = litellm.completion(**OPENAI, messages=[{"role": "user", "content": TALK}])
    assert answer.choices[0].message.content == TALKED


def stream() -> None:
    chunks = litellm.completion(**OPENAI, messages=[{"role": "user", "content": TALK}], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TALKED


def tool_round_trip(where: dict = OPENAI) -> None:
    messages = [{"role": "user", "content": WEATHER}]
    message = litellm.completion(**where, messages=messages, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    messages += [
        message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": get_weather(CITY)},
    ]
    answer = litellm.completion(**where, messages=messages, tools=[TOOL])
    assert SEEN in answer.choices[0].message.content


def messages_api() -> None:
    tool_round_trip(ANTHROPIC)


def embeddings() -> None:
    answer = litellm.embedding(
        model=f"openai/{EMBEDDER}", api_base=f"{URL}/v1", api_key=KEY, input=["one"], encoding_format="float"
    )
    assert len(answer.data[0]["embedding"]) == 384


run(
    {
        "text": text,
        "stream": stream,
        "tool round trip": tool_round_trip,
        "messages": messages_api,
        "embeddings": embeddings,
    }
)
