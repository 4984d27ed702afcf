"""What carries a Failure out of a nested translation; caught where the translation began."""

from protocol.failures import Failure, FailureKind


class Refusal(Exception):
    """The request cannot be done, for the reason in `failure`."""

    def __init__(self, kind: FailureKind, param: str, message: str) -> None:
        super().__init__()
        self.failure = Failure(kind=kind, message=f"`{param}`: {message}", param=param)


def invalid(param: str, message: str) -> Refusal:
    """A mistake of the client's in this field."""
    return Refusal(FailureKind.INVALID_REQUEST, param, message)


def unsupported(param: str, message: str) -> Refusal:
    """Something that the API has and this server, or this model, has not."""
    return Refusal(FailureKind.UNSUPPORTED, param, message)
