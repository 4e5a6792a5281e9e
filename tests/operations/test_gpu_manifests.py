"""The GPU tier's manifests fit the gateway's configuration beside them, and vLLM as it was seen to behave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.core.catalog import Deployment, ReplicaKind, Tier
from gateway.settings import Settings, load
from tests.operations.manifests import K8S, Rendered, rendered, variables

TIERS = tuple(tier.value for tier in Tier)
DOCS = (K8S.parent / "docs" / "gpu-tier.md").read_text("utf-8")
VALUES = {
    "TOLLHOUSE_DATABASE_URL": "postgresql://tollhouse@postgres/tollhouse",
    "TOLLHOUSE_PEPPER": "p" * 64,
    "ANTHROPIC_API_KEY": "sk-ant-test",
    "GPU_API_KEY": "sk-gpu-test",
}


@pytest.fixture(scope="module")
def made() -> Rendered:
    return rendered(K8S / "overlays/gpu")


@pytest.fixture(scope="module")
def settings(made: Rendered, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    file: Path = tmp_path_factory.mktemp("gpu") / "gateway.yaml"
    file.write_text(made.configuration)
    return load(file, VALUES)


def pod(made: Rendered, tier: str) -> dict[str, Any]:
    found: dict[str, Any] = made.pods()[f"Deployment/tier-{tier}"]
    return found


def container(made: Rendered, tier: str) -> dict[str, Any]:
    (one,) = pod(made, tier)["spec"]["containers"]
    found: dict[str, Any] = one
    return found


def flags(made: Rendered, tier: str) -> dict[str, str]:
    """Of `vllm serve`; "" for those without a value, "model" for the argument in front."""
    model, *rest = container(made, tier)["args"]
    return {"model": model} | {name: value for name, _, value in (arg.partition("=") for arg in rest)}


def deployment(settings: Settings, tier: str) -> Deployment:
    (found,) = (d for d in settings.catalog.deployments if d.name == f"gpu/{tier}")
    return found


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_every_file_is_used() -> None:
    listed = yaml.safe_load((K8S / "gpu" / "kustomization.yaml").read_text())
    assert listed["kind"] == "Component"
    assert {*listed["resources"], "kustomization.yaml"} == {p.name for p in (K8S / "gpu").glob("*.yaml")}


def test_the_configuration_needs_what_the_secrets_hold_and_has_a_deployment_for_each_tier(
    made: Rendered, settings: Settings
) -> None:
    needed, _ = variables(made.configuration)
    assert needed == VALUES.keys()
    told = (K8S / "gpu" / "kustomization.yaml").read_text()
    assert "GPU_API_KEY" in told
    assert "GPU_API_KEY" in DOCS
    assert {d.tier for d in settings.catalog.deployments if d.provider.name == "gpu"} == set(Tier)


@pytest.mark.parametrize("tier", TIERS)
def test_the_gateway_finds_each_tier_where_it_is(made: Rendered, settings: Settings, tier: str) -> None:
    service = made.objects[f"Service/tier-{tier}"]["spec"]
    found = deployment(settings, tier)
    assert found.tier.value == tier
    assert found.replicas is not None
    (port,) = service["ports"]
    assert (found.replicas.kind, found.replicas.host, found.replicas.port) == (
        ReplicaKind.DNS,
        f"tier-{tier}",
        str(port["port"]),
    )
    assert service["clusterIP"] == "None", "a virtual address would hide the pods"
    assert port["targetPort"] in {p["name"] for p in container(made, tier)["ports"]}
    pods = [name for name, p in made.pods().items() if selects(service["selector"], p["metadata"]["labels"])]
    assert pods == [f"Deployment/tier-{tier}"]


@pytest.mark.parametrize("tier", TIERS)
def test_flags_say_what_the_configuration_counts_on(made: Rendered, settings: Settings, tier: str) -> None:
    found, given = deployment(settings, tier), flags(made, tier)
    assert container(made, tier)["command"] == ["vllm", "serve"]
    assert (given["model"], given["--served-model-name"]) == (f"/models/{tier}", found.upstream_model)
    assert found.context_tokens == int(given["--max-model-len"])
    assert found.serving.takes_priority == (given["--scheduling-policy"] == "priority")
    # without it usage says nothing of what was cached, and every prompt would be charged in full
    assert "--enable-prompt-tokens-details" in given
    # what the gateway lets in has room there, and what it does not is a 503 rather than an endless queue
    assert found.serving.concurrent_per_replica is not None
    assert found.serving.concurrent_per_replica <= int(given["--max-num-queued-reqs"]) + int(
        given.get("--max-num-seqs", "256")
    )
    if "--speculative-config" in given:
        assert json.loads(given["--speculative-config"])["num_speculative_tokens"] == 3
    for flag in (*given.keys() - {"model"}, "gpu.usd_per_replica_hour"):
        assert flag.removeprefix("gpu.") in DOCS, f"docs/gpu-tier.md says nothing of {flag}"
    assert found.serving.gpu is not None


@pytest.mark.parametrize("tier", TIERS)
def test_a_pod_leaves_the_names_before_it_stops_and_is_given_time_to_finish(
    made: Rendered, settings: Settings, tier: str
) -> None:
    spec, one = pod(made, tier)["spec"], container(made, tier)
    source = deployment(settings, tier).replicas
    assert source is not None
    pause_s = one["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pause_s >= 2 * (source.refresh_s + source.poll_s)
    drained_s = pause_s + int(flags(made, tier)["--shutdown-timeout"])
    assert spec["terminationGracePeriodSeconds"] >= drained_s + 30
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert one[kind]["httpGet"] == {"path": source.health_path, "port": "http"}
    start = one["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 600, "weights take minutes to load"
    assert spec["enableServiceLinks"] is False


@pytest.mark.parametrize("tier", TIERS)
def test_it_has_a_gpu_memory_and_its_models(made: Rendered, tier: str) -> None:
    spec, one = pod(made, tier)["spec"], container(made, tier)
    assert one["resources"]["limits"]["nvidia.com/gpu"] == one["resources"]["requests"]["nvidia.com/gpu"] == 1
    offload = int(flags(made, tier).get("--kv-offloading-size", "0"))
    memory = int(one["resources"]["requests"]["memory"].removesuffix("Gi"))
    mounts = {m["mountPath"]: m for m in one["volumeMounts"]}
    volumes = {v["name"]: v for v in spec["volumes"]}
    assert {m["name"] for m in mounts.values()} == volumes.keys()
    shm = volumes[mounts["/dev/shm"]["name"]]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert memory >= offload + int(shm["sizeLimit"].removesuffix("Gi")) + 24
    assert one["resources"]["limits"]["memory"] == one["resources"]["requests"]["memory"]
    claim = volumes[mounts["/models"]["name"]]["persistentVolumeClaim"]
    assert (mounts["/models"]["readOnly"], claim["readOnly"]) == (True, True)
    assert claim["claimName"] in made.of_kind("PersistentVolumeClaim")
    assert spec["automountServiceAccountToken"] is False
    assert one["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("tier", TIERS)
def test_it_scales_by_the_gateway_s_own_backlog_and_slowly_down(
    made: Rendered, settings: Settings, tier: str
) -> None:
    scaler = made.objects[f"ScaledObject/tier-{tier}"]["spec"]
    assert scaler["scaleTargetRef"] == {"name": f"tier-{tier}"}
    assert "replicas" not in made.objects[f"Deployment/tier-{tier}"]["spec"]
    assert [t["metadata"]["query"] for t in scaler["triggers"]] == [
        f'sum(tollhouse_replica_backlog_tokens{{deployment="gpu/{tier}"}})',
        f'sum(tollhouse_queue_waiting{{deployment="gpu/{tier}"}})',
    ]
    found = deployment(settings, tier)
    assert found.replicas is not None
    assert found.replicas.prefill_tokens_per_s is not None
    tau = found.replicas.prefill_tokens_per_s * found.replicas.first_token_max_s
    assert int(scaler["triggers"][0]["metadata"]["threshold"]) < tau, (
        "a replica comes before affinity is given up"
    )
    down = scaler["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] >= 600
    assert [p["value"] for p in down["policies"]] == [1]
    budget = made.objects[f"PodDisruptionBudget/tier-{tier}"]["spec"]
    labels = pod(made, tier)["metadata"]["labels"]
    assert budget["maxUnavailable"] == 1
    assert selects(budget["selector"]["matchLabels"], labels)
    selector = made.objects[f"Deployment/tier-{tier}"]["spec"]["selector"]["matchLabels"]
    assert selects(selector, labels)
    spread = pod(made, tier)["spec"]["topologySpreadConstraints"]
    assert {s["topologyKey"] for s in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    assert all(selects(s["labelSelector"]["matchLabels"], labels) for s in spread)


def test_only_the_gateway_calls_vllm(made: Rendered) -> None:
    labels = {name: p["metadata"]["labels"] for name, p in made.pods().items()}
    into = made.objects["NetworkPolicy/tollhouse-gpu"]["spec"]
    guarded = {name for name, has in labels.items() if selects(into["podSelector"]["matchLabels"], has)}
    assert guarded == {f"Deployment/tier-{tier}" for tier in TIERS}
    (rule,) = into["ingress"]
    (who,) = rule["from"]
    assert [n for n, has in labels.items() if selects(who["podSelector"]["matchLabels"], has)] == [
        "StatefulSet/tollhouse"
    ]
    assert (into["policyTypes"], into["egress"], rule["ports"]) == (
        ["Ingress", "Egress"],
        [],
        [{"port": 8000}],
    )
    out = made.objects["NetworkPolicy/tollhouse-to-gpu"]["spec"]
    assert selects(out["podSelector"]["matchLabels"], labels["StatefulSet/tollhouse"])
    assert out["egress"] == [{"ports": [{"port": 8000}], "to": [{"podSelector": into["podSelector"]}]}]


def test_the_key_of_the_servers_is_the_one_that_the_gateway_sends(made: Rendered, settings: Settings) -> None:
    for tier in TIERS:
        env = {e["name"]: e for e in container(made, tier)["env"]}
        assert env["VLLM_API_KEY"]["valueFrom"]["secretKeyRef"] == {
            "name": "tollhouse-providers",
            "key": "GPU_API_KEY",
        }
    assert settings.credentials[settings.providers["gpu"].credential].reveal() == VALUES["GPU_API_KEY"]
