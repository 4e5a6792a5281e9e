"""The manifests say what the image and the gateway really offer, and name only what is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from gateway.app import SETTLE_S
from gateway.settings import Settings, load
from tests.operations.manifests import K8S, Rendered, rendered, variables
from tests.support.running import running

FOLDERS = ("base", "overlays/production")
DOCKERFILE = (K8S.parent / "Dockerfile").read_text()
OPERATIONS = (K8S.parent / "docs" / "operations.md").read_text("utf-8")
GATEWAY = "StatefulSet/tollhouse"
#: What a person puts into the two secrets, as k8s/base/kustomization.yaml and docs/operations.md say.
SECRETS = {
    "tollhouse": {
        "TOLLHOUSE_DATABASE_URL",
        "TOLLHOUSE_PEPPER",
        "TOLLHOUSE_REDIS_URL",
        "TOLLHOUSE_ADMIN_KEY",
    },
    "tollhouse-providers": {"ANTHROPIC_API_KEY", "OPENAI_API_KEY"},
}
VALUES = {
    "TOLLHOUSE_DATABASE_URL": "postgresql://tollhouse@postgres/tollhouse",
    "TOLLHOUSE_PEPPER": "p" * 64,
    "TOLLHOUSE_REDIS_URL": "redis://redis:6379/0",
    "TOLLHOUSE_ADMIN_KEY": "a" * 40,
    "ANTHROPIC_API_KEY": "sk-ant-test",
    "OPENAI_API_KEY": "sk-test",
}


@pytest.fixture(params=FOLDERS)
def made(request: pytest.FixtureRequest) -> Rendered:
    return rendered(K8S / request.param)


def settings_of(made: Rendered, directory: Path, env: dict[str, str] = VALUES) -> Settings:
    file = directory / "gateway.yaml"
    file.write_text(made.configuration)
    return load(file, env)


def containers(made: Rendered) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, pod in made.pods().items():
        for container in pod["spec"]["containers"]:
            yield name, container


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_every_file_is_used() -> None:
    for folder in (*FOLDERS, "monitoring"):
        listed = yaml.safe_load((K8S / folder / "kustomization.yaml").read_text())
        used = {name for name in listed["resources"] if name.endswith(".yaml")}
        used |= {p["path"] for p in listed.get("patches", ())}
        used |= {file for entry in listed.get("configMapGenerator", ()) for file in entry["files"]}
        there = {p.name for p in (K8S / folder).glob("*.yaml")}
        assert there - {"kustomization.yaml"} == used


def test_images_are_of_this_version() -> None:
    assert {c["image"] for _, c in containers(rendered(K8S / "base"))} == {f"tollhouse:{__version__}"}
    images = {c["image"] for _, c in containers(rendered(K8S / "overlays/production"))}
    assert images == {f"registry.internal/tollhouse:{__version__}"}


def test_nothing_runs_as_root_or_writes_outside_of_its_volumes(made: Rendered) -> None:
    for pod in made.pods().values():
        security = pod["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 10001)
        assert "USER 10001:10001" in DOCKERFILE
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for _, container in containers(made):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
    (account,) = made.of_kind("ServiceAccount").values()
    assert account["automountServiceAccountToken"] is False


def test_what_is_mounted_is_there(made: Rendered) -> None:
    for name, pod in made.pods().items():
        spec = pod["spec"]
        claims = made.objects[name]["spec"].get("volumeClaimTemplates", ())
        there = {v["name"] for v in spec["volumes"]} | {c["metadata"]["name"] for c in claims}
        for container in spec["containers"]:
            assert {m["name"] for m in container["volumeMounts"]} == there
            (config,) = (a for a in container["args"] if a.endswith(".yaml"))
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            (volume,) = (v for v in spec["volumes"] if v["name"] == mounts[str(Path(config).parent)])
            assert Path(config).name in made.of_kind("ConfigMap")[volume["configMap"]["name"]]["data"]
        assert spec["serviceAccountName"] in made.of_kind("ServiceAccount")
    assert "state" in {c["metadata"]["name"] for c in made.objects[GATEWAY]["spec"]["volumeClaimTemplates"]}


def test_the_configuration_is_one_that_the_gateway_takes(made: Rendered, tmp_path: Path) -> None:
    settings = settings_of(made, tmp_path)
    (container,) = made.pods()[GATEWAY]["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert ports == {"http": settings.listen.port, "admin": settings.admin_listen.port}
    assert {settings.listen.host, settings.admin_listen.host} == {"0.0.0.0"}
    assert f"EXPOSE {ports['http']} {ports['admin']}" in DOCKERFILE
    assert str(settings.state_dir) in {m["mountPath"] for m in container["volumeMounts"]}
    assert settings.workers == 1, "a scrape sees one process"
    assert set(settings.providers) == {"anthropic", "openai"}


def test_the_environment_is_what_the_settings_read(made: Rendered, tmp_path: Path) -> None:
    needed, _ = variables(made.configuration)
    for name, container in containers(made):
        own = {e["name"]: e["valueFrom"]["secretKeyRef"] for e in container["env"]}
        assert all(ref["key"] == var and var in SECRETS[ref["name"]] for var, ref in own.items()), name
        secrets = {source["secretRef"]["name"] for source in container["envFrom"]}
        given = own.keys() | {var for secret in secrets for var in SECRETS[secret]}
        assert needed <= given, name
        settings_of(made, tmp_path, {var: VALUES[var] for var in given})
        required = {var for var, ref in own.items() if not ref.get("optional")}
        assert {"TOLLHOUSE_DATABASE_URL", "TOLLHOUSE_PEPPER"} == required
    settings = settings_of(made, tmp_path)
    assert settings.admin_key is not None
    assert {
        "TOLLHOUSE_DATABASE_URL": settings.database_url,
        "TOLLHOUSE_REDIS_URL": settings.redis_url,
        "TOLLHOUSE_ADMIN_KEY": settings.admin_key.reveal(),
    } == {var: VALUES[var] for var in SECRETS["tollhouse"] - {"TOLLHOUSE_PEPPER"}}
    assert {e["name"] for e in dict(containers(made))[GATEWAY]["env"]} == SECRETS["tollhouse"]


def test_no_secret_is_in_the_files() -> None:
    assert not [o for folder in FOLDERS for o in rendered(K8S / folder).objects if o.startswith("Secret/")]
    told = (K8S / "base" / "kustomization.yaml").read_text()
    assert all(name in told and name in OPERATIONS for name in SECRETS)


def test_selectors_find_the_gateway_and_nothing_else(made: Rendered) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in made.pods().items()}
    selectors = {f"Service/{n}": s["spec"]["selector"] for n, s in made.of_kind("Service").items()}
    selectors |= {
        name: made.objects[name]["spec"]["selector"]["matchLabels"]
        for name in (GATEWAY, "PodDisruptionBudget/tollhouse")
    }
    spread = made.pods()[GATEWAY]["spec"]["topologySpreadConstraints"]
    selectors |= {f"spread over {s['topologyKey']}": s["labelSelector"]["matchLabels"] for s in spread}
    for name, selector in selectors.items():
        assert [pod for pod, has in labels.items() if selects(selector, has)] == [GATEWAY], name
    assert {s["topologyKey"] for s in spread} == {"kubernetes.io/hostname", "topology.kubernetes.io/zone"}
    policy = made.objects["NetworkPolicy/tollhouse"]["spec"]["podSelector"]["matchLabels"]
    assert all(selects(policy, has) for has in labels.values())


def test_ports_lead_to_the_listeners(made: Rendered) -> None:
    (container,) = made.pods()[GATEWAY]["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    services = made.of_kind("Service")
    assert {
        n: [(p["port"], ports[p["targetPort"]]) for p in s["spec"]["ports"]] for n, s in services.items()
    } == {
        "tollhouse": [(4000, 4000)],
        "tollhouse-admin": [(4001, 4001)],
    }
    headless = services[made.objects[GATEWAY]["spec"]["serviceName"]]["spec"]
    assert (headless["clusterIP"], headless["publishNotReadyAddresses"]) == ("None", True)
    annotations = made.pods()[GATEWAY]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["admin"])
    open_in, admin_in = made.objects["NetworkPolicy/tollhouse"]["spec"]["ingress"]
    assert (open_in["ports"], admin_in["ports"]) == ([{"port": ports["http"]}], [{"port": ports["admin"]}])
    assert "from" not in open_in
    assert admin_in["from"]


def test_the_monitor_finds_the_admin_service_by_its_port() -> None:
    made = rendered(K8S / "overlays/production")
    spec = made.objects["ServiceMonitor/tollhouse"]["spec"]
    found = {
        name: [p["name"] for p in service["spec"]["ports"]]
        for name, service in made.of_kind("Service").items()
        if selects(spec["selector"]["matchLabels"], service["metadata"]["labels"])
    }
    assert found == {"tollhouse-admin": [endpoint["port"] for endpoint in spec["endpoints"]]}


async def test_probes_and_scrapes_ask_for_what_is_served(sqlite_url: str) -> None:
    made = rendered(K8S / "base")
    pod = made.pods()[GATEWAY]
    (container,) = pod["spec"]["containers"]
    probes = {
        kind: container[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert {kind: (p["path"], p["port"]) for kind, p in probes.items()} == {
        "startupProbe": ("/livez", "http"),
        "readinessProbe": ("/readyz", "http"),
        "livenessProbe": ("/livez", "http"),
    }
    async with running(sqlite_url) as gw:
        urls = [gw.url + p["path"] for p in probes.values()]
        urls.append(
            f"http://127.0.0.1:{gw.app.admin_port}" + pod["metadata"]["annotations"]["prometheus.io/path"]
        )
        for url in urls:
            async with gw.http.get(url) as answer:
                assert answer.status == 200, url


def test_a_pod_is_given_longer_than_it_drains(made: Rendered, tmp_path: Path) -> None:
    spec = made.pods()[GATEWAY]["spec"]
    (container,) = spec["containers"]
    command, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    drained_s = float(pause_s) + settings_of(made, tmp_path).drain_s + SETTLE_S
    assert spec["terminationGracePeriodSeconds"] > drained_s + 15


def test_it_scales_and_is_disrupted_one_by_one(made: Rendered) -> None:
    scaler = made.objects["HorizontalPodAutoscaler/tollhouse"]["spec"]
    target = scaler["scaleTargetRef"]
    assert f"{target['kind']}/{target['name']}" == GATEWAY
    assert made.objects[GATEWAY]["apiVersion"] == target["apiVersion"]
    assert "replicas" not in made.objects[GATEWAY]["spec"], "applying again would undo what the scaler did"
    assert 2 <= scaler["minReplicas"] < scaler["maxReplicas"]
    assert made.objects["PodDisruptionBudget/tollhouse"]["spec"]["maxUnavailable"] == 1
    kept = made.objects[GATEWAY]["spec"]["persistentVolumeClaimRetentionPolicy"]
    assert kept == {"whenScaled": "Retain", "whenDeleted": "Retain"}
