# pyright: basic
"""Streamed chat answers as a reader sees them: when each piece of text came, and how many tokens came by a moment."""

import itertools
import json
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer

from tests.bench.servers import BenchFailed, Server

REQUEST_SECONDS = 600.0
_POLL_SECONDS = 0.005


class TokenCounter:
    """How many tokens a text is for the served model. Chunks do not tell: a server may put several tokens into one."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


class Stream:
    """A streamed answer, greedy, read by a thread of its own from the moment on that this is made.

    `latency_class` is asked for in mlxd's header, and a server that grants another is an error. Every server is asked
    to go on past the model's end (`ignore_eos`); some know no such thing.
    """

    def __init__(self, server: Server, messages: Any, max_tokens: int, *, latency_class: str = "") -> None:
        self._server = server
        self._latency_class = latency_class
        self._body = {
            "model": server.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # An empty context, for plain HTTP needs none and reading the system's certificates takes a moment.
        self._client = httpx.Client(
            timeout=REQUEST_SECONDS, trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        )
        self.arrivals: list[float] = []
        self.texts: list[str] = []
        self.completion_tokens = 0
        self.ended: float | None = None
        self.error = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.started = time.perf_counter()
        self._thread.start()

    @property
    def first_token_seconds(self) -> float:
        return self.first_arrival - self.started

    @property
    def first_arrival(self) -> float:
        if not self.arrivals:
            raise BenchFailed(f"{self._server.name}: a stream brought no text: {self.error or 'it just ended'}")
        return self.arrivals[0]

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Each as its beginning and its end."""
        arrivals = tuple(self.arrivals)
        return list(itertools.pairwise(arrivals))

    def wait(self) -> "Stream":
        """Until its end. Raises BenchFailed when that was an error."""
        self._thread.join(REQUEST_SECONDS)
        if self.error or self.ended is None:
            raise BenchFailed(f"{self._server.name}: a stream failed: {self.error or 'it never ended'}")
        return self

    def stop(self) -> None:
        """Leave it; what came stays."""
        self._stop.set()
        self._thread.join(REQUEST_SECONDS)

    def until(self, pieces: int, after: float = 0.0) -> None:
        """Until so many pieces came after that moment. Raises BenchFailed when it ends before."""
        deadline = time.monotonic() + REQUEST_SECONDS
        while sum(at > after for at in tuple(self.arrivals)) < pieces:
            if self.ended is not None or time.monotonic() > deadline:
                text = f"a stream ended too soon, after {len(self.arrivals)} pieces"
                raise BenchFailed(f"{self._server.name}: {text}: {self.error or 'as the model wanted'}")
            time.sleep(_POLL_SECONDS)  # the other thread reads

    def tokens_until(self, moment: float, counter: TokenCounter) -> float:
        """Tokens of the text that had come by then. By the server's own count of all, when it told one."""
        came = sum(at <= moment for at in tuple(self.arrivals))
        counted = counter.count("".join(self.texts[:came]))
        whole = counter.count("".join(self.texts))
        if self.completion_tokens and whole:
            return counted * self.completion_tokens / whole
        return float(counted)

    def _run(self) -> None:
        headers = {"x-mlxd-class": self._latency_class} if self._latency_class else {}
        url = f"{self._server.base_url}/chat/completions"
        try:
            with self._client, self._client.stream("POST", url, json=self._body, headers=headers) as response:
                if response.status_code != 200:
                    self.error = f"{response.status_code} {response.read()[:400]!r}"
                    return
                granted = response.headers.get("x-mlxd-class", "")
                if self._latency_class and granted != self._latency_class:
                    self.error = f"asked for class {self._latency_class}, got {granted!r}"
                    return
                for line in response.iter_lines():
                    self._take(line, time.perf_counter())
                    if self._stop.is_set() or line == "data: [DONE]":
                        return
        except (httpx.HTTPError, ValueError) as why:
            self.error = f"{type(why).__name__}: {why}"
        finally:
            self.ended = time.perf_counter()

    def _take(self, line: str, now: float) -> None:
        if not line.startswith("data: {"):
            return
        event = json.loads(line[6:])
        if "error" in event:
            self.error = str(event["error"])[:400]
        if event.get("usage"):
            self.completion_tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            if text:
                self.texts.append(text)
                self.arrivals.append(now)


def chat(text: str) -> Any:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]
