"""Manifests against the published API schemas of two Kubernetes versions, and as the real kustomize renders them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from importlib.resources import files
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from tests.operations.manifests import K8S, Object, rendered

VERSIONS = ("1.34.0", "1.37.0")
FOLDERS = ("base", "monitoring", "overlays/small", "overlays/production", "overlays/gpu")
#: Kinds of operators, whose schemas are not Kubernetes' own.
OTHERS = {"ServiceMonitor", "PrometheusRule", "ScaledObject"}


@cache
def _schemas(version: str) -> Any:
    """Unknown fields are errors in these; a misspelt one would be dropped by a cluster without a word."""
    return files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}-local-strict"


@cache
def _registry(version: str) -> Registry[Any]:
    definitions = json.loads((_schemas(version) / "_definitions.json").read_text())
    return Resource.from_contents(definitions) @ Registry()


@cache
def validator(version: str, kind: str, api_version: str) -> Draft202012Validator:
    """Raises FileNotFoundError for a kind that this version does not have."""
    group, _, name = api_version.rpartition("/")
    file = "-".join(part for part in (kind.lower(), group.split(".")[0], name) if part) + ".json"
    schema = json.loads((_schemas(version) / file).read_text())
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ _registry(version))


def wrong(version: str, made: Object) -> list[str]:
    found = validator(version, made["kind"], made["apiVersion"]).iter_errors(made)
    return [f"{made['kind']}/{made['metadata']['name']}: {e.json_path}: {e.message}" for e in found]


def all_of(folder: str) -> Iterator[Object]:
    return (o for o in rendered(K8S / folder).objects.values() if o["kind"] not in OTHERS)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_manifest_is_what_the_api_of_that_version_takes(folder: str, version: str) -> None:
    assert [error for made in all_of(folder) for error in wrong(version, made)] == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_misspelt_field_and_a_wrong_type_are_found(version: str) -> None:
    made = deepcopy(rendered(K8S / "base").objects["StatefulSet/tollhouse"])
    pod = made["spec"]["template"]["spec"]
    pod["terminationGracePeriodSecond"] = 60
    pod["containers"][0]["ports"][0]["containerPort"] = "http"
    paths = {error.split(": ")[1] for error in wrong(version, made)}
    assert paths == {"$.spec.template.spec", "$.spec.template.spec.containers[0].ports[0].containerPort"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_real_kustomize_renders_the_same_objects(folder: str) -> None:
    """Where it is installed, alone or in kubectl; where it is not, `rendered` alone has read the folder."""
    own = shutil.which("kustomize")
    command = [own, "build"] if own else ["kubectl", "kustomize"]
    ours = {(o["kind"], o["metadata"]["name"]) for o in rendered(K8S / folder).objects.values()}
    assert ours
    if shutil.which(command[0]) is None:
        return
    text = subprocess.run([*command, str(K8S / folder)], check=True, capture_output=True, text=True).stdout
    made = [o for o in yaml.safe_load_all(text) if o is not None]
    generated = {o["metadata"]["name"] for o in made if o["kind"] == "ConfigMap"}
    theirs = {(o["kind"], o["metadata"]["name"]) for o in made if o["kind"] != "ConfigMap"}
    assert theirs == {pair for pair in ours if pair[0] != "ConfigMap"}
    for kind, name in ours:  # kustomize appends a digest to those that it generates
        assert kind != "ConfigMap" or any(made.startswith(name) for made in generated)
    for version in VERSIONS:
        assert [e for o in made if o["kind"] not in OTHERS for e in wrong(version, o)] == []
