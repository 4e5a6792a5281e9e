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
    for name, node in _entries(_at(root.node, "credentials")):
        found[f"credential:{name}"] = _place(root, node)
    for name, node in _entries(_at(root.node, "providers")):
        if node.origin is None or node.origin.place:
            found[f"provider:{name}"] = _place(root, node)
        key = _at(node, "key")
        if key is not None:
            found[f"credential:{name}"] = Place(root.file, key.line)
        for item in _items(_at(node, "deployments")):
            own = _text(item, "name") or f"{name}/{_text(item, 'model')}"
            found[f"deployment:{own}"] = _place(root, item)
    found |= _rules(root, root.node, "")
    for name, node in _entries(_at(root.node, "virtual_models")):
        found |= _rules(root, node, f"{name}/")
    for name, node in _entries(_at(root.node, "fallbacks")):
        found[f"fallbacks:{name}"] = _place(root, node)
    for name, node in _entries(_at(root.node, "virtual_models")):
        found[f"virtual_model:{name}"] = _place(root, node)
    for name in _SINGLE:
        single = _at(root.node, name)
        if single is not None:
            found[name] = _place(root, single)
    return found


def _rules(root: Section, node: Node, prefix: str) -> dict[str, Place]:
    return {
        f"rule:{prefix}{_text(item, 'name')}": _place(root, item if node.origin is None else node)
        for item in _items(_at(node, "rules"))
    }


def _place(root: Section, node: Node) -> Place:
    if node.origin is not None:
        return Place(node.origin.place, 0)
    return Place(root.file, node.line)


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
