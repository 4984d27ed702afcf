"""How much of the device each tenant had, so that inside a class they share it fairly. Pure."""

from collections import OrderedDict
from collections.abc import Callable

_REMEMBERED = 1024


class TenantBooks:
    """Device seconds by tenant, each divided by its weight. Who was away has no claim on the time he was not there."""

    def __init__(self) -> None:
        self._served: OrderedDict[str, float] = OrderedDict()
        self._present: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    def arrived(self, tenant: str, weight: float = 1.0) -> None:
        """One more request of this tenant is there. Its latest `weight` counts from now on: of 2, it gets twice as much
        as one of 1."""
        self._weights[tenant] = weight
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
            del self._present[tenant], self._weights[tenant]

    def charge(self, tenant: str, seconds: float) -> None:
        self._served[tenant] += seconds / self._weights.get(tenant, 1.0)

    def leads(self) -> Callable[[str], float]:
        """By how many weighted seconds a tenant that is there had more than the one that had least, as of now."""
        least = self._least()
        return lambda tenant: self._served[tenant] - least

    def _least(self) -> float:
        return min((self._served[tenant] for tenant in self._present), default=0.0)
