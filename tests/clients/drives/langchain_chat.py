"""langchain's chat models. The first argument is which: openai or anthropic."""

import sys

from checking import KEY, MODEL, SEEN, TALK, TALKED, URL, WEATHER, get_weather, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

if sys.argv[1] == "openai":
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
else:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, max_tokens=500)

weather = tool(get_weather)


def text() -> None:
    assert chat.invoke(TALK).text == TALKED


def stream() -> None:
    assert "".join(chunk.text for chunk in chat.stream(TALK)) == TALKED


def tool_round_trip() -> None:
    with_tools = chat.bind_tools([weather])
    messages = [HumanMessage(WEATHER)]
    first = with_tools.invoke(messages)
    (call,) = first.tool_calls
    messages += [first, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert SEEN in with_tools.invoke(messages).text


run({"text": text, "stream": stream, "tool round trip": tool_round_trip})
