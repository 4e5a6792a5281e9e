"""`replicas:` of a deployment: what it amounts to, and what is wrong with it, by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.catalog import ReplicaKind, ReplicaSource
from gateway.settings import ConfigError, load


def replicas(tmp_path: Path, text: str, provider: str = "") -> ReplicaSource | None:
    file = tmp_path / "my.yaml"
    more = f"    {provider}\n" if provider else ""
    file.write_text(
        f"discover_providers: false\nproviders:\n  gpu:\n{more}    deployments:\n      - model: m\n"
        f"        price: none\n        replicas: {text}\n"
    )
    (deployment,) = load(file, {}).catalog.deployments
    return deployment.replicas


def problems(tmp_path: Path, text: str, provider: str = "") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        replicas(tmp_path, text, provider)
    return [str(p).removeprefix(f"{p.file}:") for p in caught.value.problems]


def test_a_list_is_the_base_urls_and_the_provider_needs_none(tmp_path: Path) -> None:
    assert replicas(tmp_path, "[http://10.0.0.4:8000/v1/, https://gpu.example/b/v1]") == ReplicaSource(
        ReplicaKind.STATIC, urls=("http://10.0.0.4:8000/v1", "https://gpu.example/b/v1")
    )


def test_replicas_are_found_by_dns_or_by_kubernetes_and_picked_by_numbers(tmp_path: Path) -> None:
    assert replicas(
        tmp_path,
        "{dns: {host: tier.gpu.svc, port: 8000}, path: /, refresh_s: 2, poll_s: 0.5, health_path: /ready}",
    ) == ReplicaSource(
        ReplicaKind.DNS,
        host="tier.gpu.svc",
        port="8000",
        path="",
        refresh_s=2,
        poll_s=0.5,
        health_path="/ready",
    )
    assert replicas(
        tmp_path,
        "{kubernetes: {service: tier, namespace: gpu, port: http}, scheme: https, prefill_tokens_per_s: 15928,"
        " first_token_max_s: 9, warm_ratio: 0.7, exploration: 0, decode_bound: yes, kv_tokens: 500_000}",
    ) == ReplicaSource(
        ReplicaKind.KUBERNETES,
        service="tier",
        namespace="gpu",
        port="http",
        scheme="https",
        prefill_tokens_per_s=15_928,
        first_token_max_s=9,
        warm_ratio=0.7,
        exploration=0,
        decode_bound=True,
        kv_tokens=500_000,
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "{dns: {host: 'http://x', port: 0}, urls: [http://a/v1]}",
            [
                "7: providers.gpu.deployments[0].replicas.dns: replicas are found in one way, and these by `urls` already",
                "7: providers.gpu.deployments[0].replicas.dns.port: must be from 1 to 65535, not 0",
                "7: providers.gpu.deployments[0].replicas.dns.host: must be a host name, not 'http://x' "
                "(scheme, port and path have keys of their own)",
            ],
        ),
        (
            "[http://a/v1, http://a/v1/, ftp://b, 'http://u:p@c/v1']",
            [
                "7: providers.gpu.deployments[0].replicas: http://a/v1 is there twice",
                "7: providers.gpu.deployments[0].replicas: must be an http or https URL, not 'ftp://b'",
                "7: providers.gpu.deployments[0].replicas: must not hold a user name or a password "
                "(give the secret as `key:`)",
            ],
        ),
        (
            "{refresh_s: 5}",
            [
                "7: providers.gpu.deployments[0].replicas: does not say where the replicas are "
                "(give `urls`, `dns` or `kubernetes`)"
            ],
        ),
        (
            "http://a/v1",
            [
                "7: providers.gpu.deployments[0].replicas: must be a list of base URLs or a mapping "
                "(for example [http://10.0.0.4:8000/v1, http://10.0.0.5:8000/v1])"
            ],
        ),
        (
            "{kubernetes: {service: Not/A/Name, port: '!'}, path: v1, warm_ratio: 2}",
            [
                "7: providers.gpu.deployments[0].replicas.kubernetes.service: must be a name as Kubernetes allows it, "
                "not 'Not/A/Name'",
                "7: providers.gpu.deployments[0].replicas.kubernetes.port: must be the number or the name of a port, "
                "not '!'",
                "7: providers.gpu.deployments[0].replicas.path: must begin with a slash and have no query, not 'v1'",
                "7: providers.gpu.deployments[0].replicas.warm_ratio: must be a number from 0.01 to 1, not '2'",
            ],
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, found: list[str]) -> None:
    assert problems(tmp_path, text) == found


def test_only_servers_that_are_spoken_to_directly_have_replicas(tmp_path: Path) -> None:
    assert problems(tmp_path, "[http://a/v1]", "wire: litellm") == [
        "8: providers.gpu.deployments[0].replicas: a provider of wire litellm has none (set `wire: openai`)"
    ]


def test_a_deployment_without_replicas_needs_its_providers_base_url(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        "discover_providers: false\nproviders:\n  gpu:\n    deployments:\n"
        "      - {model: m, price: none, replicas: [http://a/v1]}\n      - {model: n, price: none}\n"
    )
    with pytest.raises(ConfigError, match="providers.gpu.base_url: is required"):
        load(file, {})
