"""Where things were configured: file and line of providers, credentials, deployments, rules and what else has a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gateway.settings.model import Place
from gateway.settings.section import Section
from gateway.settings.yaml_marks import Node

_SINGLE = ("default_tier", "mode", "webhook", "discover_providers")


def places(
    root: Section, known: Section, key_env: Mapping[str, tuple[str, ...]], env: Mapping[str, str]
) -> dict[str, Place]:
    """ "provider:NAME", "credential:NAME", "deployment:NAME", "rule:NAME", "rule:VIRTUAL/NAME", and single settings by
    their own name -> where it is written. `known` is providers.yaml; a key out of the environment has the variable's
    name as its file. What is not in there comes with the release's price list.
    """
    found: dict[str, Place] = {}
    for name, node in _entries(_at(known.node, "providers")):
        found[f"provider:{name}"] = Place(known.file, node.line)
        variable = next((n for n in key_env.get(name, ()) if env.get(n, "").strip()), "")
        if variable:
            found[f"credential:{name}"] = Place(f"${variable}", 0)
    for name, node in _entries(_at(root.node, "providers")):
        found[f"provider:{name}"] = Place(root.file, node.line)
        key = _at(node, "key")
        if key is not None:
            found[f"credential:{name}"] = Place(root.file, key.line)
        for item in _items(_at(node, "deployments")):
            own = _text(item, "name") or f"{name}/{_text(item, 'model')}"
            found[f"deployment:{own}"] = Place(root.file, item.line)
    found |= _rules(root, root.node, "")
    for name, node in _entries(_at(root.node, "virtual_models")):
        found |= _rules(root, node, f"{name}/")
    for name in _SINGLE:
        single = _at(root.node, name)
        if single is not None:
            found[name] = Place(root.file, single.line)
    return found


def _rules(root: Section, node: Node, prefix: str) -> dict[str, Place]:
    return {
        f"rule:{prefix}{_text(item, 'name')}": Place(root.file, item.line)
        for item in _items(_at(node, "rules"))
    }


def _at(node: Node | None, key: str) -> Node | None:
    return node.value.get(key) if node is not None and isinstance(node.value, dict) else None


def _entries(node: Node | None) -> Iterator[tuple[str, Node]]:
    if node is not None and isinstance(node.value, dict):
        yield from node.value.items()


def _items(node: Node | None) -> Iterator[Node]:
    if node is not None and isinstance(node.value, list):
        yield from node.value


def _text(node: Node, key: str) -> str:
    found = _at(node, key)
    return found.value if found is not None and isinstance(found.value, str) else ""
