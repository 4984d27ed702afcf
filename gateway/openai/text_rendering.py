"""A worker's events → the bytes of the legacy completions route. Decides only; built as `chat_rendering` is."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from gateway.answer_parts import Collected
from gateway.error_answers import openai_error_body
from gateway.event_bytes import DONE, data_event
from gateway.in_flight import RequestView
from gateway.openai.answers import TextChoice, TextCompletion, UsageObject
from gateway.openai.envelope import AnswerStyle, Envelope, details, end_reason, usage_of
from gateway.openai.logprobs import Offsets, legacy_logprobs
from gateway.openai.prompt_progress import prompt_progress
from gateway.waiting_comment import waiting_comment
from protocol.failures import Failure
from protocol.generation import Delta, Finished, Prefilling, RequestEvent

_MARK = "\0text\0"
_encode = msgspec.json.Encoder().encode


class TextRendering:
    """One legacy answer. A stream of it ends with `[DONE]`, or with an error and without it."""

    def __init__(self, envelope: Envelope, style: AnswerStyle) -> None:
        self._envelope = envelope
        self._style = style
        self._no_usage: UnsetType | None = None if style.usage == "asked" else UNSET
        self._halves = [_halves(self._chunk(TextChoice(index=index, text=_MARK))) for index in range(style.choices)]
        self._offsets = [Offsets() for _ in range(style.choices)]
        self._ends: dict[int, Finished] = {}

    def opening(self) -> bytes:
        """Nothing but the prompts, for who wants them back: this route's stream begins with its text."""
        echoes = [(choice, self._style.echo_of(choice)) for choice in range(self._style.choices)]
        return b"".join(_event(self._chunk(TextChoice(index=choice, text=text))) for choice, text in echoes if text)

    def encode(self, event: RequestEvent, choice: int) -> bytes:
        """The bytes that this event adds to the stream, perhaps none."""
        match event:
            case Delta(text=text, logprobs=()):
                head, tail = self._halves[choice]
                return head + _encode(text) + tail if text else b""
            case Delta():
                logprobs = legacy_logprobs(event.logprobs, self._offsets[choice], self._style.top_logprobs)
                return _event(self._chunk(TextChoice(index=choice, text=event.text, logprobs=logprobs)))
            case Finished():
                self._ends[choice] = event
                last = self._chunk(TextChoice(index=choice, text="", finish_reason=end_reason(event.reason)))
                is_the_end = len(self._ends) == self._style.choices and self._style.usage == "unasked"
                return _event(replace(last, mlxd=details(self._envelope, self._in_order())) if is_the_end else last)
            case _:  # nothing that this API has a word for
                return b""

    def progress(self, event: Prefilling, prefill_seconds: float) -> bytes:
        """A chunk that says only how far the prompt is, for who asked for it."""
        if self._style.progress == "unasked":
            return b""
        done = prompt_progress(event, prefill_seconds=prefill_seconds)
        return _event(replace(self._chunk(TextChoice(text="")), prompt_progress=done))

    def keepalive(self, view: RequestView) -> bytes:
        """A comment line."""
        return waiting_comment(view)

    def failed(self, failure: Failure) -> bytes:
        """The error event that SDKs raise on."""
        return data_event(openai_error_body(failure))

    def closing(self) -> bytes:
        """The bill, if it was asked for, and the mark of a whole stream."""
        if self._style.usage == "unasked":
            return DONE
        ends = self._in_order()
        usage = usage_of(ends, self._style.choices_per_prompt)
        bill = replace(self._chunk(TextChoice(text="")), choices=[], usage=usage)
        return _event(replace(bill, mlxd=details(self._envelope, ends))) + DONE

    def whole(self, answers: Sequence[Collected]) -> bytes:
        """The whole answer."""
        ends = [answer.end for answer in answers if isinstance(answer.end, Finished)]
        completion = self._completion(
            [
                TextChoice(
                    index=index,
                    text=self._style.echo_of(index) + answer.text,
                    logprobs=None
                    if self._style.top_logprobs is None
                    else legacy_logprobs(answer.logprobs, Offsets(), self._style.top_logprobs),
                    finish_reason=end_reason(end.reason),
                )
                for index, (answer, end) in enumerate(zip(answers, ends, strict=True))
            ],
            usage_of(ends, self._style.choices_per_prompt),
        )
        return _encode(replace(completion, mlxd=details(self._envelope, ends)))

    def _in_order(self) -> list[Finished]:
        return [end for _, end in sorted(self._ends.items())]

    def _chunk(self, choice: TextChoice) -> TextCompletion:
        return self._completion([choice], self._no_usage)

    def _completion(self, choices: list[TextChoice], usage: UsageObject | UnsetType | None) -> TextCompletion:
        return TextCompletion(
            id=self._envelope.id,
            created=self._envelope.created,
            model=self._envelope.model,
            system_fingerprint=self._envelope.system_fingerprint,
            choices=choices,
            usage=usage,
        )


def _halves(chunk: TextCompletion) -> tuple[bytes, bytes]:
    head, _, tail = _event(chunk).rpartition(_encode(_MARK))
    return head, tail


def _event(chunk: TextCompletion) -> bytes:
    return data_event(_encode(chunk))
