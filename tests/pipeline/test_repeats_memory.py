"""What was refused is found by its bytes for a second; after that nobody's bytes are looked at for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from gateway.core.catalog import Operation
from gateway.core.entry import Refused
from gateway.core.errors import BudgetExceeded
from gateway.core.identity import Caller
from gateway.pipeline.repeats import TTL_S, Repeats
from gateway.ports import Incoming
from tests.support.small_world import key_record


class Headers(dict[str, str]):
    """Counts how often they are looked through, as they are where a request is hashed."""

    looked_at = 0

    def items(self) -> Iterator[tuple[str, str]]:  # type: ignore[override]
        self.looked_at += 1
        return iter(super().items())


def incoming(headers: Mapping[str, str], body: bytes = b"{}") -> Incoming:
    key = key_record()
    caller = Caller(key.tenant_id, key.team_id, key.key_id, key)
    return Incoming("req", Operation.CHAT, caller, headers, body, "", None)


REFUSED = BudgetExceeded(
    "no", scope="task:t", refused=Refused("task:t", 1, 1, 0, None, state="paused_budget")
)


def test_a_refusal_is_told_again_for_a_second_and_until_something_changes() -> None:
    repeats = Repeats()
    repeats.add(incoming({"a": "b"}), REFUSED, None, changes=1, now_s=10.0)
    told = repeats.find(incoming({"a": "b"}), 1, 10.5)
    assert told is not None
    with pytest.raises(BudgetExceeded):
        told.again()
    assert repeats.find(incoming({"a": "c"}), 1, 10.5) is None
    assert repeats.find(incoming({"a": "b"}, b"{ }"), 1, 10.5) is None
    assert repeats.find(incoming({"a": "b"}), 1, 10.0 + TTL_S) is None
    repeats.add(incoming({"a": "b"}), REFUSED, None, changes=1, now_s=20.0)
    assert repeats.find(incoming({"a": "b"}), 2, 20.1) is None


def test_once_it_is_over_requests_are_not_looked_through_any_more() -> None:
    repeats, headers = Repeats(), Headers(a="b")
    assert repeats.find(incoming(headers), 1, 0.0) is None
    assert headers.looked_at == 0
    repeats.add(incoming({"other": "request"}), REFUSED, None, changes=1, now_s=10.0)
    assert repeats.find(incoming(headers), 1, 10.9) is None
    assert headers.looked_at == 1
    assert repeats.find(incoming(headers), 1, 10.0 + TTL_S) is None
    assert headers.looked_at == 1
