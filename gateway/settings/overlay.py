"""Documents of the admin API among what the file says, as nodes: from here on nobody tells the two apart but by origin.

The environment does not reach into documents: a reference would show a variable to whoever reads them back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.core.config_overlay import (
    Document,
    Documents,
    Key,
    Kind,
    deployment_entry,
    of_kind,
    problem_place,
    rule_entry,
    rules_around,
)
from gateway.settings.model import Place, Problem
from gateway.settings.section import Section
from gateway.settings.yaml_marks import Node, Origin, Written

_DEPTH_MAX = 20
_OFF = ("false", "no", "off")


@dataclass(slots=True)
class Laid:
    """The file's tree with the documents in it. `shadowed`: those that the file declares too, so that they do nothing."""

    root: Node
    shadowed: dict[Key, Place] = field(default_factory=dict)


def lay(root: Section, documents: Documents, discovered: Mapping[str, str], problems: list[Problem]) -> Laid:
    """`discovered`: providers that are on without being written in the file, and the file that knows them."""
    return _Layer(root, documents, discovered, problems).laid()


class _Layer:
    def __init__(
        self, root: Section, documents: Documents, discovered: Mapping[str, str], problems: list[Problem]
    ) -> None:
        self._file, self._problems, self._discovered = root.file, problems, discovered
        self._documents = documents
        self._entries = dict(root.node.value) if isinstance(root.node.value, dict) else {}
        self._line = root.node.line
        self._laid = Laid(root.node)

    def laid(self) -> Laid:
        self._named(Kind.CREDENTIAL, "credentials")
        self._named(Kind.PROVIDER, "providers")
        self._deployments()
        self._tiers()
        self._named(Kind.VIRTUAL_MODEL, "virtual_models")
        self._rules()
        self._laid.root = Node(self._entries, self._line)
        return self._laid

    def _named(self, kind: Kind, key: str) -> None:
        """Entries of a mapping by name."""
        own = self._mapping(key)
        for document in of_kind(self._documents, kind):
            if document.name in own:
                self._shadow(document, own[document.name])
            else:
                own[document.name] = self._node(document, document.body)
        self._put(key, own)

    def _deployments(self) -> None:
        documents = of_kind(self._documents, Kind.DEPLOYMENT)
        if not documents:
            return
        providers = self._mapping("providers")
        written = {
            name: item for provider, node in providers.items() for name, item in _items(provider, node)
        }
        for document in documents:
            provider = str(document.body.get("provider", ""))
            if document.name in written:
                self._shadow(document, written[document.name])
                continue
            if provider not in providers and provider in self._discovered:
                origin = Origin(self._discovered[provider], f"providers.{provider}")
                providers[provider] = Node({}, 0, origin=origin)
            if provider not in providers:
                self._wrong(document, "provider", f"there is no provider {provider!r}")
                continue
            node = providers[provider]
            entry = dict(node.value) if isinstance(node.value, dict) else {}
            off = entry.get("enabled")
            if off is not None and str(off.value).lower() in _OFF:
                self._wrong(document, "provider", f"{provider} is off: {self._file}:{off.line}")
                continue
            listed = entry.get("deployments")
            before = listed.value if listed is not None and isinstance(listed.value, list) else []
            line = node.line if listed is None else listed.line
            entry["deployments"] = Node([*before, self._node(document, deployment_entry(document))], line)
            providers[provider] = replace(node, value=entry)
        self._put("providers", providers)

    def _tiers(self) -> None:
        fallbacks = self._mapping("fallbacks")
        for document in of_kind(self._documents, Kind.TIER):
            for_tier = document.body.get("fallbacks")
            if for_tier and document.name in fallbacks:
                self._shadow(document, fallbacks[document.name])
            elif for_tier:
                fallbacks[document.name] = self._node(document, for_tier, "fallbacks")
            if not document.body.get("default"):
                continue
            said = self._entries.get("default_tier")
            if said is None:
                self._entries["default_tier"] = self._node(document, document.name, "default")
            elif said.origin is not None:
                self._wrong(document, "default", f"there is one default, and it is {said.value}")
            else:
                self._shadow(document, said)
        self._put("fallbacks", fallbacks)

    def _rules(self) -> None:
        node = self._entries.get("rules")
        if node is not None and node.value is not None and not isinstance(node.value, list):
            return  # whoever reads it says so
        own = node.value if node is not None and isinstance(node.value, list) else []
        names = {_text(item, "name"): item for item in own}
        around = []
        for rules in rules_around(self._documents):
            around.append(
                [self._node(rule, rule_entry(rule)) for rule in rules if not self._declared(rule, names)]
            )
        if any(around):
            line = self._line if node is None else node.line
            self._entries["rules"] = Node([*around[0], *own, *around[1]], line)

    def _declared(self, document: Document, names: Mapping[str, Node]) -> bool:
        if document.name in names:
            self._shadow(document, names[document.name])
        return document.name in names

    def _shadow(self, document: Document, node: Node) -> None:
        self._laid.shadowed[document.key] = Place(self._file, node.line)

    def _wrong(self, document: Document, key: str, message: str) -> None:
        self._problems.append(Problem(problem_place(document.key), 0, key, message))

    def _mapping(self, key: str) -> dict[str, Node]:
        node = self._entries.get(key)
        return dict(node.value) if node is not None and isinstance(node.value, dict) else {}

    def _put(self, key: str, entries: dict[str, Node]) -> None:
        node = self._entries.get(key)
        if entries and (node is None or node.value is None or isinstance(node.value, dict)):
            self._entries[key] = Node(entries, self._line if node is None else node.line)

    def _node(self, document: Document, value: Any, key: str = "") -> Node:
        origin = Origin(problem_place(document.key), key, f"admin API, version {document.version}")
        return replace(self._plain(document, value, key, 0), origin=origin)

    def _plain(self, document: Document, value: Any, path: str, depth: int) -> Node:
        if depth > _DEPTH_MAX:
            self._wrong(document, path, f"nests deeper than {_DEPTH_MAX} levels")
            return Node(None, 0)
        if isinstance(value, Mapping):
            below = {
                str(name): self._plain(document, part, f"{path}.{name}" if path else str(name), depth + 1)
                for name, part in value.items()
            }
            return Node(below, 0)
        if isinstance(value, list | tuple):
            return Node(
                [self._plain(document, part, f"{path}[{i}]", depth + 1) for i, part in enumerate(value)], 0
            )
        if value is None:
            return Node(None, 0)
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if "${" in text:
            self._wrong(document, path, "variables of the environment are not put in here, only in the file")
        return Node(text, 0, written=Written(text, 0, 0, ""))


def _items(provider: str, node: Node) -> Iterator[tuple[str, Node]]:
    """The deployments that are written below a provider, by name."""
    listed = node.value.get("deployments") if isinstance(node.value, dict) else None
    for item in listed.value if listed is not None and isinstance(listed.value, list) else ():
        yield _text(item, "name") or f"{provider}/{_text(item, 'model')}", item


def _text(node: Node, key: str) -> str:
    found = node.value.get(key) if isinstance(node.value, dict) else None
    return found.value if found is not None and isinstance(found.value, str) else ""
