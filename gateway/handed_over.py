"""What the gateway itself says of a request beside its worker's events. Decides only."""

from msgspec import Struct

from protocol.ids import RequestId


class HandedOver(Struct, frozen=True, kw_only=True):
    """Its model is loaded and that process has it now. For who watches the request, not for its client."""

    request_id: RequestId
