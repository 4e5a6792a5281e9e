"""What kustomize makes of a folder, as far as the folders of this repository use it."""

from __future__ import annotations

import re
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parents[2] / "k8s"
Object = dict[str, Any]
_KNOWN = frozenset(
    {"apiVersion", "kind", "labels", "configMapGenerator", "resources", "components", "namespace", "images"}
    | {"patches"}
)


@dataclass(slots=True)
class Rendered:
    """ "Kind/name" -> object; ConfigMaps without the digest that kustomize appends. `configs`: text of gateway.yaml."""

    objects: dict[str, Object] = field(default_factory=dict)

    def of_kind(self, kind: str) -> dict[str, Object]:
        return {o["metadata"]["name"]: o for o in self.objects.values() if o["kind"] == kind}

    def pods(self) -> dict[str, Object]:
        """Pod templates by the name of what makes them."""
        return {
            name: o["spec"]["template"] for name, o in self.objects.items() if "template" in o.get("spec", {})
        }

    @property
    def configuration(self) -> str:
        return str(self.of_kind("ConfigMap")["tollhouse"]["data"]["gateway.yaml"])


def rendered(folder: Path) -> Rendered:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(kustomization) - _KNOWN
    if unknown:
        raise ValueError(f"{folder}: {sorted(unknown)} would be ignored here")
    found = Rendered()
    for name in (*kustomization["resources"], *kustomization.get("components", ())):
        path = (folder / name).resolve()
        for one in rendered(path).objects.values() if path.is_dir() else yaml.safe_load_all(path.read_text()):
            key = f"{one['kind']}/{one['metadata']['name']}"
            if key in found.objects:
                raise ValueError(f"{folder}: {key} twice")
            found.objects[key] = one
    for entry in kustomization.get("configMapGenerator", ()):
        text = {file: (folder / file).read_text() for file in entry["files"]}
        found.objects[f"ConfigMap/{entry['name']}"] = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": entry["name"]},
            "data": text,
        }
    for patch in kustomization.get("patches", ()):
        change = yaml.safe_load((folder / patch["path"]).read_text())
        key = f"{change['kind']}/{change['metadata']['name']}"
        found.objects[key] = _merged(found.objects[key], change)
    for entry in kustomization.get("labels", ()):
        for one in found.objects.values():
            one["metadata"].setdefault("labels", {}).update(entry["pairs"])
            if entry.get("includeTemplates") and "template" in one.get("spec", {}):
                one["spec"]["template"]["metadata"].setdefault("labels", {}).update(entry["pairs"])
    for image in kustomization.get("images", ()):
        for pod in found.pods().values():
            for container in pod["spec"]["containers"]:
                if container["image"].split(":")[0] == image["name"]:
                    container["image"] = f"{image['newName']}:{image['newTag']}"
    return found


def _merged(old: Any, new: Any) -> Any:
    """A strategic merge: maps by key, lists of named things by name; any other list is replaced."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{k: _merged(old[k], v) if k in old else v for k, v in new.items()}}
    if isinstance(old, list) and isinstance(new, list) and all("name" in one for one in [*old, *new]):
        by_name = {one["name"]: one for one in new}
        kept = [_merged(one, by_name.pop(one["name"], {})) for one in deepcopy(old)]
        return kept + list(by_name.values())
    return new


def variables(text: str) -> tuple[set[str], set[str]]:
    """Names of the environment that a configuration needs, and those that it has a default for."""
    found = re.findall(r"\$\{(\w+)(:-)?", re.sub(r"(^|\s)#.*", "", text))
    return {name for name, default in found if not default}, {name for name, default in found if default}
