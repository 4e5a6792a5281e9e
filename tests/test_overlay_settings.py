"""Credentials with names of their own, and documents of the admin API among what the file says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.core.catalog import Tier
from gateway.core.config_overlay import Document, Kind
from gateway.reload import renewed
from gateway.settings import ConfigError, Place, Settings, load

FILE = """
demo: off
providers:
  files: {base_url: "http://127.0.0.1:1/v1", credential: mine, deployments: [{model: base, price: none}]}
  off: {enabled: false}
credentials:
  mine: {env: MY_KEY}
"""
ENV = {"MY_KEY": "secret-of-mine", "LOCAL_API_KEY": "secret-of-local", "OPENAI_API_KEY": "sk"}
Read = Callable[..., Settings]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read(*documents: Document, text: str = FILE, env: Mapping[str, str] = ENV) -> Settings:
        file = tmp_path / "my.yaml"
        file.write_text(text)
        return load(file, env, documents)

    return read


def problems(read: Read, *documents: Document, **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(*documents, **more)
    return [str(p).rpartition("/")[2] if p.line else str(p) for p in caught.value.problems]


def deployment(name: str, provider: str, **body: Any) -> Document:
    return Document(Kind.DEPLOYMENT, name, {"provider": provider, "model": name, "price": "none", **body})


def test_several_providers_may_use_one_credential_out_of_a_variable_a_file_or_a_reference(
    read: Read, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret-in-a-file\n")
    text = FILE.replace("mine: {env: MY_KEY}", f"mine: {{file: {secret}}}\n  other: {{key: '${{MY_KEY}}'}}")
    text += "  third: {env: MY_KEY}\n"
    found = read(text=text)
    revealed = {name: found.credentials[name].reveal() for name in ("mine", "other", "third")}
    assert revealed == {"mine": "secret-in-a-file", "other": "secret-of-mine", "third": "secret-of-mine"}
    assert found.providers["files"].credential == "mine"


def test_credentials_that_cannot_be_had_are_told_with_their_line(read: Read) -> None:
    credentials = "credentials:\n"
    wrong = {
        "a: {}": "my.yaml:7: credentials.a: does not say where the secret is (give one of `env` and `file`)",
        "a: {env: A, file: b}": "my.yaml:7: credentials.a: says env and file (give one of `env` and `file`)",
        "a: {env: NOT_SET}": "my.yaml:7: credentials.a.env: the environment variable NOT_SET is not set "
        "(set it where the gateway runs)",
        "a: {key: '${NOT_SET}'}": "my.yaml:7: credentials.a.key: the environment variable NOT_SET is not set "
        "(set it, or write ${NOT_SET:-} if it may be missing)",
        "openai: {env: MY_KEY}": "my.yaml:7: credentials.openai: the key of provider openai goes by that name already "
        "(call it something else)",
    }
    for entry, said in wrong.items():
        text = FILE.partition(credentials)[0].replace("credential: mine, ", "") + f"{credentials}  {entry}\n"
        assert problems(read, text=text) == [said]
    both = FILE.replace("credential: mine", "credential: mine, key: x")
    assert problems(read, text=both) == [
        "my.yaml:4: providers.files.credential: says with `key` twice what the secret is"
    ]


def test_a_credential_of_the_api_comes_only_from_where_the_file_allows(read: Read, tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "good").write_text("secret-of-good")
    (folder / "empty").write_text("")
    (folder / "out").symlink_to(tmp_path / "my.yaml")
    text = f"admin_credentials: {{env: [LOCAL_*, TOLLHOUSE_*], files: {folder}}}\n{FILE}"

    def of(**body: str) -> Document:
        return Document(Kind.CREDENTIAL, "c", body)

    assert read(of(file="good"), text=text).credentials["c"].reveal() == "secret-of-good"
    assert read(of(env="LOCAL_API_KEY"), text=text).credentials["c"].reveal() == "secret-of-local"
    env = {**ENV, "TOLLHOUSE_PEPPER": "a pepper of the gateway"}
    for body, said in (
        ({"file": "out"}, f"file: must be below {folder}"),
        ({"file": "../my.yaml"}, f"file: must be below {folder}"),
        ({"file": "/etc/hostname"}, f"file: must be below {folder}"),
        ({"file": "empty"}, f"file: {folder}/empty is empty"),
        ({"file": "none"}, f"file: {folder}/none cannot be read: No such file or directory"),
        ({"key": "sk-1"}, "key: secrets are not kept here (name a variable as `env` or a file as `file`)"),
        (
            {"env": "MY_KEY"},
            "env: MY_KEY may not be named here; allowed: LOCAL_*, TOLLHOUSE_* "
            "(see `admin_credentials:` in the file)",
        ),
        (
            {"env": "TOLLHOUSE_PEPPER"},
            "env: TOLLHOUSE_PEPPER may not be named here; allowed: LOCAL_*, TOLLHOUSE_* "
            "(see `admin_credentials:` in the file)",
        ),
    ):
        assert problems(read, of(**body), text=text, env=env) == [f"admin API: credential c: {said}"]


def test_documents_stand_among_what_the_file_says(read: Read) -> None:
    found = read(
        Document(
            Kind.PROVIDER, "local", {"base_url": "http://127.0.0.1:2/v1", "timeouts": {"idle_s": 7.5}}, 3
        ),
        deployment("llama", "local", tier="fast", weight=0),
        deployment("more", "files", aliases=["a", "b"]),
        deployment("own", "openai"),
        Document(Kind.TIER, "fast", {"fallbacks": ["standard"], "default": True}),
    )
    at = {d.name: d for d in found.catalog.deployments}
    assert (at["llama"].provider.idle_timeout_s, at["llama"].weight, at["llama"].tier) == (7.5, 0, Tier.FAST)
    assert (at["more"].provider.credential, at["more"].aliases) == ("mine", ("files/more", "a", "b"))
    assert at["own"].provider.credential == "openai", "a provider that its key has switched on"
    assert (found.catalog.default_tier, found.catalog.fallbacks) == (Tier.FAST, {Tier.FAST: (Tier.STANDARD,)})
    places = {name: place.file for name, place in found.places.items() if place.file.startswith("admin")}
    assert places == {
        "provider:local": "admin API, version 3",
        **dict.fromkeys(
            (*("deployment:llama", "deployment:more", "deployment:own"), "fallbacks:fast", "default_tier"),
            "admin API, version 1",
        ),
    }
    assert found.places["provider:openai"].file.endswith("providers.yaml")


def test_the_file_goes_before_documents_of_the_same_name(read: Read) -> None:
    text = FILE + "default_tier: standard\nrules: [{name: r, when: task.step > 1, tier: standard}]\n"
    found = read(
        Document(Kind.PROVIDER, "files", {"base_url": "http://127.0.0.1:2/v1"}),
        deployment("files/base", "files", weight=1),
        Document(Kind.CREDENTIAL, "mine", {"env": "LOCAL_API_KEY"}),
        Document(Kind.RULE, "r", {"tier": "standard"}),
        Document(Kind.TIER, "standard", {"default": True}),
        text=text,
    )
    assert found.providers["files"].base_url == "http://127.0.0.1:1/v1"
    assert found.routing.texts[0].when == "task.step > 1"
    assert {f"{kind}:{name}": place for (kind, name), place in found.overlaid.shadowed.items()} == {
        "credential:mine": Place(found.file, 7),
        "provider:files": Place(found.file, 4),
        "deployment:files/base": Place(found.file, 4),
        "tier:standard": Place(found.file, 8),
        "rule:r": Place(found.file, 9),
    }


def test_what_does_not_fit_is_told_by_its_resource(read: Read) -> None:
    deep: Any = "x"
    for _ in range(30):
        deep = [deep]
    assert problems(
        read,
        deployment("a", "nobody"),
        deployment("b", "off"),
        deployment("c", "files", aliases=deep, tier="${MY_KEY}"),
        Document(Kind.TIER, "fast", {"default": True}),
        Document(Kind.TIER, "small", {"default": True}),
    ) == [
        "admin API: deployment a: provider: there is no provider 'nobody'",
        f"admin API: deployment b: provider: off is off: {read(text=FILE).file}:5",
        f"admin API: deployment c: aliases{'[0]' * 20}: nests deeper than 20 levels",
        "admin API: deployment c: tier: variables of the environment are not put in here, only in the file",
        "admin API: deployment c: tier: must be one of fast, standard, small, not '${MY_KEY}'",
        "admin API: deployment c: aliases[0]: must be text, not a list",
        "admin API: tier small: default: there is one default, and it is fast",
    ]


def test_the_demo_makes_way_for_the_first_deployment_and_comes_back_after_the_last(read: Read) -> None:
    url = "http://127.0.0.1:9/v1"
    local = Document(Kind.PROVIDER, "local", {"base_url": "http://127.0.0.1:2/v1"})
    started = read(text="", env={}).with_demo_at(url)
    without, _ = renewed(started, lambda: read(local, deployment("m", "local"), text="", env={}), url)
    assert list(without.providers) == ["local"]
    again, _ = renewed(without, lambda: read(local, text="", env={}), url)
    assert again.providers["demo"].base_url == url
    with pytest.raises(ConfigError, match="the demo provider starts with the gateway only"):
        renewed(without, lambda: read(local, text="", env={}), "")
