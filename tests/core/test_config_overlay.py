"""Documents over files, as values: their order, what names what, and how they look in a file."""

from __future__ import annotations

import pytest

from gateway.core.config_overlay import (
    Document,
    Documents,
    Kind,
    Stored,
    Write,
    exported,
    patched,
    rules_around,
    users,
    written,
)

LOCAL = Document(Kind.PROVIDER, "local", {"base_url": "http://127.0.0.1:8000/v1", "credential": "shared"}, 2)
SHARED = Document(Kind.CREDENTIAL, "shared", {"env": "LOCAL_API_KEY"})
LLAMA = Document(Kind.DEPLOYMENT, "local/llama", {"provider": "local", "model": "llama", "price": "none"})
OTHER = Document(Kind.DEPLOYMENT, "other/m", {"provider": "other", "model": "m"})


def rules(*orders: int | None) -> Documents:
    bodies: list[dict[str, object]] = [{} if order is None else {"order": order} for order in orders]
    return tuple(Document(Kind.RULE, f"r{n}", {"tier": "small", **body}) for n, body in enumerate(bodies))


def test_rules_stand_around_those_of_the_file_by_order_and_then_by_name() -> None:
    before, behind = rules_around(rules(None, -1, 0, -5, 100, 7, -1))
    assert [d.name for d in before] == ["r3", "r1", "r6"]
    assert [d.name for d in behind] == ["r2", "r5", "r0", "r4"]


def test_what_names_what() -> None:
    documents = (SHARED, LOCAL, LLAMA, OTHER)
    assert users(documents, SHARED.key) == [LOCAL.key]
    assert users(documents, LOCAL.key) == [LLAMA.key]
    assert users(documents, LLAMA.key) == []


def test_writes_leave_the_rest_and_the_order_is_one() -> None:
    documents = (LOCAL, SHARED, LLAMA)
    after = written(
        documents,
        [
            Write(LLAMA.key, None, 2),
            Write(OTHER.key, OTHER.body, 1, made=True),
            Write(LOCAL.key, {"base_url": "x"}, 3),
        ],
    )
    assert after == (SHARED, Document(Kind.PROVIDER, "local", {"base_url": "x"}, 3), OTHER)
    assert written(reversed(documents), []) == written(documents, []) == (SHARED, LOCAL, LLAMA)
    with pytest.raises(ValueError, match="deleted"):
        Write(LLAMA.key, None, 2, made=True)


def test_a_patch_replaces_fields_whole_and_null_takes_them_away() -> None:
    before = {"a": {"x": 1, "y": 2}, "b": 1, "c": 1}
    assert patched(before, {"a": {"x": 3}, "b": None, "d": None, "e": 0}) == {"a": {"x": 3}, "c": 1, "e": 0}


def test_versions_go_on_over_a_deletion() -> None:
    stored = Stored(7, (LOCAL,), {LOCAL.key: 2, LLAMA.key: 5})
    assert [stored.next_version(key) for key in (LOCAL.key, LLAMA.key, OTHER.key)] == [3, 6, 1]
    assert (stored.find(LOCAL.key), stored.find(LLAMA.key)) == (LOCAL, None)


def test_what_is_exported_has_the_shape_of_a_file() -> None:
    small = Document(Kind.TIER, "small", {"fallbacks": ["fast"], "default": True})
    quick = Document(Kind.VIRTUAL_MODEL, "quick", {"otherwise": "small"})
    assert exported((*rules(None, -1), LLAMA, OTHER, LOCAL, SHARED, small, quick)) == {
        "credentials": {"shared": {"env": "LOCAL_API_KEY"}},
        "providers": {
            "local": {
                "base_url": "http://127.0.0.1:8000/v1",
                "credential": "shared",
                "deployments": [{"name": "local/llama", "model": "llama", "price": "none"}],
            },
            "other": {"deployments": [{"name": "other/m", "model": "m"}]},
        },
        "default_tier": "small",
        "fallbacks": {"small": ["fast"]},
        "virtual_models": {"quick": {"otherwise": "small"}},
        "rules": [{"name": "r1", "tier": "small"}, {"name": "r0", "tier": "small"}],
    }
