"""The manifests say what the image and the gateway really offer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gateway import __version__
from gateway.settings import load

BASE = Path(__file__).resolve().parents[1] / "k8s" / "base"


def documents() -> dict[str, dict[str, Any]]:
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    found = [doc for name in names for doc in yaml.safe_load_all((BASE / name).read_text())]
    return {f"{doc['kind']}/{doc['metadata']['name']}": doc for doc in found}


def test_every_file_is_a_resource_and_every_image_is_this_version() -> None:
    listed = set(yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"])
    assert {p.name for p in BASE.glob("*.yaml")} - {"kustomization.yaml"} == listed
    pods = [
        doc["spec"]["template"]["spec"]
        for doc in documents().values()
        if "template" in doc["spec" if "spec" in doc else "metadata"]
    ]
    images = {c["image"] for pod in pods for c in pod["containers"]}
    assert images == {f"tollhouse:{__version__}"}
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_configuration_is_one_that_the_gateway_takes(tmp_path: Path) -> None:
    text = documents()["ConfigMap/tollhouse"]["data"]["gateway.yaml"]
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    env = {
        "TOLLHOUSE_DATABASE_URL": "postgresql://tollhouse@postgres/tollhouse",
        "TOLLHOUSE_PEPPER": "p" * 64,
        "OPENAI_API_KEY": "sk-test",
    }
    settings = load(file, env)
    stateful = documents()["StatefulSet/tollhouse"]["spec"]["template"]["spec"]
    assert (settings.listen.port, settings.admin_listen.port) == (4000, 4001)
    ports = {p["name"]: p["containerPort"] for p in stateful["containers"][0]["ports"]}
    assert ports == {"http": settings.listen.port, "admin": settings.admin_listen.port}
    assert stateful["terminationGracePeriodSeconds"] > settings.drain_s + 45
