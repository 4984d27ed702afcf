"""What can be refused of a request that its model does not take up yet: known before the status line, not after it."""

import asyncio

from gateway.ports import Generator
from protocol.failures import Failure, FailureKind
from protocol.generation import Check, Checked, Failed, Generate, Warm
from protocol.ids import ModelName, RequestId

_OF_THE_REQUEST = frozenset({FailureKind.INVALID_REQUEST, FailureKind.UNSUPPORTED, FailureKind.CONTEXT_LENGTH_EXCEEDED})
"""What the model would say again when the request's turn has come; anything else may be over by then."""


async def checked_early(generator: Generator, model: ModelName, work: tuple[Generate | Warm, ...]) -> Failure | None:
    """Why one of these prompts will be refused; None when none will. Returns only when that is known: cancel it."""
    prompts: set[int] = set()
    for command in work:
        if not isinstance(command, Generate) or id(command.prompt) in prompts:
            continue
        prompts.add(id(command.prompt))
        check = Check(request_id=RequestId(f"{command.request_id}.check"), generate=command)
        reply = generator.submit(model, check)
        try:
            async for event in reply:
                match event:
                    case Checked():
                        break
                    case Failed(failure=failure) if failure.kind in _OF_THE_REQUEST:
                        return failure
                    case Failed():
                        await asyncio.Event().wait()  # nothing is known, and nothing will be
                    case _:
                        continue
        finally:
            reply.cancel()
    return None
