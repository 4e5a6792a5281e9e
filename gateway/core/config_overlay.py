"""What operators write over the admin API: documents of the shape that the configuration has, laid over what files say.

Files are the base: what one declares, no document replaces. Rules of documents stand around those of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

#: Where the file's own rules stand among those of documents: a lower order is asked before them.
FILE_ORDER = 0
#: Where a rule stands that does not say: behind those of the file.
DEFAULT_ORDER = 100


class Kind(StrEnum):
    CREDENTIAL = "credential"
    PROVIDER = "provider"
    DEPLOYMENT = "deployment"
    TIER = "tier"
    VIRTUAL_MODEL = "virtual_model"
    RULE = "rule"

    @property
    def words(self) -> str:
        return self.value.replace("_", " ")


Key = tuple[Kind, str]


@dataclass(frozen=True, slots=True)
class Document:
    """One resource as it would stand in the configuration, below its name. A deployment also has its `provider`, a rule
    its `order`, a tier `fallbacks` and `default`. `version` grows with every change, also over a deletion.
    """

    kind: Kind
    name: str
    body: Mapping[str, Any]
    version: int = 1
    created_at_ms: int = 0
    updated_at_ms: int = 0

    @property
    def key(self) -> Key:
        return self.kind, self.name

    @property
    def title(self) -> str:
        return title(self.key)


Documents = tuple[Document, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """What the store has. `stamp` tells one state of it from another; `versions` are those of deleted documents, too."""

    stamp: int = 0
    documents: Documents = ()
    versions: Mapping[Key, int] | None = None

    def find(self, key: Key) -> Document | None:
        return next((document for document in self.documents if document.key == key), None)

    def next_version(self, key: Key) -> int:
        return (self.versions or {}).get(key, 0) + 1


@dataclass(frozen=True, slots=True)
class Write:
    """A document that is to be, or (`body` None) not to be any more."""

    key: Key
    body: Mapping[str, Any] | None
    version: int
    made: bool = False  # it is new

    def __post_init__(self) -> None:
        if self.body is None and self.made:
            raise ValueError("what is deleted is not made")


def title(key: Key) -> str:
    """ "deployment gpu/standard", for people."""
    return f"{key[0].words} {key[1]}"


def problem_place(key: Key) -> str:
    """What stands in place of a file in problems with that document."""
    return f"admin API: {title(key)}"


def written(documents: Iterable[Document], writes: Sequence[Write]) -> Documents:
    """The documents after the writes, in the one order that they have everywhere."""
    after = {document.key: document for document in documents}
    for write in writes:
        before = after.pop(write.key, None)
        if write.body is not None:
            created_at_ms = 0 if before is None else before.created_at_ms
            after[write.key] = Document(*write.key, write.body, write.version, created_at_ms)
    return ordered(after.values())


def ordered(documents: Iterable[Document]) -> Documents:
    kinds = list(Kind)
    return tuple(sorted(documents, key=lambda d: (kinds.index(d.kind), d.name)))


def patched(body: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that `changes` names are replaced whole, and those that it makes None are taken away."""
    return {name: value for name, value in {**body, **changes}.items() if value is not None}


def of_kind(documents: Iterable[Document], kind: Kind) -> list[Document]:
    return [document for document in documents if document.kind is kind]


def rules_around(documents: Iterable[Document]) -> tuple[list[Document], list[Document]]:
    """Rules before those of the file and behind them, each in its order, then by name."""
    rules = sorted(of_kind(documents, Kind.RULE), key=lambda d: (_order(d), d.name))
    return [d for d in rules if _order(d) < FILE_ORDER], [d for d in rules if _order(d) >= FILE_ORDER]


def users(documents: Iterable[Document], key: Key) -> list[Key]:
    """Documents that name this one: deployments their provider, providers their credential."""
    kind, name = key
    field = {Kind.PROVIDER: (Kind.DEPLOYMENT, "provider"), Kind.CREDENTIAL: (Kind.PROVIDER, "credential")}
    if kind not in field:
        return []
    user, named = field[kind]
    return [d.key for d in of_kind(documents, user) if d.body.get(named) == name]


def exported(documents: Iterable[Document]) -> dict[str, Any]:
    """The documents as the text of a configuration would have them. Rules are all in one list; those with an order below 0
    belong before the file's own.
    """
    documents = ordered(documents)
    config: dict[str, Any] = {}
    for document in of_kind(documents, Kind.CREDENTIAL):
        config.setdefault("credentials", {})[document.name] = dict(document.body)
    for document in of_kind(documents, Kind.PROVIDER):
        config.setdefault("providers", {})[document.name] = dict(document.body)
    for document in of_kind(documents, Kind.DEPLOYMENT):
        provider = config.setdefault("providers", {}).setdefault(document.body["provider"], {})
        provider.setdefault("deployments", []).append(deployment_entry(document))
    for document in of_kind(documents, Kind.TIER):
        if document.body.get("default"):
            config["default_tier"] = document.name
        if document.body.get("fallbacks"):
            config.setdefault("fallbacks", {})[document.name] = list(document.body["fallbacks"])
    for document in of_kind(documents, Kind.VIRTUAL_MODEL):
        config.setdefault("virtual_models", {})[document.name] = dict(document.body)
    before, behind = rules_around(documents)
    if before or behind:
        config["rules"] = [rule_entry(document) for document in (*before, *behind)]
    return config


def deployment_entry(document: Document) -> dict[str, Any]:
    """As it stands below its provider."""
    return {"name": document.name, **{k: v for k, v in document.body.items() if k != "provider"}}


def rule_entry(document: Document) -> dict[str, Any]:
    """As it stands in the list of rules."""
    return {"name": document.name, **{k: v for k, v in document.body.items() if k != "order"}}


def _order(document: Document) -> int:
    order: int = document.body.get("order", DEFAULT_ORDER)
    return order
