"""Rules are tried before they are written, and a configuration says where each thing in it stands."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from gateway import settings
from gateway.administration import admin_token
from gateway.settings import Place, check_rules
from tests.admin.office import CATALOG, Office
from tests.support.running import Tollhouse, running

RULES = """
rules:
  - {name: late, when: task.step > 40, tier: small}
  - {name: never, when: task.stepp > 1, tier: small}
  - {name: odd, tier: gone, wen: "true"}
"""


async def test_rules_are_tried_on_the_deployments_in_force_and_every_mistake_has_its_place(
    sqlite_url: str,
) -> None:
    async with running(sqlite_url) as it:
        headers = {"Authorization": f"Bearer {admin_token(it.app.settings)}"}
        async with aiohttp.ClientSession(
            f"http://127.0.0.1:{it.app.admin_port}/admin/v1/", headers=headers
        ) as http:
            async with http.post("rules/check", json={"yaml": RULES}) as answer:
                assert answer.status == 200
                found = await answer.json()
            assert [(p["line"], p["key"], p["message"].partition(";")[0]) for p in found["problems"]] == [
                (4, "rules[1].when", "task has no 'stepp'"),
                (5, "rules[2].tier", "must be one of fast, standard, small, not 'gone'"),
                (5, "rules[2].wen", "there is no such setting"),
            ]
            assert (found["ok"], found["rules"][0]["name"]) == (False, "late")
            rule = {"name": "late", "when": "task.step > 40", "tier": "small"}
            async with http.post("rules/check", json={"rules": [rule]}) as answer:
                found = await answer.json()
            assert (found["ok"], found["rules"][0]["target"], found["problems"]) == (True, "small", [])
            # This one was not started from a file.
            async with http.post("reload") as answer:
                assert (answer.status, (await answer.json())["detail"]) == (
                    409,
                    "This gateway was not started from a file.",
                )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: &x [1]\nrules: [*x, *x]", "anchors cannot be used here"),
        ("rules: " + "[" * 30, "nests deeper than 20 levels"),
        ("rules: {", "not valid YAML"),
        ("", "there are none"),
        ("rules: [{name: a, when: 'request.model == \"${HOME}\"', tier: small}]", "HOME is not set"),
        ("rules:\n" + "".join(f" - {{name: r{n}, tier: small}}\n" for n in range(101)), "more than 100"),
    ],
)
def test_what_comes_over_the_network_is_bounded_and_reads_no_environment(text: str, said: str) -> None:
    _, problems = check_rules(text, CATALOG)
    assert said in problems[0].message


def test_what_is_configured_says_where(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "default_tier: standard\n"
        "providers:\n"
        "  local:\n"
        "    base_url: http://127.0.0.1:8000/v1\n"
        "    key: abc\n"
        "    deployments:\n"
        '      - {model: llama, price: {input_usd_per_mtok: "1", output_usd_per_mtok: "2"}}\n'
        "rules:\n"
        "  - {name: all, tier: standard}\n"
        "virtual_models:\n"
        "  smart:\n"
        "    rules: [{name: first, tier: standard}]\n"
    )
    env = {"OPENAI_API_KEY": "sk-secret"}
    found = settings.load(file, env).places
    here = str(file)
    assert {name: found[name] for name in found if "openai" not in name and "provider:" not in name} == {
        "credential:local": Place(here, 5),
        "deployment:local/llama": Place(here, 7),
        "rule:all": Place(here, 9),
        "rule:smart/first": Place(here, 12),
        "virtual_model:smart": Place(here, 11),
        "default_tier": Place(here, 1),
    }
    assert (found["provider:local"], found["credential:openai"]) == (
        Place(here, 3),
        Place("$OPENAI_API_KEY", 0),
    )
    assert found["provider:openai"].file.endswith("config/providers.yaml")
    assert found["provider:openai"].line > 0
    listed = [place for name, place in found.items() if name.startswith("deployment:openai/")]
    assert {Path(place.file).name for place in listed} == {"prices.yaml"}
    assert "sk-secret" not in str(found)


async def test_a_reload_over_the_api_is_the_same_as_by_signal(tmp_path: Path) -> None:
    tollhouse = Tollhouse(tmp_path, listen="127.0.0.1:0", admin_key="an-admin-key-of-the-tests")
    plain = tollhouse.config.read_text()
    async with tollhouse.serve("--first-run") as serving:
        admin = await serving.says(r"admin: (http://[^)]+)\)")
        headers = {"Authorization": "Bearer an-admin-key-of-the-tests"}
        async with aiohttp.ClientSession(f"{admin}/admin/v1/", headers=headers) as http:
            rules = "rules: [{name: all, tier: small, switch: always}]\n"
            tollhouse.config.write_text(plain + rules + "drain_s: 7\n")
            async with http.post("reload") as answer:
                assert (answer.status, await answer.json()) == (
                    200,
                    {"reloaded": True, "waiting_for_restart": ["drain_s"]},
                )
            async with http.get("rules") as answer:
                (rule,) = (await answer.json())["data"]
            assert (rule["name"], rule["source"]) == ("all", {"file": str(tollhouse.config), "line": 5})

            tollhouse.config.write_text(plain + "rules: [{name: all, tier: gone}]\nwindow: 3\n")
            async with http.post("reload") as answer:
                problem = await answer.json()
                assert answer.status == 422
            assert [e["field"] for e in problem["errors"]] == ["rules[0].tier", "window"]
            assert problem["errors"][1]["message"].startswith(
                f"{tollhouse.config}:6: there is no such setting"
            )
            async with http.get("rules") as answer:
                assert [r["name"] for r in (await answer.json())["data"]] == ["all"]
            async with http.get("audit?action=configuration.reload") as answer:
                (entry,) = (await answer.json())["data"]
            assert (entry["actor"], entry["body"]) == ("admin", {"waiting_for_restart": ["drain_s"]})


async def test_nobody_below_an_operator_reloads(it: Office) -> None:
    _, viewer = await it.ask("POST", "/admin_keys", {"name": "v", "role": "viewer"})
    for path, body in (("/reload", None), ("/rules/check", {"rules": []})):
        assert (await it.ask("POST", path, body, key=viewer["key"]))[0] == 403
