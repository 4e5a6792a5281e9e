"""The part of CEL that rules are made of, parsed and typed, and compiled to Python.

The CEL library evaluates a rule in about half a microsecond but needs 50 us to take in the variables, which is more
than all rules of a request may cost. Every field has one static type here, so what is left of CEL's semantics is
Python's: comparisons, `&&`, `||`, `!`, `? :`, `in`, arithmetic on one kind of number, labels, `startsWith`,
`endsWith`, `contains`, `double()`, `has()`. Whatever else CEL has raises `Beyond`, and the library evaluates it.
CEL's `&&` and `||` absorb an error on one side if the other decides; Python's do not, so whoever runs the compiled
form asks the library about an expression that raised and has such an operator (`absorbs`).

CEL: github.com/google/cel-spec, language definition, read November 2026; the library's own behaviour is the measure
(tests/core/test_expressions.py plays random expressions through both).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

INT_MAX = 2**63 - 1

BOOL, INT, DOUBLE, STRING, LABELS, LIST, PART = "bool", "int", "double", "string", "labels", "list", "part"
_NUMBERS = (INT, DOUBLE)
#: The type of each field, by its path: {"request": {"model": "string"}, "cache": {"fast": {...}}}.
Fields = Mapping[str, "str | Fields"]


class ExpressionError(ValueError):
    """The expression cannot work. `offset` counts characters from 0."""

    def __init__(self, message: str, offset: int) -> None:
        self.message, self.offset = message, offset
        super().__init__(message)


class Beyond(Exception):
    """CEL that is not compiled here."""


@dataclass(frozen=True, slots=True)
class Node:
    """One typed piece of an expression. `op` is literal, field, label, has, list, call, method or an operator."""

    op: str
    type: str
    at: int
    args: tuple[Node, ...] = ()
    value: object = None  # of a literal; a field's path, a function's or method's name

    def walk(self) -> Iterator[Node]:
        yield self
        for arg in self.args:
            yield from arg.walk()


class _Token(NamedTuple):
    kind: str  # name, int, float, string, op, end
    text: str
    at: int


_TOKEN = re.compile(
    r"""\s+|//[^\n]*
    |(?P<float>\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
    |(?P<int>\d+)
    |(?P<string>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")
    |(?P<name>[A-Za-z_]\w*)
    |(?P<op>&&|\|\||==|!=|<=|>=|[-+*/%<>!?:.,()\[\]])""",
    re.VERBOSE,
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "`": "`"}
_MACROS = frozenset({"all", "exists", "exists_one", "map", "filter"})
_METHODS = frozenset({"startsWith", "endsWith", "contains"})
_COMPARISONS = frozenset({"==", "!=", "<", "<=", ">", ">="})


def _tokens(text: str) -> list[_Token]:
    found, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise Beyond(text[at])
        if match.lastgroup:
            found.append(_Token(match.lastgroup, match[0], at))
        at = match.end()
        glued = match.lastgroup in ("int", "float", "name") and text[at : at + 1] in ("u", "'", '"', "x")
        if glued or (match.lastgroup == "string" and text[at : at + 1] == match[0][0]):
            raise Beyond("unsigned, raw, bytes, hexadecimal and triple-quoted literals")
    return [*found, _Token("end", "", len(text))]


def parse(text: str, fields: Fields) -> Node:
    """The typed tree of an expression that the library has accepted. Raises `ExpressionError` or `Beyond`."""
    parser = _Parser(_tokens(text), fields)
    node = parser.ternary()
    parser.expect_end()
    return node


class _Parser:
    """Recursive descent, one method per level of CEL's grammar."""

    def __init__(self, tokens: list[_Token], fields: Fields) -> None:
        self._tokens, self._fields, self._i = tokens, fields, 0

    def _peek(self, *texts: str) -> bool:
        token = self._tokens[self._i]
        return token.kind in ("op", "name") and token.text in texts

    def _take(self) -> _Token:
        token = self._tokens[self._i]
        self._i += 1
        return token

    def _expect(self, text: str) -> None:
        if self._take().text != text:
            raise Beyond(text)

    def expect_end(self) -> None:
        if self._tokens[self._i].kind != "end":
            raise Beyond("more")

    def ternary(self) -> Node:
        test = self._or()
        if not self._peek("?"):
            return test
        at = self._take().at
        yes = self._or()
        self._expect(":")
        no = self.ternary()
        _need(test, BOOL, "? needs true or false before it")
        if yes.type != no.type:
            raise ExpressionError(f"the two sides of : are {yes.type} and {no.type}", at)
        return Node("?", yes.type, at, (test, yes, no))

    def _or(self) -> Node:
        return self._logical("||", self._and)

    def _and(self) -> Node:
        return self._logical("&&", self._relation)

    def _logical(self, op: str, lower: object) -> Node:
        assert callable(lower)
        args: list[Node] = [lower()]
        at = args[0].at
        while self._peek(op):
            self._take()
            args.append(lower())
        if len(args) == 1:
            return args[0]
        for arg in args:
            _need(arg, BOOL, f"{op} needs true or false on both sides")
        return Node(op, BOOL, at, tuple(args))

    def _relation(self) -> Node:
        left = self._sum()
        while self._peek(*_COMPARISONS, "in"):
            op = self._take()
            left = _compared(op, left, self._sum())
        return left

    def _sum(self) -> Node:
        left = self._product()
        while self._peek("+", "-"):
            op = self._take()
            left = _arithmetic(op, left, self._product())
        return left

    def _product(self) -> Node:
        left = self._unary()
        while self._peek("*", "/", "%"):
            op = self._take()
            left = _arithmetic(op, left, self._unary())
        return left

    def _unary(self) -> Node:
        if self._peek("!"):
            at = self._take().at
            return Node("!", BOOL, at, (_need(self._unary(), BOOL, "! needs true or false"),))
        if self._peek("-"):
            at = self._take().at
            arg = self._unary()
            if arg.type not in _NUMBERS:
                raise ExpressionError(f"- needs a number, not {arg.type}", at)
            if arg.op == "literal" and isinstance(arg.value, int | float):
                return Node("literal", arg.type, at, (), -arg.value)
            return Node("neg", arg.type, at, (arg,))
        return self._member()

    def _member(self) -> Node:
        node = self._primary()
        while self._peek(".", "["):
            if self._take().text == "[":
                key = self.ternary()
                self._expect("]")
                if node.type != LABELS:
                    raise Beyond("index")
                node = Node("label", STRING, node.at, (node, _need(key, STRING, "a label's name is a text")))
                continue
            name = self._take()
            node = self._called(node, name) if self._peek("(") else self._selected(node, name)
        if node.type == PART:
            raise ExpressionError(f"{_dotted(node)} has members: {_listed(self._members(node))}", node.at)
        return node

    def _called(self, node: Node, name: _Token) -> Node:
        if name.text not in _METHODS or node.type != STRING:
            raise Beyond(name.text)
        self._take()
        arg = _need(self.ternary(), STRING, f"{name.text} needs a text")
        self._expect(")")
        return Node("method", BOOL, node.at, (node, arg), name.text)

    def _selected(self, node: Node, name: _Token) -> Node:
        if node.type == LABELS:
            return Node("label", STRING, node.at, (node, Node("literal", STRING, name.at, (), name.text)))
        if node.type != PART:
            raise ExpressionError(f"a {node.type} has no members", name.at)
        members = self._members(node)
        if name.text not in members:
            raise ExpressionError(f"{_dotted(node)} has no {name.text!r}; it has {_listed(members)}", name.at)
        assert isinstance(node.value, tuple)
        kind = members[name.text]
        path = (*node.value, name.text)
        return Node("field", kind if isinstance(kind, str) else PART, node.at, (), path)

    def _members(self, node: Node) -> Fields:
        members: Fields = self._fields
        assert isinstance(node.value, tuple)
        for step in node.value:
            below = members[step]
            assert not isinstance(below, str)
            members = below
        return members

    def _primary(self) -> Node:
        token = self._take()
        if token.kind == "int":
            number = int(token.text)
            if number > INT_MAX:
                raise Beyond(token.text)
            return Node("literal", INT, token.at, (), number)
        if token.kind == "float":
            double = float(token.text)
            if double == float("inf"):
                raise Beyond(token.text)
            return Node("literal", DOUBLE, token.at, (), double)
        if token.kind == "string":
            return Node("literal", STRING, token.at, (), _unquoted(token.text))
        if token.text == "(":
            inner = self.ternary()
            self._expect(")")
            return inner
        if token.text == "[":
            return self._list(token.at)
        if token.kind != "name":
            raise Beyond(token.text)
        if token.text in ("true", "false"):
            return Node("literal", BOOL, token.at, (), token.text == "true")
        if self._peek("("):
            return self._function(token)
        if token.text not in self._fields:
            raise ExpressionError(f"there is no {token.text!r}; there are {_listed(self._fields)}", token.at)
        return Node("field", PART, token.at, (), (token.text,))

    def _list(self, at: int) -> Node:
        members: list[Node] = []
        while not self._peek("]"):
            members.append(self.ternary())
            if not self._peek("]"):
                self._expect(",")
        self._take()
        if not members or len({m.type for m in members}) > 1 or members[0].type in (LABELS, LIST, DOUBLE):
            raise Beyond("list")
        return Node("list", LIST, at, tuple(members), members[0].type)

    def _function(self, name: _Token) -> Node:
        self._take()
        if name.text == "has":
            label = self.ternary()
            self._expect(")")
            if label.op != "label":
                raise Beyond("has")
            return Node("has", BOOL, name.at, label.args)
        if name.text != "double":
            raise Beyond(name.text)
        arg = self.ternary()
        self._expect(")")
        if arg.type not in _NUMBERS:
            raise Beyond("double")
        return Node("call", DOUBLE, name.at, (arg,), "double")


def _compared(op: _Token, left: Node, right: Node) -> Node:
    if op.text == "in":
        if right.type == LABELS:
            return Node("in", BOOL, left.at, (_need(left, STRING, "a label's name is a text"), right))
        if right.type != LIST:
            raise ExpressionError(f"`in` needs a list or labels after it, not {right.type}", right.at)
        if left.type != right.value:
            raise Beyond("in")
        return Node("in", BOOL, left.at, (left, right))
    both = {left.type, right.type}
    if both == {LABELS} or LIST in both:
        raise Beyond(op.text)
    if len(both) > 1 and not both <= set(_NUMBERS):
        raise ExpressionError(f"can never match: {left.type} {op.text} {right.type}", right.at)
    return Node(op.text, BOOL, left.at, (left, right))


def _arithmetic(op: _Token, left: Node, right: Node) -> Node:
    if left.type != right.type:
        hint = "; write double(...) around the int" if {left.type, right.type} == set(_NUMBERS) else ""
        raise ExpressionError(f"can never match: {left.type} {op.text} {right.type}{hint}", op.at)
    if left.type not in _NUMBERS or (op.text in "/%" and left.type != INT):
        raise Beyond(op.text)
    return Node(op.text, left.type, left.at, (left, right))


def _need(node: Node, kind: str, message: str) -> Node:
    if node.type != kind:
        raise ExpressionError(f"{message}, not {node.type}", node.at)
    return node


def _unquoted(text: str) -> str:
    out, rest = [], iter(text[1:-1])
    for character in rest:
        if character == "\\":
            escaped = next(rest)
            if escaped not in _ESCAPES:
                raise Beyond("escape")
            character = _ESCAPES[escaped]
        out.append(character)
    return "".join(out)


def _dotted(node: Node) -> str:
    assert isinstance(node.value, tuple)
    return ".".join(node.value)


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names))


# --- to Python ---------------------------------------------------------------------------------------


def absorbs(node: Node) -> bool:
    """An operator may swallow an error of one side: then only CEL's own evaluation knows the result."""
    return any(n.op in ("&&", "||", "?") for n in node.walk())


def python(node: Node) -> str:
    """A Python expression over variables named as the roots of fields. Built from literals and known names only.

    It raises KeyError for a label that is not there, ZeroDivisionError and OverflowError, as CEL does.
    """
    args = [python(arg) for arg in node.args]
    match node.op:
        case "literal":
            return f"({node.value!r})"
        case "field":
            return _dotted(node)
        case "label":
            return f"{args[0]}[{args[1]}]"
        case "has":
            return f"({args[1]} in {args[0]})"
        case "list":
            return f"({', '.join(args)},)"
        case "call":
            return f"float({args[0]})"
        case "method":
            if node.value == "contains":
                return f"({args[1]} in {args[0]})"
            return f"{args[0]}.{str(node.value).lower()}({args[1]})"
        case "!":
            return f"(not {args[0]})"
        case "neg":
            return _checked(node, f"(-{args[0]})")
        case "?":
            return f"({args[1]} if {args[0]} else {args[2]})"
        case "&&" | "||":
            return f"({(' and ' if node.op == '&&' else ' or ').join(args)})"
        case "/" | "%":
            return f"{'quotient' if node.op == '/' else 'remainder'}({args[0]}, {args[1]})"
        case "+" | "-" | "*":
            return _checked(node, f"({args[0]} {node.op} {args[1]})")
    return f"({args[0]} {node.op} {args[1]})"


def _checked(node: Node, text: str) -> str:
    return f"whole{text}" if node.type == INT else text


def whole(number: int) -> int:
    """CEL's integers have 64 bits."""
    if not -INT_MAX - 1 <= number <= INT_MAX:
        raise OverflowError("arithmetic overflow")
    return number


def quotient(a: int, b: int) -> int:
    """Rounded towards zero, as CEL does."""
    return whole(a // b if (a < 0) == (b < 0) else -(-a // b))


def remainder(a: int, b: int) -> int:
    return a - b * quotient(a, b)


#: What the generated expressions call.
RUNTIME: Mapping[str, object] = {"whole": whole, "quotient": quotient, "remainder": remainder}
