"""What brings Postgres and Redis with it for trying out: docker-compose.yml, and k8s/overlays/small. Neither was ever started
by an engine here (docs/operations.md says what was tried without one); each reference in them is followed, and what the
gateway is given is read by its own reader.
"""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
import yaml

from gateway import __version__
from gateway.app import SETTLE_S
from gateway.settings import load
from tests.operations.manifests import K8S, rendered, variables

ROOT = K8S.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
EXAMPLE = dict(
    line.split("=", 1)
    for line in (ROOT / ".env.example").read_text().splitlines()
    if not line.startswith("#")
)
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SMALL = rendered(K8S / "overlays/small")
STORES = ("StatefulSet/postgres", "Deployment/redis")


# --- docker-compose.yml ---------------------------------------------------------------------------------------


def environment(service: str, given: dict[str, str]) -> dict[str, str]:
    """What its process sees. KeyError for a variable that is required and not given."""

    def filled(match: re.Match[str]) -> str:
        name, _, rest = match[1].partition(":")
        if rest.startswith("-"):
            return given.get(name) or rest[1:]
        return given[name]

    return {
        name: re.sub(r"\$\{([^}]+)\}", filled, str(value))
        for name, value in SERVICES[service].get("environment", {}).items()
    }


def test_the_example_names_all_that_is_asked_for_and_holds_no_value() -> None:
    asked = re.findall(r"\$\{(\w+)(:\?|:-)?", (ROOT / "docker-compose.yml").read_text())
    assert {name for name, _ in asked} == EXAMPLE.keys()
    assert set(EXAMPLE.values()) == {""}
    assert ".env" in (ROOT / ".gitignore").read_text().splitlines()
    assert {name for name, how in asked if how == ":?"} == {
        *("TOLLHOUSE_PEPPER", "TOLLHOUSE_ADMIN_KEY", "POSTGRES_PASSWORD", "POSTGRES_READER_PASSWORD"),
        "GRAFANA_PASSWORD",
    }


def test_what_is_mounted_and_referred_to_is_there() -> None:
    named = set()
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source, target, *how = volume.split(":")
            if source.startswith("."):
                assert (ROOT / source).exists(), volume
                assert how == ["ro"], volume
            else:
                named.add(source)
            assert target.startswith("/"), volume
        for other, when in service.get("depends_on", {}).items():
            if when["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], (name, other)
    assert named == COMPOSE["volumes"].keys()
    assert SERVICES["gateway"]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}
    assert "HEALTHCHECK" in DOCKERFILE
    reader = ROOT / "config/compose/reader.sh"
    assert reader.stat().st_mode & 0o111
    assert subprocess.run(["sh", "-n", str(reader)], check=False).returncode == 0


def test_nothing_is_reachable_from_outside_and_nothing_gains_privileges() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert sorted(ports) == [
        *("127.0.0.1:3000:3000", "127.0.0.1:4000:4000", "127.0.0.1:4001:4001", "127.0.0.1:9090:9090"),
    ]
    for name, service in SERVICES.items():
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name
        image = service["image"].rpartition(":")
        assert image[2] not in ("", "latest"), name
    for name in ("gateway", "migrate"):
        assert (SERVICES[name]["read_only"], SERVICES[name]["cap_drop"]) == (True, ["ALL"])
        assert SERVICES[name]["image"] == f"tollhouse:{__version__}"


@pytest.mark.parametrize("keys", [{}, {"OPENAI_API_KEY": "sk-test"}])
def test_the_gateway_reads_what_it_is_given(keys: dict[str, str]) -> None:
    given = {**dict.fromkeys(EXAMPLE, "a-secret-of-the-tests"), "OPENAI_API_KEY": "", "ANTHROPIC_API_KEY": ""}
    given |= {"TOLLHOUSE_WORKERS": "", **keys}
    for name in ("gateway", "migrate"):
        env = environment(name, given)
        mounts = {v.split(":")[1]: v.split(":")[0] for v in SERVICES[name]["volumes"]}
        file = ROOT / mounts[env["TOLLHOUSE_CONFIG"]]
        needed, _ = variables(file.read_text())
        assert needed <= env.keys()
        settings = load(file, env)
        assert settings.database_url == "postgresql://tollhouse:a-secret-of-the-tests@postgres:5432/tollhouse"
        assert settings.redis_url == "redis://redis:6379/0"
        assert (settings.admin_key is not None, settings.pepper is not None) == (True, True)
    settings = load(ROOT / "config/compose/gateway.yaml", environment("gateway", given))
    assert set(settings.providers) == ({"openai"} if keys else {"demo"})
    published = {port.rpartition(":")[2] for port in SERVICES["gateway"]["ports"]}
    assert published == {str(settings.listen.port), str(settings.admin_listen.port)}
    assert str(settings.state_dir) in {v.split(":")[1] for v in SERVICES["gateway"]["volumes"]}
    assert settings.workers == 2
    grace_s = float(SERVICES["gateway"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > settings.drain_s + SETTLE_S
    postgres = environment("postgres", given)
    assert (postgres["POSTGRES_USER"], postgres["POSTGRES_DB"]) == ("tollhouse", "tollhouse")


def test_prometheus_and_grafana_find_one_another_and_the_gateway() -> None:
    config = yaml.safe_load((ROOT / "config/compose/prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    assert (job["job_name"], job["static_configs"]) == ("tollhouse", [{"targets": ["gateway:4001"]}])
    mounted = {v.split(":")[1] for v in SERVICES["prometheus"]["volumes"]}
    assert set(config["rule_files"]) <= mounted
    sources = (ROOT / "config/grafana/provisioning/datasources").glob("*.yaml")
    asked = {name for source in sources for name in variables(source.read_text())[0]}
    grafana = environment("grafana", dict.fromkeys(EXAMPLE, "x"))
    assert asked <= grafana.keys()
    assert grafana["PROMETHEUS_URL"] == "http://prometheus:9090"
    (provider,) = (ROOT / "config/grafana/provisioning/dashboards").glob("*.yaml")
    path = yaml.safe_load(provider.read_text())["providers"][0]["options"]["path"]
    assert path in {v.split(":")[1] for v in SERVICES["grafana"]["volumes"]}
    assert f"CREATE ROLE {grafana['POSTGRES_READER']} " in (ROOT / "config/compose/reader.sh").read_text()


def test_the_image_is_built_in_two_stages_of_locked_wheels_and_runs_as_nobody() -> None:
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", DOCKERFILE, re.M)
    assert [name for _, name in stages] == ["build", ""]
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert "pip" not in last
    assert "COPY --from=build /opt/tollhouse /opt/tollhouse" in last
    assert "USER 10001:10001" in last
    assert "--require-hashes --only-binary :all:" in DOCKERFILE
    copied = {
        source
        for line in DOCKERFILE.partition("\nFROM python:3.11-slim-bookworm\n")[0].splitlines()
        if line.startswith("COPY ")
        for source in line.split()[1:-1]
    }
    assert all((ROOT / source).exists() for source in copied)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed


# --- k8s/overlays/small ---------------------------------------------------------------------------------------


def test_every_file_of_the_small_overlay_is_used() -> None:
    listed = yaml.safe_load((K8S / "overlays/small/kustomization.yaml").read_text())
    used = {name for name in listed["resources"] if name.endswith(".yaml")}
    used |= {patch["path"] for patch in listed["patches"]}
    assert {p.name for p in (K8S / "overlays/small").glob("*.yaml")} - {"kustomization.yaml"} == used


def test_the_stores_are_locked_down_and_stay_within_bounds() -> None:
    for name in STORES:
        spec = SMALL.pods()[name]["spec"]
        assert (spec["securityContext"]["runAsNonRoot"], spec["automountServiceAccountToken"]) == (
            True,
            False,
        )
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
        assert "memory" in container["resources"]["limits"]
        assert container["image"].rpartition(":")[2] not in ("", "latest")
        claims = SMALL.objects[name]["spec"].get("volumeClaimTemplates", ())
        there = {v["name"] for v in spec.get("volumes", ())} | {c["metadata"]["name"] for c in claims}
        assert {m["name"] for m in container.get("volumeMounts", ())} == there


def test_the_gateway_reaches_its_stores_and_nobody_else_does() -> None:
    gateway = SMALL.pods()["StatefulSet/tollhouse"]["metadata"]["labels"]
    out = {
        p["port"]
        for rule in SMALL.objects["NetworkPolicy/tollhouse"]["spec"]["egress"]
        for p in rule["ports"]
    }
    for name in STORES:
        store = name.partition("/")[2]
        pod = SMALL.pods()[name]
        labels = pod["metadata"]["labels"]
        (port,) = pod["spec"]["containers"][0]["ports"]
        service = SMALL.objects[f"Service/{store}"]["spec"]
        assert service["selector"].items() <= labels.items()
        assert [(p["port"], p["targetPort"]) for p in service["ports"]] == [
            (port["containerPort"], port["name"])
        ]
        policy = SMALL.objects[f"NetworkPolicy/{store}"]["spec"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        (rule,) = policy["ingress"]
        assert rule["ports"] == [{"port": port["containerPort"]}]
        assert rule["from"][0]["podSelector"]["matchLabels"].items() <= gateway.items()
        assert (
            not SMALL.objects["NetworkPolicy/tollhouse"]["spec"]["podSelector"]["matchLabels"].items()
            <= labels.items()
        )
        assert port["containerPort"] in out


def test_the_secret_that_is_asked_for_is_the_one_that_is_told_of() -> None:
    told = (K8S / "overlays/small/kustomization.yaml").read_text()
    secret = re.search(
        r"generic tollhouse (.*?)\n#   kubectl -n tollhouse create secret generic tollhouse-prov", told, re.S
    )
    assert secret
    given = set(re.findall(r"--from-literal=(\w+)=", secret[1]))
    asked = {
        e["valueFrom"]["secretKeyRef"]["key"]
        for pod in SMALL.pods().values()
        for container in pod["spec"]["containers"]
        for e in container.get("env", ())
        if "valueFrom" in e and not e["valueFrom"]["secretKeyRef"].get("optional")
    }
    assert asked == {"TOLLHOUSE_DATABASE_URL", "TOLLHOUSE_PEPPER", "POSTGRES_PASSWORD"}
    assert asked <= given
    url = re.search(r"TOLLHOUSE_DATABASE_URL=postgresql://(\w+):\$PASSWORD@(\w+):(\d+)/(\w+)", secret[1])
    assert url
    env = {
        e["name"]: e.get("value")
        for e in SMALL.pods()["StatefulSet/postgres"]["spec"]["containers"][0]["env"]
    }
    assert url.groups() == (env["POSTGRES_USER"], "postgres", "5432", env["POSTGRES_DB"])
    assert not [name for name in SMALL.objects if name.startswith("Secret/")]


def test_it_is_small() -> None:
    scaler = SMALL.objects["HorizontalPodAutoscaler/tollhouse"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (1, 2)
    (container,) = SMALL.pods()["StatefulSet/tollhouse"]["spec"]["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "250m", "memory": "256Mi"},
        "limits": {"memory": "1Gi"},
    }
