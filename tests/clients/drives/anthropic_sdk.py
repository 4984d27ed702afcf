"""The anthropic SDK: messages, streams, tools, counting, models, errors."""

from anthropic import Anthropic, NotFoundError
from checking import CITY, KEY, MODEL, SCHEMA, SEEN, TALK, TALKED, URL, WEATHER, get_weather, run

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOL = {"name": "get_weather", "description": "weather", "input_schema": SCHEMA}


def text() -> None:
    answer = client.messages.create(model=MODEL, max_tokens=500, messages=[{"role": "user", "content": TALK}])
    assert answer.content[0].text == TALKED
    assert answer.stop_reason == "end_turn"


def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=500, messages=[{"role": "user", "content": TALK}]) as events:
        assert "".join(events.text_stream) == TALKED
        assert events.get_final_message().usage.output_tokens > 0


def tool_round_trip() -> None:
    messages = [{"role": "user", "content": WEATHER}]
    with client.messages.stream(model=MODEL, max_tokens=500, messages=messages, tools=[TOOL]) as events:
        first = events.get_final_message()
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.input == {"city": CITY}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": get_weather(CITY)}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(model=MODEL, max_tokens=500, messages=messages, tools=[TOOL])
    assert SEEN in second.content[0].text


def count() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": TALK}])
    answer = client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": TALK}])
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) + (
        usage.cache_creation_input_tokens or 0
    )


def models() -> None:
    assert MODEL in [model.id for model in client.models.list(limit=100)]


def errors() -> None:
    try:
        client.messages.create(model="no-such-model", max_tokens=5, messages=[{"role": "user", "content": TALK}])
    except NotFoundError as why:
        assert why.body["error"]["type"] == "not_found_error", why.body
    else:
        raise AssertionError("an unknown model was served")


run(
    {
        "text": text,
        "stream": stream,
        "tool round trip": tool_round_trip,
        "count": count,
        "models": models,
        "errors": errors,
    }
)
