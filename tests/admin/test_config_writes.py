"""Configuration is written over the API: tried whole before it is written, laid over what files say, never half done."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway import settings
from tests.admin.office import Office

LOCAL = {"name": "local", "base_url": "http://127.0.0.1:8000/v1", "credential": "shared"}
SHARED = {"name": "shared", "env": "LOCAL_API_KEY"}
LLAMA = {
    "provider": "local",
    "model": "llama",
    "tier": "fast",
    "price": {"input_usd_per_mtok": "0.1", "output_usd_per_mtok": "0.4"},
}
EARLY = {"name": "early", "when": "task.step < 3", "tier": "fast", "order": -10}
NOWHERE = dict.fromkeys(("source", "version", "created_at", "updated_at", "document"))


def written(row: dict[str, Any], version: int, **document: Any) -> dict[str, Any]:
    """A reply without its times."""
    return {
        **{name: value for name, value in row.items() if name not in ("created_at", "updated_at")},
        "source": {"file": f"admin API, version {version}", "line": None},
        "version": version,
        "document": document,
    }


async def made(it: Office, path: str, body: Any) -> Any:
    status, found = await it.ask("POST", path, body)
    assert status == 201, found
    return found


async def everything(it: Office) -> None:
    for path, body in (
        ("/credentials", SHARED),
        ("/providers", LOCAL),
        ("/deployments", LLAMA),
        ("/rules", EARLY),
    ):
        await made(it, path, body)


async def test_a_provider_its_credential_a_deployment_a_tier_and_a_rule_are_made_read_changed_and_deleted(
    on: Office,
) -> None:
    credential = await made(on, "/credentials", SHARED)
    row: dict[str, Any] = {"name": "shared", "present": True, "providers": [], **NOWHERE}
    assert credential == {
        **written(row, 1, env="LOCAL_API_KEY"),
        "created_at": credential["created_at"],
        "updated_at": credential["created_at"],
    }
    provider = await made(on, "/providers", LOCAL)
    assert (provider["deployments"], provider["credential"], provider["source"]["file"]) == (
        [],
        "shared",
        "admin API, version 1",
    )
    deployment = await made(on, "/deployments", LLAMA)
    assert {name: deployment[name] for name in ("name", "tier", "price", "weight", "health")} == {
        "name": "local/llama",
        "tier": "fast",
        "price": "own:local/llama",
        "weight": 100,
        "health": "closed",
    }
    tier = await made(on, "/tiers", {"name": "small", "fallbacks": ["standard"]})
    assert (tier["fallbacks"], tier["default"], tier["deployments"]) == (["standard"], False, ["mini-eu"])
    rule = await made(on, "/rules", EARLY)
    assert (rule["position"], rule["target"]) == (1, "fast"), "before the file's own"

    # What is shown is in force, and where it is configured is said of each.
    path = "/deployments/local/llama"
    assert (await on.told("GET", path))[:2] == (200, deployment)
    assert (await on.ask("GET", "/deployments/local%2Fllama"))[1] == deployment
    _, rules = await on.ask("GET", "/rules")
    places = [(r["name"], r["source"]["file"].rpartition("/")[2], r["source"]["line"]) for r in rules["data"]]
    assert places == [("early", "admin API, version 1", None), ("late", "gateway.yaml", 10)]
    assert on.settings.catalog.by_model["llama"][0].provider.credential == "shared"

    _, _, told = await on.told("GET", path)
    stale = {"If-Match": '"stale"'}
    assert (await on.ask("PATCH", path, {"weight": 5}, headers=stale))[0] == 412
    seen = {"If-Match": told["ETag"]}
    status, patched = await on.ask("PATCH", path, {"weight": 5, "price": "none"}, headers=seen)
    document = {"provider": "local", "model": "llama", "tier": "fast", "price": "none", "weight": 5}
    assert (status, patched["document"], patched["version"], patched["weight"], patched["price"]) == (
        200,
        document,
        2,
        5,
        "",
    )
    assert (await on.ask("PATCH", path, {"weight": None}, headers=seen))[0] == 412
    assert (await on.ask("PATCH", path, {"weight": None}))[1]["weight"] == 100

    for used, by in (
        ("/credentials/shared", "credential shared is in use: provider local."),
        ("/providers/local", "provider local is in use: deployment local/llama."),
        (
            path,
            "deployment local/llama is in use: admin API: rule early: tier: no deployment is in tier fast.",
        ),
    ):
        status, problem = await on.ask("DELETE", used)
        assert (status, problem["detail"]) == (409, by)
    for gone in ("/rules/early", path, "/providers/local", "/credentials/shared", "/tiers/small"):
        assert (await on.ask("DELETE", gone))[0] == 200
    assert (await on.ask("GET", path))[0] == 404
    assert (await on.ask("GET", "/configuration"))[1] == {
        "data": [],
        "has_more": False,
        "next_cursor": None,
        "in_force": True,
        "trouble": "",
    }
    # A version goes on where it was.
    await made(on, "/credentials", SHARED)
    assert (await on.ask("GET", "/credentials/shared"))[1]["version"] == 3
    _, trail = await on.ask("GET", "/audit?subject=deployment:local/llama")
    assert [(e["actor"], e["action"], e["body"]["version"]) for e in trail["data"]] == [
        ("admin", "deployment.delete", 4),
        ("admin", "deployment.change", 3),
        ("admin", "deployment.change", 2),
        ("admin", "deployment.create", 1),
    ]
    assert trail["data"][2]["body"]["deployment"] == document


@pytest.mark.parametrize(
    ("path", "body", "field", "message"),
    [
        ("/providers", {**LOCAL, "credential": "nobody"}, "credential", "there is no credential 'nobody'"),
        ("/providers", {**LOCAL, "base_url": "http://a:b@c/v1"}, "base_url", "must not hold a user name"),
        ("/providers", {**LOCAL, "base_url": "http://169.254.169.254/v1"}, "base_url", "a cloud's own services"),
        ("/providers", {**LOCAL, "base_url": "http://${HOME}/v1"}, "base_url", "variables of the environment"),
        ("/providers", {**LOCAL, "models": ["large"]}, "models", "local has no listed model 'large'"),
        ("/providers", {**LOCAL, "wier": "openai"}, "wier", "Extra inputs are not permitted"),
        ("/providers", {**LOCAL, "timeouts": {"idle_s": 0.001}}, "timeouts.idle_s", "must be a number from 0.01"),
        ("/providers", {**LOCAL, "litellm_params": {"api_key": "x"}}, "body", "litellm_params.api_key: secrets"),
        ("/credentials", {"name": "x", "key": "sk-1234567890"}, "body", "key: secrets are not kept here"),
        ("/credentials", {"name": "x"}, "body", "does not say where the secret is"),
        ("/credentials", {"name": "x", "env": "OTHER_API_KEY"}, "env", "OTHER_API_KEY is not set"),
        ("/credentials", {"name": "x", "env": "TOLLHOUSE_ADMIN_KEY"}, "env", "may not be named here"),
        ("/credentials", {"name": "x", "env": "HOME"}, "env", "may not be named here"),
        ("/credentials", {"name": "x", "file": "/etc/passwd"}, "file", "no folder of secrets is configured"),
        ("/credentials", {"name": "acme", "env": "LOCAL_API_KEY"}, "body", "the key of provider acme"),
        ("/deployments", {**LLAMA, "provider": "nobody"}, "provider", "there is no provider 'nobody'"),
        ("/deployments", {**LLAMA, "price": "acme/lerge"}, "price", "did you mean acme/large?"),
        ("/deployments", {"provider": "acme", "model": "x"}, "price", "an unknown price is not zero"),
        ("/deployments", {**LLAMA, "price": {}}, "price.input_usd_per_mtok", "is required"),
        ("/deployments", {**LLAMA, "tier": "huge"}, "tier", "Input should be 'fast', 'standard' or 'small'"),
        ("/deployments", {**LLAMA, "queue": {"waiting_max": 5}}, "queue", "nobody waits where there is no limit"),
        ("/tiers", {"name": "small", "fallbacks": ["fast"]}, "fallbacks", "no other tier with a deployment"),
        ("/tiers", {"name": "fast", "default": True}, "default", "no deployment is in tier fast"),
        ("/rules", {"name": "r", "tier": "fast"}, "tier", "no deployment is in tier fast"),
        ("/rules", {"name": "r", "model": "lerge"}, "model", "there is no model 'lerge'"),
        ("/rules", {"name": "r", "when": "task.step > 5 &&\n  task.steps > 1", "tier": "small"}, "when",
         "line 2, column 8: task has no 'steps'"),
        ("/rules", {"name": "r", "when": "task.step > 50", "tier": "small"}, "when",
         "can never match, because rule 'late' before it matches whenever it would"),
        ("/virtual_models", {"name": "large"}, "body", "'large' is a model already"),
        ("/virtual_models", {"name": "round", "otherwise": "round"}, "body", "leads back to itself: round -> round"),
        ("/configuration/bulk", {}, "body", "give from 1 to 200 resources, not 0"),
        ("/configuration/bulk", {"providers": [LOCAL], "credentials": [SHARED, SHARED]}, "credentials.1.name",
         "credential shared is there twice"),
        ("/configuration/bulk", {"credentials": [SHARED], "providers": [LOCAL], "deployments":
         [LLAMA, {**LLAMA, "model": "x", "upstream_model": "y", "weight": 10_000, "price": "acme/lerge"}]},
         "deployments.1.price", "there is no listed price 'acme/lerge'"),
    ],
)  # fmt: skip
async def test_what_cannot_be_used_is_named_by_its_field_and_nothing_is_written(
    it: Office, path: str, body: Any, field: str, message: str
) -> None:
    if path == "/deployments" and body["provider"] == "local":
        await made(it, "/configuration/bulk", {"credentials": [SHARED], "providers": [LOCAL]})
    elif path == "/providers" and body["credential"] == "shared":
        await made(it, "/credentials", SHARED)
    before = await it.rows("SELECT * FROM config_document ORDER BY kind, name")
    status, problem = await it.ask("POST", path, body)
    assert (status, problem["errors"][0]["field"], message in problem["errors"][0]["message"]) == (
        422,
        field,
        True,
    ), problem
    assert "1234567890" not in str(problem)
    assert await it.rows("SELECT * FROM config_document ORDER BY kind, name") == before


async def test_what_a_file_declares_is_changed_there(it: Office) -> None:
    here = f"{it.settings.file}"
    for path, body, line in (
        ("/providers", {"name": "acme", "base_url": "http://127.0.0.1:2/v1"}, 3),
        ("/deployments", {**LLAMA, "provider": "acme", "name": "large-eu"}, 7),
        ("/rules", {"name": "late", "when": "task.step > 10", "tier": "small"}, 10),
    ):
        status, problem = await it.ask("POST", path, body)
        name = f"{path.strip('/')[:-1]} {body['name']}"
        assert (status, problem["detail"]) == (
            409,
            f"name: {name} is declared in {here}:{line}: change it there",
        )
        sent = {"/providers": {"bridge": True}, "/deployments": {"weight": 1}, "/rules": {"why": "x"}}[path]
        for method, wanted in (("PATCH", sent), ("DELETE", None)):
            status, problem = await it.ask(method, f"{path}/{body['name']}", wanted)
            # Before anything was written, the office shows a configuration without places.
            assert (status, "release" in problem["detail"]) == (409, True), problem

    await made(it, "/deployments", {**LLAMA, "provider": "acme", "upstream_model": "llama-3"})
    status, problem = await it.ask("PATCH", "/providers/acme", {"bridge": True})
    assert (status, problem["detail"]) == (
        409,
        f"provider acme is configured in {here}:3, so it cannot be changed here.",
    )
    # A deployment of the API at a provider of the file is called with the file's key.
    assert it.settings.catalog.by_model["llama"][0].provider.credential == "acme"
    assert (await it.ask("PATCH", "/tiers/small", {"fallbacks": ["standard"]}))[1]["version"] == 1


async def test_what_moves_into_the_file_is_the_files_from_then_on(it: Office) -> None:
    await everything(it)
    exported = settings.written({"credentials": {"shared": {"env": "LOCAL_API_KEY"}}, "tenants": ["default"]})
    file = it.folder / "gateway.yaml"
    file.write_text(exported + file.read_text())
    await made(it, "/tiers", {"name": "fast", "fallbacks": ["small"]})
    _, found = await it.ask("GET", "/configuration")
    assert [(d["kind"], d["name"], d["shadowed_by"]) for d in found["data"]] == [
        ("credential", "shared", {"file": it.settings.file, "line": 2}),
        ("provider", "local", None),
        ("deployment", "local/llama", None),
        ("tier", "fast", None),
        ("rule", "early", None),
    ]
    status, problem = await it.ask("PATCH", "/credentials/shared", {"env": "LOCAL_API_KEY"})
    assert (status, f"is configured in {it.settings.file}:2" in problem["detail"]) == (409, True)
    assert (await it.ask("DELETE", "/credentials/shared"))[0] == 409, "the document of the provider names it"
    status, gone = await it.ask("DELETE", "/rules/early")
    assert (status, gone) == (200, {"kind": "rule", "name": "early", "version": 2})


async def test_all_or_nothing_at_once_and_a_repetition_changes_nothing(on: Office) -> None:
    wanted: dict[str, Any] = {
        "rules": [EARLY],
        "deployments": [LLAMA],
        "providers": [LOCAL],
        "credentials": [SHARED],
        "tiers": [{"name": "small", "fallbacks": ["fast"]}],
        "virtual_models": [
            {"name": "quick", "rules": [{"name": "a", "when": "task.step > 9", "model": "llama"}]}
        ],
    }
    once = {"Idempotency-Key": "roll out"}
    status, first, _ = await on.told("POST", "/configuration/bulk", wanted, headers=once)
    assert (status, [row["name"] for row in first["data"]]) == (
        201,
        ["shared", "local", "local/llama", "small", "quick", "early"],
    )
    status, again, told = await on.told("POST", "/configuration/bulk", wanted, headers=once)
    assert (status, again, told["Idempotency-Replayed"]) == (201, first, "true")
    status, problem, _ = await on.told("POST", "/configuration/bulk", {"rules": [EARLY]}, headers=once)
    assert (status, problem["errors"][0]["field"]) == (409, "Idempotency-Key")
    status, problem = await on.ask("POST", "/configuration/bulk", wanted)
    assert (status, problem["errors"][0]["field"]) == (409, "credentials.0.name")
    status, problem = await on.ask("DELETE", "/deployments/local/llama")
    assert (status, [e["message"].partition(": ")[2] for e in problem["errors"]]) == (
        409,
        [
            "admin API: rule early: tier: no deployment is in tier fast",
            "admin API: tier small: fallbacks: no other tier with a deployment is called 'fast'",
            "admin API: virtual model quick: rules[0].model: there is no model 'llama'",
        ],
    )


async def test_of_writes_at_once_each_is_tried_on_what_the_others_left(on: Office) -> None:
    await made(on, "/configuration/bulk", {"credentials": [SHARED], "providers": [LOCAL]})
    for n in range(3):
        await made(on, "/deployments", LLAMA)
        rule = {"name": f"r{n}", "when": f"task.step == {n + 10}", "tier": "fast"}
        (ruled, _), (gone, _) = await asyncio.gather(
            on.ask("POST", "/rules", rule), on.ask("DELETE", "/deployments/local/llama")
        )
        assert (ruled, gone) in ((201, 409), (422, 200))
        await on.ask("DELETE", f"/rules/r{n}")
        await on.ask("DELETE", "/deployments/local/llama")
    rules = [{"name": f"s{n}", "when": f"task.step == {n + 1}", "tier": "small"} for n in range(12)]
    answers = await asyncio.gather(*(on.ask("POST", "/rules", rule) for rule in rules))
    assert [status for status, _ in answers] == [201] * 12


async def test_a_process_that_cannot_take_it_over_keeps_what_it_has_and_the_way_out_is_open(
    it: Office,
) -> None:
    await everything(it)
    del it.env["LOCAL_API_KEY"]
    status, problem = await it.ask("PATCH", "/rules/early", {"why": "quick"})
    assert (status, problem["errors"]) == (
        422,
        [
            {
                "field": "env",
                "message": "admin API: credential shared: env: the environment variable LOCAL_API_KEY is not set",
            }
        ],
    )
    # What else is wrong does not keep anybody from deleting.
    for path in ("/rules/early", "/deployments/local/llama", "/providers/local"):
        assert (await it.ask("DELETE", path))[0] == 200, path
    _, found = await it.ask("GET", "/configuration")
    assert (found["in_force"], found["trouble"]) == (
        False,
        "admin API: credential shared: env: the environment variable LOCAL_API_KEY is not set "
        "(set it where the gateway runs)",
    )
    assert "local" in it.configured.providers, "what was in force still is"
    assert (await it.ask("DELETE", "/credentials/shared"))[0] == 200
    assert (await it.ask("GET", "/configuration"))[1]["in_force"]
    assert list(it.configured.providers) == ["acme"]


async def test_no_secret_is_in_the_store_or_in_an_answer(it: Office) -> None:
    await everything(it)
    said = [await it.ask("GET", path) for path in ("/credentials", "/providers", "/configuration", "/audit")]
    at_rest = [
        await it.rows(f"SELECT * FROM {table}") for table in ("config_document", "audit", "admin_reply")
    ]
    assert "secret-of" not in str(said) + str(at_rest)
    assert it.settings.credentials["shared"].reveal() == "secret-of-local"


async def test_a_known_provider_is_switched_on_by_a_credential(it: Office) -> None:
    await made(it, "/credentials", {"name": "mine", "env": "LOCAL_API_KEY"})
    provider = await made(it, "/providers", {"name": "known", "credential": "mine"})
    assert (provider["base_url"], provider["deployments"]) == ("https://known.example/v1", ["known/mid"])
    override = await made(it, "/deployments", {"provider": "known", "model": "mid", "weight": 7})
    assert (override["name"], override["weight"], override["price"]) == ("known/mid", 7, "known/mid")
