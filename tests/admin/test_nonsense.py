"""Whatever is sent to whichever route, and whatever is done with what was made: no answer is a 5xx, each is as the OpenAPI
document says, and says why. `make fuzz-admin CASES=20000` plays more.
"""

from __future__ import annotations

import random

import pytest

from tests.admin.fuzz import DOCUMENT, Fuzz, play
from tests.admin.office import Office

#: Of each seed; together with those on Postgres more than 5,000.
CASES = 2_400


@pytest.mark.parametrize("seed", range(2))
async def test_no_nonsense_is_our_fault(it: Office, seed: int) -> None:
    seen = await play(it, Fuzz(random.Random(seed)), CASES)
    done = {operation for operation, status in seen if status < 400}
    operations = {op["operationId"] for methods in DOCUMENT["paths"].values() for op in methods.values()}
    assert len(done) > len(operations) * 3 // 4, sorted(operations - done)


async def test_nor_is_it_on_postgres(on: Office) -> None:
    seen = await play(on, Fuzz(random.Random(2)), 300)
    assert sum(count for (_, status), count in seen.items() if status < 400) > 100


def test_what_is_made_leads_to_what_reads_changes_and_deletes_it() -> None:
    made = DOCUMENT["paths"]["/admin/v1/keys"]["post"]["responses"]["201"]["links"]
    assert made["revoke_key"] == {
        "operationId": "revoke_key",
        "parameters": {"key_id": "$response.body#/key_id"},
    }
    linked = [
        path
        for path, methods in DOCUMENT["paths"].items()
        if "links" in str(methods.get("post", {}).get("responses", {}))
    ]
    assert [path.rpartition("/")[2] for path in linked] == [
        *("tenants", "teams", "keys", "admin_keys", "budgets", "tasks"),
        *("providers", "credentials", "deployments", "tiers", "rules", "virtual_models"),
        *("prices", "webhooks"),
    ]
