"""How a part of a translation says that a request cannot be served, and which field is at fault. Pure."""

from protocol.failures import Failure, FailureKind


class Refusal(Exception):
    """Carries a Failure out of a nested translation; its top level gives that back as a value."""

    def __init__(self, kind: FailureKind, param: str, message: str) -> None:
        super().__init__()
        self.failure = Failure(kind=kind, message=f"`{param}`: {message}", param=param)


def invalid(param: str, message: str) -> Refusal:
    """The field is wrong. `message` says how, and what to do next."""
    return Refusal(FailureKind.INVALID_REQUEST, param, message)


def unsupported(param: str, message: str) -> Refusal:
    """The field asks for what cannot be had here. `message` says what to do instead."""
    return Refusal(FailureKind.UNSUPPORTED, param, message)
