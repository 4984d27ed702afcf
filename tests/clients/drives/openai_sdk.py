"""The openai SDK: chat, Responses, embeddings, errors."""

from checking import CITY, EMBEDDER, KEY, MODEL, SCHEMA, SEEN, TALK, TALKED, URL, WEATHER, get_weather, run
from openai import NotFoundError, OpenAI

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "description": "weather", "parameters": SCHEMA}}
RESPONSES_TOOL = {"type": "function", "name": "get_weather", "description": "weather", "parameters": SCHEMA}


def text() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TALK}])
    assert answer.choices[0].message.content == TALKED
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def stream() -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": TALK}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(piece or "" for piece in pieces) == TALKED
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0


def tool_round_trip() -> None:
    messages = [{"role": "user", "content": WEATHER}]
    message = client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL]).choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": get_weather(CITY)}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
    assert SEEN in answer.choices[0].message.content


def streamed_call() -> None:
    """The SDK's own accumulator puts the call together (`beta.chat.completions` before 2.0)."""
    chat = client.chat.completions if hasattr(client.chat.completions, "stream") else client.beta.chat.completions
    with chat.stream(model=MODEL, messages=[{"role": "user", "content": WEATHER}], tools=[CHAT_TOOL]) as events:
        message = events.get_final_completion().choices[0].message
    assert message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


def responses() -> None:
    """Streamed, with a tool, and the round trip by items."""
    items = [{"role": "user", "content": WEATHER}]
    with client.responses.stream(model=MODEL, input=items, tools=[RESPONSES_TOOL], store=False) as events:
        for _ in events:
            pass
        first = events.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    items += [
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": get_weather(CITY)},
    ]
    second = client.responses.create(model=MODEL, input=items, tools=[RESPONSES_TOOL], store=False)
    assert SEEN in second.output_text


def embeddings() -> None:
    """The SDK asks for base64 by itself."""
    answer = client.embeddings.create(model=EMBEDDER, input=["one", "two"])
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) == 384


def errors() -> None:
    try:
        client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": TALK}])
    except NotFoundError as why:
        assert why.code == "model_not_found", why.code
    else:
        raise AssertionError("an unknown model was served")


run(
    {
        "text": text,
        "stream": stream,
        "tool round trip": tool_round_trip,
        "streamed call": streamed_call,
        "responses": responses,
        "embeddings": embeddings,
        "errors": errors,
    }
)
