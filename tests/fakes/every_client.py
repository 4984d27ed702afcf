"""One conversation asked in every dialect, by every client, whole and streamed: all must have the same in the end."""
# pyright: basic

import json
from collections.abc import Mapping
from typing import Any, Literal

import anthropic
import openai

from tests.fakes.live_service import LiveService
from tests.fakes.outcomes import Outcome, events_of, failed, joined_chat, joined_message, joined_response, whole
from tests.fakes.same_conversation import Dialect, for_anthropic, for_openai, in_dialect

Clients = Literal["all", "http"]
PATHS: Mapping[Dialect, str] = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


class EveryClient:
    """The raw HTTP client and both SDKs, for one service. The SDKs do not try again by themselves."""

    def __init__(self, service: LiveService) -> None:
        self.http = service.client()
        url = service.base_url
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.anthropic.close()

    def ask(self, dialect: Dialect, chat: Mapping[str, Any], *, clients: Clients = "all") -> Outcome:
        """Ask a conversation in each way that there is: all must have the same outcome."""
        return self.send(dialect, in_dialect(dialect, chat), clients=clients)

    def send(self, dialect: Dialect, body: Mapping[str, Any], *, clients: Clients = "all") -> Outcome:
        """The same of a body in the dialect's own words. `clients` "http" is for what SDKs do not let out."""
        first = self._http_whole(dialect, body)
        ways = {"http stream": self._http_stream(dialect, body)}
        if clients == "all":
            ways["sdk"] = self._sdk(dialect, body, "whole")
            ways["sdk stream"] = self._sdk(dialect, body, "stream")
        for way, outcome in ways.items():
            assert outcome == first, f"{dialect}, {way}: {outcome}\nis not {first}"
        return first

    def assert_served(self, model: str) -> None:
        """What must hold after every case: the list is there, and four tokens can be had."""
        assert self.http.get("/v1/models").status_code == 200
        body = {"model": model, "max_tokens": 4, "messages": [{"role": "user", "content": "SC19"}]}
        outcome = self._http_whole("chat", body)
        assert (outcome.status, outcome.completion_tokens, outcome.finish) == (200, 4, "length")

    # --- raw HTTP ----------------------------------------------------------------------------------------------------

    def _http_whole(self, dialect: Dialect, body: Mapping[str, Any]) -> Outcome:
        answer = self.http.post(PATHS[dialect], json=body)
        if answer.status_code != 200:
            return failed(dialect, answer.status_code, answer.json())
        return whole(dialect, answer.json())

    def _http_stream(self, dialect: Dialect, body: Mapping[str, Any]) -> Outcome:
        extra = {"stream_options": {"include_usage": True}} if dialect == "chat" else {}
        answer = self.http.post(PATHS[dialect], json={**extra, **body, "stream": True})
        if answer.status_code != 200:
            return failed(dialect, answer.status_code, answer.json())
        assert answer.headers["content-type"].partition(";")[0] == "text/event-stream"
        assert "\ufffd" not in answer.text
        events = list(events_of(answer.text))
        match dialect:
            case "chat":
                return joined_chat(events)
            case "messages":
                return whole("messages", joined_message(events))
            case "responses":
                return whole("responses", joined_response(events))

    # --- the SDKs ----------------------------------------------------------------------------------------------------

    def _sdk(self, dialect: Dialect, body: Mapping[str, Any], mode: Literal["whole", "stream"]) -> Outcome:
        try:
            match dialect, mode:
                case "chat", "whole":
                    return whole("chat", _dump(self.openai.chat.completions.create(**for_openai(body))))
                case "chat", "stream":
                    return self._chat_stream(body)
                case "messages", "whole":
                    return whole("messages", _dump(self.anthropic.messages.create(**for_anthropic(body))))
                case "messages", "stream":
                    with self.anthropic.messages.stream(**for_anthropic(body)) as stream:
                        return whole("messages", _dump(stream.get_final_message()))
                case "responses", "whole":
                    return whole("responses", _dump(self.openai.responses.create(**for_openai(body))))
                case _:
                    with self.openai.responses.stream(**for_openai(body)) as stream:
                        *_, last = stream  # its get_final_response does not know answers that were cut
                        return whole("responses", _dump(last)["response"])
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            return failed(dialect, error.status_code, error.response.json())

    def _chat_stream(self, body: Mapping[str, Any]) -> Outcome:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(self.openai.chat.completions.create(**for_openai(body), **options))
        return joined_chat([json.dumps(_dump(chunk)) for chunk in chunks] + ["[DONE]"])


def _dump(model: Any) -> dict[str, Any]:
    return model.to_dict(mode="json", warnings=False)
