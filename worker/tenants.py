"""How much of the device each tenant had, so that inside a class they share it fairly. Pure."""

from collections import OrderedDict
from collections.abc import Callable

_REMEMBERED = 1024


class TenantBooks:
    """Device seconds by tenant. Who was away has no claim on the time he was not there."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, float] = OrderedDict()
        self._present: dict[str, int] = {}

    def arrived(self, tenant: str) -> None:
        """One more request of this tenant is there."""
        if tenant not in self._present:
            served = max(self._served.get(tenant, 0.0), self._least())
            self._served[tenant] = served
            self._served.move_to_end(tenant)
            while len(self._served) > _REMEMBERED and (oldest := next(iter(self._served))) not in self._present:
                del self._served[oldest]
        self._present[tenant] = self._present.get(tenant, 0) + 1

    def left(self, tenant: str) -> None:
        """One request of this tenant is gone."""
        if self._present[tenant] > 1:
            self._present[tenant] -= 1
        else:
            del self._present[tenant]

    def charge(self, tenant: str, seconds: float) -> None:
        self._served[tenant] += seconds

    def leads(self) -> Callable[[str], float]:
        """By how many seconds a tenant that is there had more than the one that had least, as of now."""
        least = self._least()
        return lambda tenant: self._served[tenant] - least

    def _least(self) -> float:
        return min((self._served[tenant] for tenant in self._present), default=0.0)
