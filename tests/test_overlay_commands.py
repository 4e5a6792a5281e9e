"""`check`, `doctor`, `explain --request` and `config export` with what was written over the admin API."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.core.config_overlay import Kind, Write
from gateway.settings import load
from gateway.storage import documents
from gateway.storage.database import open_database
from tests.test_cli import Tollhouse, config, findings, fresh_database, migrated, tollhouse

__all__ = ["config", "fresh_database", "migrated", "tollhouse"]
LOCAL = Write((Kind.PROVIDER, "local"), {"base_url": "http://127.0.0.1:8000/v1"}, 1, made=True)
LLAMA = Write(
    (Kind.DEPLOYMENT, "local/llama"), {"provider": "local", "model": "llama", "price": "none"}, 4, made=True
)
RULE = Write((Kind.RULE, "first"), {"when": "task.step < 3", "tier": "standard", "order": -1}, 1, made=True)
LOST = Write((Kind.CREDENTIAL, "lost"), {"env": "NOBODY_SETS_THIS_API_KEY"}, 1, made=True)


@pytest.fixture
def put(migrated: Tollhouse, config: Path) -> Any:
    """Into the database, as the admin API would after its checks."""

    def put(*writes: Write) -> None:
        async def act() -> None:
            database = open_database(load(config, {}).database_url)
            stamp = await database.read(documents.stamp)
            await database.write(partial(documents.write, "test", stamp, writes))
            await database.close()

        asyncio.run(act())

    return put


def test_check_and_explain_show_both(migrated: Tollhouse, config: Path, put: Any) -> None:
    assert migrated("check", "--json").json["overlay"] == {"documents": [], "shadowed": {}, "unread": ""}
    put(LOCAL, LLAMA, RULE)
    config.write_text(config.read_text() + "rules:\n  - {name: first, when: task.step < 2, tier: standard}\n")
    said = migrated("check", "--json").json
    assert [d["name"] for d in said["deployments"]] == ["local/llama"]
    assert said["overlay"] == {
        "documents": [
            {"kind": "provider", "name": "local", "version": 1},
            {"kind": "deployment", "name": "local/llama", "version": 4},
            {"kind": "rule", "name": "first", "version": 1},
        ],
        "shadowed": {"rule first": f"{config}:5"},
        "unread": "",
    }
    assert "deployment local/llama: admin API, version 4" in migrated("check").out
    request = config.parent / "request.json"
    request.write_text('{"model": "auto", "messages": [{"role": "user", "content": "hi"}]}')
    explained = migrated("explain", "--request", str(request), "--json").json
    assert [c["deployment"] for c in explained["candidates"]] == ["local/llama"]


def test_what_cannot_be_used_here_is_told_by_check_and_doctor(migrated: Tollhouse, put: Any) -> None:
    put(LOST)
    problem = (
        "admin API: credential lost: env: the environment variable NOBODY_SETS_THIS_API_KEY is not set "
        "(set it where the gateway runs)"
    )
    said = migrated("check")
    assert (said.status, said.err.splitlines()[0]) == (2, problem)
    assert findings(migrated("doctor", "--json"))["admin API"] == ("fail", problem)


def test_what_is_exported_is_a_configuration(migrated: Tollhouse, config: Path, put: Any) -> None:
    assert migrated("config", "export").err == "nothing was written over the admin API\n"
    put(LOCAL, LLAMA, RULE)
    said = migrated("config", "export")
    assert "# These rules go before the file's own: first" in said.out
    assert yaml.safe_load(said.out) == {
        "providers": {
            "local": {
                "base_url": "http://127.0.0.1:8000/v1",
                "deployments": [{"name": "local/llama", "model": "llama", "price": "none"}],
            }
        },
        "rules": [{"name": "first", "when": "task.step < 3", "tier": "standard"}],
    }
    config.write_text(config.read_text() + said.out)
    found = migrated("check", "--json").json
    assert [d["name"] for d in found["deployments"]] == ["local/llama"]
    assert sorted(found["overlay"]["shadowed"]) == ["deployment local/llama", "provider local", "rule first"]
    assert findings(migrated("doctor", "--json"))["admin API"][0] == "warn"
