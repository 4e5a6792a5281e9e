"""Reading a marked mapping: each key is asked for by name and kind; what nobody asked for is a problem.

Every reader returns its default after noting a problem, so that one pass finds everything that is wrong.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from typing import TypeVar

from gateway.core.money import MAX_NANO_USD, NANO_PER_USD, PICO_PER_USD
from gateway.settings.model import Listen, Problem
from gateway.settings.yaml_marks import Node

E = TypeVar("E", bound=StrEnum)
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Section:
    """One mapping of the file. Call `done()` when everything was asked for."""

    def __init__(
        self, node: Node, path: str, file: str, problems: list[Problem], *, exact: bool = False
    ) -> None:
        self.node, self.path, self.file, self._problems = node, path, file, problems
        self._exact = exact
        self._asked: list[str] = []
        if node.value is None:
            self._entries: dict[str, Node] = {}
        elif isinstance(node.value, dict):
            self._entries = node.value
        else:
            self._entries = {}
            self.wrong("", f"must be a mapping, not {node.kind}")

    @property
    def line(self) -> int:
        return self.node.line

    def __contains__(self, key: str) -> bool:
        """The key was written and is not empty; to ask that is to know the key."""
        node = self._entry(key)
        return node is not None and node.value is not None

    @property
    def names(self) -> list[str]:
        """Every key that was written, empty ones included."""
        return list(self._entries)

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path and key else self.path or key

    def unresolved(self, key: str) -> bool:
        """The value names an environment variable that is not set; that is reported already."""
        return key in self._entries and self._entries[key].unresolved

    def wrong(self, key: str, message: str, hint: str = "") -> None:
        if self.unresolved(key):
            return
        node = self._entries.get(key)
        if node is not None and node.origin is not None:
            self._problems.append(Problem(node.origin.file, 0, node.origin.key, message, hint))
            return
        at = node or self.node
        column = at.column if self._exact else 0
        self._problems.append(Problem(self.file, at.line, self.at(key), message, hint, column))

    def exact(self) -> Section:
        """The same mapping; problems of what is read through this one name the column as well."""
        other = Section(self.node, self.path, self.file, self._problems, exact=True)
        other._asked = self._asked
        return other

    def wrong_at(self, key: str, offset: int, message: str, hint: str = "") -> None:
        """The character at `offset` of the text below `key` is where it goes wrong."""
        line, column = self._entries[key].located(offset)
        self._problems.append(Problem(self.file, line, self.at(key), message, hint, column))

    def done(self) -> None:
        for key in self._entries:
            if key not in self._asked:
                near = difflib.get_close_matches(key, self._asked, n=1)
                known = "known here: " + ", ".join(sorted(self._asked))
                self.wrong(key, "there is no such setting", f"did you mean {near[0]}?" if near else known)

    # --- one value ---------------------------------------------------------------------------------------

    def text(self, key: str, default: str = "") -> str:
        value = self._scalar(key)
        return default if value is None else value

    def required(self, key: str, hint: str = "") -> str:
        value = self._scalar(key)
        if key not in self:
            self.wrong(key, "is required", hint)
        return value or ""

    def choice(self, key: str, kind: type[E], default: E) -> E:
        value = self._scalar(key)
        if value is None:
            return default
        try:
            return kind(value)
        except ValueError:
            allowed = [str(m) for m in kind]
            near = difflib.get_close_matches(value, allowed, n=1)
            self.wrong(
                key,
                f"must be one of {', '.join(allowed)}, not {value!r}",
                f"did you mean {near[0]}?" if near else "",
            )
            return default

    def optional_choice(self, key: str, kind: type[E]) -> E | None:
        return self.choice(key, kind, next(iter(kind))) if key in self else None

    def flag(self, key: str, default: bool) -> bool:
        value = self._scalar(key)
        if value is None:
            return default
        if value.lower() not in _FLAGS:
            self.wrong(key, f"must be true or false, not {value!r}")
        return _FLAGS.get(value.lower(), default)

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        value = self.optional_integer(key, low, high)
        return default if value is None else value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        value = self._scalar(key)
        if value is None:
            return None
        digits = value.replace("_", "")
        if not (digits.isascii() and digits.lstrip("-").isdigit()):
            self.wrong(key, f"must be a whole number, not {value!r}")
            return None
        if not low <= int(digits) <= high:
            self.wrong(key, f"must be from {low} to {high}, not {value}")
            return None
        return int(digits)

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self._scalar(key)
        if value is None:
            return default
        try:
            parsed = float(value)
        except ValueError:
            parsed = math.nan
        if not low <= parsed <= high:
            self.wrong(key, f"must be a number from {low:g} to {high:g}, not {value!r}")
            return default
        return parsed

    def nano_usd(self, key: str) -> int | None:
        """Dollars, exact to the nano-dollar: "12.50"."""
        return self._dollars(key, NANO_PER_USD, MAX_NANO_USD)

    def pico_usd_per_token(self, key: str, most: int) -> int | None:
        """Dollars per million tokens as pico-dollars per token, exactly: "0.30" is 300,000."""
        return self._dollars(key, PICO_PER_USD // 1_000_000, most)

    def _dollars(self, key: str, unit: int, most: int) -> int | None:
        value = self._scalar(key)
        if value is None:
            return None
        try:
            exact = Decimal(value) * unit
            whole = int(exact)
        except (InvalidOperation, OverflowError, ValueError):
            self.wrong(key, f"must be an amount in dollars, not {value!r}", 'for example "12.50"')
            return None
        if exact != whole:
            self.wrong(key, f"is finer than {Decimal(1) / unit:f} dollars: {value}")
            return None
        if not 0 <= whole <= most:
            self.wrong(key, f"must be from 0 to {most // unit} dollars, not {value}")
            return None
        return whole

    def listen(self, key: str, default: str) -> Listen:
        value = self.text(key, default)
        host, _, port = value.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdigit() or not 0 <= int(port) <= 65535:
            self.wrong(key, f"must be host:port, not {value!r}", f"for example {default}")
            host, _, port = default.rpartition(":")
        return Listen(host, int(port))

    # --- several values ------------------------------------------------------------------------------------

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of words; a single word counts as a list of one."""
        node = self._entry(key)
        if node is None or node.value is None:
            return ()
        if isinstance(node.value, str):
            return (node.value,)
        if isinstance(node.value, dict):
            self.wrong(key, "must be a list, not a mapping")
            return ()
        words = []
        for i, item in enumerate(node.value):
            if isinstance(item.value, str):
                words.append(item.value)
            else:
                problem = Problem(
                    self.file, item.line, f"{self.at(key)}[{i}]", f"must be text, not {item.kind}"
                )
                self._problems.append(problem)
        return tuple(words)

    def section(self, key: str) -> Section:
        """The mapping below `key`; an empty one if it is not there."""
        node = self._entry(key) or Node(None, self.node.line)
        return self._below(node, self.at(key))

    def sections(self, key: str) -> Iterator[Section]:
        """Each mapping of the list below `key`."""
        node = self._entry(key)
        if node is None or node.value is None:
            return
        if not isinstance(node.value, list):
            self.wrong(key, f"must be a list, not {node.kind}")
            return
        for i, item in enumerate(node.value):
            yield self._below(item, f"{self.at(key)}[{i}]")

    def _below(self, node: Node, path: str) -> Section:
        if node.origin is None:
            return Section(node, path, self.file, self._problems, exact=self._exact)
        return Section(node, node.origin.key, node.origin.file, self._problems, exact=self._exact)

    def named(self) -> Iterator[tuple[str, Section]]:
        """Each entry of a mapping whose keys are names chosen by the operator."""
        for name in self._entries:
            yield name, self.section(name)

    def is_single(self, key: str) -> bool:
        node = self._entry(key)
        return node is not None and isinstance(node.value, str)

    def is_list(self, key: str) -> bool:
        node = self._entry(key)
        return node is not None and isinstance(node.value, list)

    def _entry(self, key: str) -> Node | None:
        if key not in self._asked:
            self._asked.append(key)
        return self._entries.get(key)

    def _scalar(self, key: str) -> str | None:
        node = self._entry(key)
        if node is None or node.value is None:
            return None
        if isinstance(node.value, str):
            return node.value
        self.wrong(key, f"must be a single value, not {node.kind}")
        return None
