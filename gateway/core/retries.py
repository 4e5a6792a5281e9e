"""How many attempts may be tried again: a share of the traffic, so that a provider in trouble gets no more of it.

Each request adds a tenth of a retry to its provider's account; each retry, and each failover from elsewhere, takes a
whole one from the account of the provider that gets it. A few are there from the start and grow back with time, for those with
little traffic (Envoy's and Finagle's retry budgets, read November 2026).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

SHARE = 0.1
LEAST = 5.0
MOST = 50.0
#: Below `LEAST` an account grows by one in so many seconds without any traffic.
GROWS_BACK_S = 10.0
_ACCOUNTS_MAX = 1_000
_SLACK = 1e-9  # ten tenths are a whole


@dataclass(frozen=True, slots=True)
class Account:
    left: float = LEAST
    at_s: float = 0.0

    def at(self, now_s: float, grows_back_s: float) -> Account:
        if self.left >= LEAST:
            return Account(self.left, now_s)
        return Account(min(LEAST, self.left + max(0.0, now_s - self.at_s) / grows_back_s), now_s)


class RetryBudget:
    """One account per name of a provider. Bounded, without IO; of one process, unless processes share it
    (`storage.redis_retries`).
    """

    def __init__(self, *, grows_back_s: float = GROWS_BACK_S) -> None:
        self._grows_back_s = grows_back_s
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self.refused = 0  # retries that were not made for want of budget

    def asked(self, name: str) -> None:
        """A request is about to make its first attempt."""
        account = self._accounts.get(name)
        if account is None:
            self._accounts[name] = Account(LEAST + SHARE, 0.0)
            if len(self._accounts) > _ACCOUNTS_MAX:
                self._accounts.popitem(last=False)
        elif account.left < MOST:
            self._accounts[name] = Account(account.left + SHARE, account.at_s)

    def take(self, name: str, now_s: float) -> bool:
        """One retry, if there is one."""
        account = self._accounts.get(name, Account()).at(now_s, self._grows_back_s)
        if account.left < 1.0 - _SLACK:
            self._accounts[name] = account
            self.refused += 1
            return False
        self._accounts[name] = Account(account.left - 1.0, now_s)
        return True

    def left(self, name: str) -> float:
        return self._accounts.get(name, Account()).left

    def names(self) -> tuple[str, ...]:
        return tuple(self._accounts)

    def set_left(self, name: str, left: float, now_s: float) -> None:
        """What others have taken or brought is counted in; less than nothing is owed."""
        self._accounts[name] = Account(left, now_s)
