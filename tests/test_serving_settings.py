"""What a deployment of one's own says of its server: what it amounts to, and what is wrong with it, by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.core.catalog import Deployment
from gateway.core.gpu_price import GpuPrice
from gateway.core.prices import Rates
from gateway.core.rules import Caps
from gateway.core.serving import CacheSalt, QueuePolicy, Serving, Urgency
from gateway.settings import ConfigError, Settings, load

GPU = "{gpu: {usd_per_replica_hour: 2.50, input_tokens_per_s: 16000, output_tokens_per_s: 900}}"


def settings(tmp_path: Path, price: str, *more: str) -> Settings:
    file = tmp_path / "my.yaml"
    lines = "".join(f"        {line}\n" for line in more)
    file.write_text(
        "discover_providers: false\nproviders:\n  gpu:\n    base_url: http://127.0.0.1:1/v1\n    deployments:\n"
        f"      - model: m\n        price: {price}\n{lines}"
    )
    return load(file, {})


def read(tmp_path: Path, price: str, *more: str) -> Deployment:
    (deployment,) = settings(tmp_path, price, *more).catalog.deployments
    return deployment


def problems(tmp_path: Path, price: str, *more: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, price, *more)
    return [str(p).removeprefix(f"{p.file}:") for p in caught.value.problems]


def test_nothing_said_is_nothing_done(tmp_path: Path) -> None:
    plain = read(tmp_path, "none")
    assert (plain.serving, plain.limited) == (Serving(), False)


def test_the_hours_of_a_gpu_become_a_price_per_token(tmp_path: Path) -> None:
    found = settings(
        tmp_path,
        "{gpu: {usd_per_replica_hour: '2.50', input_tokens_per_s: 16_000, cached_tokens_per_s: 400000,"
        " output_tokens_per_s: 900, utilisation: 0.75}, per_request_usd: 0.001}",
    )
    (deployment,) = found.catalog.deployments
    assert deployment.serving.gpu == GpuPrice(2_500_000_000, 16_000, 900, 400_000, 750)
    row = found.prices.find(deployment.price, 0)
    assert row is not None
    assert (row.rates, row.per_request_nano_usd) == (Rates(57_871, 1_028_807, 2_315), 1_000_000)
    assert read(tmp_path, GPU).serving.gpu == GpuPrice(2_500_000_000, 16_000, 900, None, 600)


def test_caches_queue_and_places_are_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "none",
        "cache_salt: team",
        "takes_priority: true",
        "concurrent_per_replica: 32",
        "queue: {wait_max_s: 20, batch_wait_max_s: 300, waiting_max: 500, batch_turn_after_s: 60}",
    )
    assert found.serving == Serving(CacheSalt.TEAM, True, 32, QueuePolicy(20, 300, 500, 60))
    assert found.limited


def test_what_is_wrong_is_said_with_its_place(tmp_path: Path) -> None:
    assert problems(tmp_path, "{gpu: {}}") == [
        "7: providers.gpu.deployments[0].price.gpu.usd_per_replica_hour: is required "
        '(dollars for one replica, all its GPUs together, for example "2.50")',
        "7: providers.gpu.deployments[0].price.gpu.input_tokens_per_s: is required "
        "(`tollhouse calibrate` measures it)",
        "7: providers.gpu.deployments[0].price.gpu.output_tokens_per_s: is required "
        "(`tollhouse calibrate` measures it)",
    ]
    both = f"{GPU[:-1]}, input_usd_per_mtok: '1'}}"
    assert problems(tmp_path, both) == [
        "7: providers.gpu.deployments[0].price.input_usd_per_mtok: is given by `gpu` already: "
        "a price is per token or per hour"
    ]
    assert problems(tmp_path, GPU.replace("}}", ", utilisation: 1.2}}")) == [
        "7: providers.gpu.deployments[0].price.gpu.utilisation: must be above 0 and at most 1, in thousandths, "
        "not '1.2' (for example 0.6)"
    ]
    assert problems(tmp_path, GPU.replace("}}", ", cached_tokens_per_s: 10}}")) == [
        "7: providers.gpu.deployments[0].price.gpu: a cached token cannot take longer than one that is not"
    ]
    assert problems(tmp_path, "none", "cache_salt: everybody") == [
        "8: providers.gpu.deployments[0].cache_salt: must be one of tenant, team, none, not 'everybody'"
    ]
    assert problems(tmp_path, "none", "queue: {wait_max_s: 3}") == [
        "8: providers.gpu.deployments[0].queue: nobody waits where there is no limit "
        "(give `concurrent` or `concurrent_per_replica`)"
    ]
    assert problems(tmp_path, "none", "concurrent: 3", "concurrent_per_replica: 3") == [
        "9: providers.gpu.deployments[0].concurrent_per_replica: says with `concurrent` twice how many calls "
        "there may be"
    ]


def test_a_rule_may_say_how_urgent_something_is(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    rules = "rules: [{name: night, tier: standard, when: time.hour < 6, urgency: batch, priority: -3}]\n"
    file.write_text(f"discover_providers: false\n{rules}")
    (rule,) = load(file, {}).routing.texts
    assert rule.caps == Caps(urgency=Urgency.BATCH, priority=-3)
    file.write_text(f"discover_providers: false\n{rules.replace('batch', 'soon')}")
    with pytest.raises(ConfigError, match="must be one of interactive, batch, not 'soon'"):
        load(file, {})
