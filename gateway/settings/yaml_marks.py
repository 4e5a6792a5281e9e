"""YAML with line numbers: every value remembers where it was written.

Scalars stay text, so `0.1` is read as the exact decimal that was typed and never passes through a float.
`${NAME}` and `${NAME:-default}` are replaced from the environment; the result is text, never YAML again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import yaml

from gateway.settings.model import Problem

#: libyaml's parser where PyYAML was built with it: ten times as fast, and marks lines too.
LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_DEPTH_MAX = 20
_NULLS = ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True, slots=True)
class Written:
    """A scalar as it stands in the file, quotes and block marks included, and where that begins (counted from 0)."""

    text: str
    line: int
    column: int
    style: str  # "", "'", '"', "|" or ">"


@dataclass(frozen=True, slots=True)
class Origin:
    """Of what is not written in the file that it stands among: `file` and `key` for problems, `place` for where it is
    configured ("" = in no place of its own).
    """

    file: str
    key: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A value and its place. Text for scalars (None = null or empty), a list, or a mapping by key."""

    value: str | list[Node] | dict[str, Node] | None
    line: int
    unresolved: bool = False  # names a variable that is not set, which is reported already
    written: Written | None = None
    origin: Origin | None = None
    column: int = 0  # of its key, or of the item of a list; counts from 1, 0 = not known

    def located(self, offset: int) -> tuple[int, int]:
        """Line and column in the file, counted from 1, of the character at `offset` of the value.

        YAML folds lines and drops indentation, but never a printing character: so those are counted.
        """
        if self.written is None or not isinstance(self.value, str):
            return self.line, 0
        wanted = len("".join(self.value[:offset].split()))
        line, column = self.written.line, self.written.column
        style, text = self.written.style, self.written.text
        header = text.find("\n") if style in "|>" and style else len(style) - 1
        escape = {"'": "''", '"': "\\"}.get(style, "")
        at = 0
        while at < len(text):
            character = text[at]
            if at > header:
                if escape and text.startswith(escape, at):
                    at += 1
                    column += 1
                    character = text[at : at + 1]
                if not character.isspace():
                    if not wanted:
                        break
                    wanted -= 1
            line, column = (line + 1, 0) if character == "\n" else (line, column + 1)
            at += 1
        return line + 1, column + 1

    @property
    def kind(self) -> str:
        if isinstance(self.value, dict):
            return "a mapping"
        if isinstance(self.value, list):
            return "a list"
        return "nothing" if self.value is None else "a single value"


def parse(text: str, file: str, env: Mapping[str, str], problems: list[Problem]) -> Node:
    """The document as marked nodes; everything wrong is added to `problems`, a broken file reads as empty."""
    try:
        root = yaml.compose(text, Loader=LOADER)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        problems.append(Problem(file, mark.line + 1 if mark else 0, "", f"not valid YAML: {what}"))
        return Node({}, 1)
    except yaml.YAMLError as error:
        problems.append(Problem(file, 0, "", f"not valid YAML: {str(error).splitlines()[0]}"))
        return Node({}, 1)
    if root is None:
        return Node({}, 1)
    node = _Reader(text, file, env, problems).read(root, "", ())
    if isinstance(node.value, dict):
        return node
    problems.append(Problem(file, node.line, "", f"the file must hold a mapping, not {node.kind}"))
    return Node({}, 1)


def plain(text: str) -> str:
    """What is too much in a text that comes over a network, "" if nothing: it may neither nest deeply nor repeat itself
    by anchors, which can stand for any size.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=LOADER):
            if isinstance(event, yaml.AliasEvent):
                return "anchors cannot be used here"
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > _DEPTH_MAX:
                return f"nests deeper than {_DEPTH_MAX} levels"
    except yaml.YAMLError:
        return ""  # `parse` says where
    return ""


class _Reader:
    def __init__(self, text: str, file: str, env: Mapping[str, str], problems: list[Problem]) -> None:
        self._lines = text.split("\n")
        self._file, self._env, self._problems = file, env, problems

    def _wrong(self, line: int, key: str, message: str, hint: str = "") -> None:
        self._problems.append(Problem(self._file, line, key, message, hint))

    def read(self, node: yaml.Node, path: str, above: tuple[int, ...]) -> Node:
        line, column = node.start_mark.line + 1, node.start_mark.column + 1
        if id(node) in above:
            self._wrong(line, path, "an anchor may not contain itself")
            return Node(None, line)
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node, path, above), line, column=column)
        if isinstance(node, yaml.SequenceNode):
            items = [self.read(item, f"{path}[{i}]", above) for i, item in enumerate(node.value)]
            return Node(items, line)
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, path, line, column)

    def _mapping(self, node: yaml.MappingNode, path: str, above: tuple[int, ...]) -> dict[str, Node]:
        out: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self._wrong(line, path, "a key must be plain text")
                continue
            key = str(key_node.value)
            full = f"{path}.{key}" if path else key
            if key in out:
                self._wrong(line, full, f"is given twice; the first time in line {out[key].line}")
                continue
            value = self.read(value_node, full, above)
            # The key's place, not the value's: a block value starts one line below its key.
            column = key_node.start_mark.column + 1
            out[key] = Node(value.value, line, value.unresolved, value.written, column=column)
        return out

    def _scalar(self, node: yaml.ScalarNode, path: str, line: int, column: int) -> Node:
        text = str(node.value)
        if not node.style and text in _NULLS:
            return Node(None, line, column=column)
        missing = False

        def resolve(match: re.Match[str]) -> str:
            nonlocal missing
            name, default = match.group(1), match.group(2)
            value = self._env.get(name)
            if value:
                return value
            if default is None:
                missing = True
                self._wrong(
                    line,
                    path,
                    f"the environment variable {name} is not set",
                    f"set it, or write ${{{name}:-}} if it may be missing",
                )
                return ""
            return default

        written = self._written(node)
        if not _REFERENCE.search(text):
            return Node(text, line, written=written, column=column)
        resolved = _REFERENCE.sub(resolve, text)
        # A reference that yields nothing means "not set", so that an optional secret may simply be absent.
        return Node(None if missing else resolved or None, line, missing, written, column=column)

    def _written(self, node: yaml.ScalarNode) -> Written:
        start, end = node.start_mark, node.end_mark
        lines = self._lines[start.line : end.line + 1]
        if lines:
            lines[-1] = lines[-1][: end.column] if end.line < len(self._lines) else lines[-1]
            lines[0] = lines[0][start.column :]
        return Written("\n".join(lines), start.line, start.column, node.style or "")
