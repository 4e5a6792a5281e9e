"""A memory that is bounded without order of use: two generations, of which the older one is dropped whole."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Generations(Generic[K, V]):
    """Two generations of `capacity` entries: what was not asked for during one is forgotten. `None` is no value."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def get(self, key: K) -> V | None:
        value = self._young.get(key)
        if value is None and (value := self._old.get(key)) is not None:
            self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        if len(self._young) >= self._capacity:
            self._old, self._young = self._young, {}
        self._young[key] = value
