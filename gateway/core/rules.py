"""Rules in CEL that pick a tier from the request and the agent's state. The first match wins.

What an expression may use (every field always has a value; there are no nulls):
  request  model, dialect, client, purpose, stream, context_tokens, max_output_tokens (0 = not given),
           tools (their number), last_role, has_images, reasoning_effort ("" = not given), labels (map)
  task     step (1 = first request), age_s, spent_usd, budget_used (0.0 to 1.0), tool_errors, repeats,
           interactive (a person spoke in the last ten minutes), reading (the last step only read or listed)
  team     id, name, budget_used, labels
  key      the same
  cache    fast, standard, small: each with warm_tokens and expires_in_s
  time     unix_s, minute, hour, weekday (1 = Monday), all UTC
A label that may be missing is read as `'env' in request.labels && request.labels.env == 'prod'`. Numbers of
different kinds compare, but do not add: `double(task.step) * 0.1`.

All rules of a set are one Python function (`core.expressions`); what that does not know of CEL, and what raised
where CEL may absorb an error, is evaluated by the CEL library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType

import cel
import msgspec

from gateway.core import expressions, reach
from gateway.core.catalog import Operation, Tier
from gateway.core.clients import CLIENTS, PURPOSES
from gateway.core.expressions import Beyond, ExpressionError, Node
from gateway.core.serving import Urgency

NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Caps:
    """What a rule limits besides choosing a tier; None = leaves it alone."""

    max_output_tokens: int | None = None
    reasoning_effort: str | None = None
    service_tier: str | None = None
    urgency: Urgency | None = None  # in queues, and where it says no `priority`
    priority: int | None = None  # to servers that schedule by it; lower is earlier

    def beside(self, other: Caps) -> Caps:
        """These, and the other's where there are none of these."""
        return Caps(
            self.max_output_tokens if self.max_output_tokens is not None else other.max_output_tokens,
            self.reasoning_effort if self.reasoning_effort is not None else other.reasoning_effort,
            self.service_tier if self.service_tier is not None else other.service_tier,
            self.urgency if self.urgency is not None else other.urgency,
            self.priority if self.priority is not None else other.priority,
        )


class Switch(StrEnum):
    """When a rule may take a task away from the deployment that holds its warm cache."""

    PAYS = "pays"  # if the arithmetic of `core.switching` says so
    ALWAYS = "always"  # a rescue: what is gained is not money


@dataclass(frozen=True, slots=True)
class RuleText:
    """A rule as written in the configuration. `why` is shown to people; default: the expression.

    `model` is "" or the name of a model, in place of a tier.
    """

    name: str
    when: str
    tier: Tier
    caps: Caps = Caps()
    why: str = ""
    switch: Switch = Switch.PAYS
    model: str = ""

    @property
    def target(self) -> str:
        return self.model or self.tier.value


class RuleError(ValueError):
    """A rule cannot work. `offset` counts characters of the expression from 0, None if the fault has no place."""

    def __init__(self, name: str, message: str, offset: int | None = None, source: str = "") -> None:
        self.name = name
        self.message = message
        self.offset = offset
        before = source[: offset or 0]
        line = before.count("\n") + 1
        #: 1-based, within the expression; None on any line but the first, where it alone would mislead
        self.column = None if offset is None or line > 1 else offset + 1
        at = "" if self.column is None else f" at column {self.column}"
        super().__init__(f"rule {name!r}{at}: {message}")


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    model: str = ""
    dialect: str = ""
    client: str = ""
    purpose: str = ""
    stream: bool = False
    context_tokens: int = 0
    max_output_tokens: int = 0
    tools: int = 0
    last_role: str = ""
    has_images: bool = False
    reasoning_effort: str = ""
    labels: Mapping[str, str] = NO_LABELS


class TaskFacts(msgspec.Struct, frozen=True, gc=False):
    step: int = 1
    age_s: float = 0.0
    spent_usd: float = 0.0
    budget_used: float = 0.0
    tool_errors: int = 0
    repeats: int = 0
    interactive: bool = False
    reading: bool = False


class OwnerFacts(msgspec.Struct, frozen=True, gc=False):
    """Of a team or of a key."""

    id: str = ""
    name: str = ""
    budget_used: float = 0.0
    labels: Mapping[str, str] = NO_LABELS


class Warmth(msgspec.Struct, frozen=True, gc=False):
    """How much of this task's prefix a tier has in its cache, and for how long."""

    warm_tokens: int = 0
    expires_in_s: float = 0.0


class CacheFacts(msgspec.Struct, frozen=True, gc=False):
    fast: Warmth = Warmth()
    standard: Warmth = Warmth()
    small: Warmth = Warmth()


class TimeFacts(msgspec.Struct, frozen=True, gc=False):
    unix_s: int = 0
    minute: int = 0
    hour: int = 0
    weekday: int = 4

    @classmethod
    def at(cls, now_ms: int) -> TimeFacts:
        """From milliseconds since 1970 UTC."""
        unix_s = now_ms // 1000
        moment = datetime.fromtimestamp(unix_s, UTC)
        return cls(unix_s, moment.minute, moment.hour, moment.isoweekday())


class RuleContext(msgspec.Struct, frozen=True, gc=False):
    """Everything that rules may look at, for one request."""

    request: RequestFacts = RequestFacts()
    task: TaskFacts = TaskFacts()
    team: OwnerFacts = OwnerFacts()
    key: OwnerFacts = OwnerFacts()
    cache: CacheFacts = CacheFacts()
    time: TimeFacts = TimeFacts()


@dataclass(frozen=True, slots=True)
class Decision:
    """`rule` is "" when none matched; `failed` names rules that could not be evaluated and so did not match.

    `model` is "" or the model to use, in place of the tier.
    """

    rule: str
    tier: Tier
    caps: Caps
    why: str
    failed: tuple[str, ...] = ()
    switch: Switch = Switch.PAYS
    model: str = ""

    def then(self, there: Decision) -> Decision:
        """This one led to a virtual model, whose rules decided `there`: what the rule that led there asked for holds
        on, as far as those say nothing else."""
        if not self.rule:
            return there
        return Decision(
            there.rule or self.rule,
            there.tier,
            there.caps.beside(self.caps),
            f"{self.why}; {self.model}: {there.why}",
            there.failed,
            Switch.ALWAYS if self.switch is Switch.ALWAYS else there.switch,
            there.model,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one rule, for people who ask: matched, not matched, or failed."""

    rule: str
    matched: bool | None  # None = it failed
    #: the rule's own reason if it matched, what it looked at if it did not ("task.step is 4"), or how it failed
    why: str


@dataclass(frozen=True, slots=True)
class _Compiled:
    text: RuleText
    program: cel.Program
    node: Node | None  # None: beyond `core.expressions`
    cases: reach.Cases | None = None


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules compiled once; empty is fine."""

    rules: tuple[_Compiled, ...] = ()
    default_tier: Tier = Tier.STANDARD
    #: the variables that any rule reads: nobody needs to make the others
    used: frozenset[str] = frozenset()
    #: "" or the model for what no rule matches, in place of the default tier
    default_model: str = ""
    #: decisions are recorded and not acted upon
    shadow: bool = False
    _first: Callable[[RuleContext, _Asked], int] | None = None

    @classmethod
    def compile(
        cls,
        rules: Sequence[RuleText],
        default_tier: Tier = Tier.STANDARD,
        default_model: str = "",
        *,
        shadow: bool = False,
    ) -> RuleSet:
        """Raises `RuleError` for the first rule that is malformed, misspelt or can never match."""
        compiled: list[_Compiled] = []
        for text in rules:
            if any(text.name == before.text.name for before in compiled):
                raise RuleError(text.name, "another rule has the same name")
            rule = _compile(text)
            hiding = reach.hidden_by(rule.cases, [(c.text.name, c.cases) for c in compiled], DOMAINS)
            if hiding:
                always = len(hiding) == 1 and _always(next(c for c in compiled if c.text.name == hiding[0]))
                named = " and ".join(repr(name) for name in hiding)
                one = len(hiding) == 1
                before = "always does" if always else f"match{'es' if one else ''} whenever it would"
                raise RuleError(
                    text.name, f"can never match, because rule{'' if one else 's'} {named} before it {before}"
                )
            compiled.append(rule)
        used = frozenset(name for rule in compiled for name in rule.program.variables())
        return cls(
            tuple(compiled), default_tier, used & FIELDS.keys(), default_model, shadow, _together(compiled)
        )

    def leads_to(self, tier: Tier, names: Sequence[str]) -> bool:
        """Whether a rule, or the default, leads to the tier, or to a model of one of the names."""
        targets = {rule.text.target for rule in self.rules} | {self.default_model or self.default_tier.value}
        return not targets.isdisjoint((tier.value, *names))

    def decide(self, context: RuleContext) -> Decision:
        """The first rule whose expression is true; a rule that fails is passed over and named in the decision."""
        if self._first is None:
            return Decision("", self.default_tier, Caps(), "no rules", model=self.default_model)
        asked = _Asked(self.rules, context, self.used)
        at = self._first(context, asked)
        failed = tuple(asked.failed)
        if at < 0:
            return Decision(
                "", self.default_tier, Caps(), "no rule matched", failed, model=self.default_model
            )
        text = self.rules[at].text
        return Decision(
            text.name, text.tier, text.caps, text.why or text.when, failed, text.switch, text.model
        )

    def verdicts(self, context: RuleContext) -> tuple[Verdict, ...]:
        """Each rule by itself, in order; slower than `decide`, and the library's own word."""
        asked = _Asked(self.rules, context, frozenset(FIELDS))
        return tuple(asked.verdict(at) for at in range(len(self.rules)))


class _Asked:
    """One evaluation: the library's context, made if anybody needs it, and the rules that failed."""

    __slots__ = ("_context", "_rules", "_used", "_variables", "failed")

    def __init__(self, rules: tuple[_Compiled, ...], context: RuleContext, used: frozenset[str]) -> None:
        self.failed: list[str] = []
        self._rules, self._context, self._used = rules, context, used
        self._variables: cel.Context | None = None

    def library(self, at: int) -> bool:
        """Whether rule number `at` matches, as the CEL library sees it."""
        verdict = self.verdict(at)
        if verdict.matched is None:
            self.failed.append(verdict.rule)
        return verdict.matched is True

    def verdict(self, at: int) -> Verdict:
        rule = self._rules[at]
        if self._variables is None:
            self._variables = cel.Context(variables=_variables(self._context, self._used))
        # any exception: cel raises KeyError, TypeError, RuntimeError and ValueError for faults of the rule
        try:
            matched = rule.program.execute(self._variables)
        except KeyError as fault:
            return Verdict(rule.text.name, None, f"there is no {fault}")
        except Exception as fault:
            return Verdict(rule.text.name, None, str(fault))
        if type(matched) is not bool:
            return Verdict(rule.text.name, None, f"neither true nor false: {matched!r}")
        why = rule.text.why or rule.text.when if matched else _seen(rule, self._context)
        return Verdict(rule.text.name, matched, why)


_TYPES = {str: expressions.STRING, int: expressions.INT, float: expressions.DOUBLE, bool: expressions.BOOL}


def _fields(part: type[msgspec.Struct]) -> dict[str, expressions.Fields | str]:
    found: dict[str, expressions.Fields | str] = {}
    for field in msgspec.structs.fields(part):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found[field.name] = _fields(field.type)
        else:
            found[field.name] = _TYPES.get(field.type, expressions.LABELS)
    return found


#: What an expression may name, with types.
FIELDS: Mapping[str, expressions.Fields] = {
    f.name: _fields(f.type) for f in msgspec.structs.fields(RuleContext)
}

_COUNT = reach.Span(0, math.inf, whole=True)
_AMOUNT = reach.Span(0, math.inf)
_SHARE = reach.Span(0, 1)
#: What values a field can have, where not all of its type.
DOMAINS: reach.Domains = {
    ("request", "dialect"): reach.Choice(frozenset(o.value for o in Operation)),
    ("request", "client"): reach.Choice(CLIENTS),
    ("request", "purpose"): reach.Choice(PURPOSES),
    ("request", "stream"): reach.Choice(frozenset({True, False})),
    ("request", "has_images"): reach.Choice(frozenset({True, False})),
    ("task", "interactive"): reach.Choice(frozenset({True, False})),
    ("task", "reading"): reach.Choice(frozenset({True, False})),
    **{("request", name): _COUNT for name in ("context_tokens", "max_output_tokens", "tools")},
    **{("task", name): _COUNT for name in ("tool_errors", "repeats")},
    **{("task", name): _AMOUNT for name in ("age_s", "spent_usd")},
    **{(owner, "budget_used"): _SHARE for owner in ("task", "team", "key")},
    **{("cache", tier.value, "warm_tokens"): _COUNT for tier in Tier},
    **{("cache", tier.value, "expires_in_s"): _AMOUNT for tier in Tier},
    ("task", "step"): reach.Span(1, math.inf, whole=True),
    ("time", "unix_s"): _COUNT,
    ("time", "minute"): reach.Span(0, 59, whole=True),
    ("time", "hour"): reach.Span(0, 23, whole=True),
    ("time", "weekday"): reach.Span(1, 7, whole=True),
}
_SYNTAX_ERROR = re.compile(r"<input>:(\d+):(\d+): (?:Syntax error: )?(.*)")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_READ = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\s*\.\s*([A-Za-z_]\w*)(?!\w|\s*\()")
_MACRO_VARIABLE = re.compile(r"\.\s*(?:all|exists|exists_one|map|filter)\(\s*([A-Za-z_]\w*)\s*,")


def _compile(text: RuleText) -> _Compiled:
    try:
        program = cel.compile(text.when)
    except ValueError as error:
        found = _SYNTAX_ERROR.search(str(error))
        if found is None:
            raise RuleError(text.name, str(error)) from error
        raise RuleError(
            text.name, found[3], _offset(text.when, int(found[1]), int(found[2])), text.when
        ) from error
    try:
        node = expressions.parse(text.when, FIELDS)
    except ExpressionError as error:
        raise RuleError(text.name, error.message, error.offset, text.when) from error
    except (Beyond, RecursionError):
        return _beyond(text, program)
    if node.type != expressions.BOOL:
        raise RuleError(text.name, f"must be true or false, not {node.type}", node.at, text.when)
    cases = reach.cases(node, DOMAINS)
    if cases == ():
        always = "it is always false" if not program.variables() else "it asks for what cannot be"
        raise RuleError(text.name, f"can never match: {always}", node.at, text.when)
    return _Compiled(text, program, node, cases)


def _always(rule: _Compiled) -> bool:
    return rule.cases is not None and any(not c.fields and not c.opaque for c in rule.cases)


def _offset(source: str, line: int, column: int) -> int:
    """From a line and a column, both counted from 1."""
    before = source.split("\n")[: line - 1]
    return sum(len(part) + 1 for part in before) + column - 1


def _beyond(text: RuleText, program: cel.Program) -> _Compiled:
    """A rule that only the library can evaluate: tried on a sample, its names looked at as text."""
    _refuse_misspelt(text, program)
    try:
        outcome = program.execute(cel.Context(variables=_variables(RuleContext(), FIELDS)))
    except KeyError as error:
        # this sample has all fields but no labels
        if ".labels" not in text.when:
            raise RuleError(text.name, f"there is no field {error}") from error
        outcome = False
    except (TypeError, RuntimeError, ValueError) as error:
        raise RuleError(text.name, f"can never match: {error}") from error
    if type(outcome) is not bool:
        raise RuleError(text.name, f"must be true or false, not {outcome!r}")
    if not outcome and not program.variables():
        raise RuleError(text.name, "can never match: it is always false")
    return _Compiled(text, program, None)


def _refuse_misspelt(text: RuleText, program: cel.Program) -> None:
    # strings are blanked, not removed, so that columns stay right
    source = _STRING.sub(lambda s: " " * len(s[0]), text.when)
    bound = set(_MACRO_VARIABLE.findall(source))
    for name in program.variables():
        if name not in FIELDS and name not in bound:
            at = re.search(rf"(?<![\w.]){re.escape(name)}\b", source)
            offset = at.start() if at else None
            raise RuleError(
                text.name, f"there is no {name!r}; there are {_listed(FIELDS)}", offset, text.when
            )
    for read in _READ.finditer(source):
        root, member = read[1], read[2]
        if root in FIELDS and root not in bound and member not in FIELDS[root]:
            problem = f"{root} has no {member!r}; it has {_listed(FIELDS[root])}"
            raise RuleError(text.name, problem, read.start(2), text.when)


def _together(rules: Sequence[_Compiled]) -> Callable[[RuleContext, _Asked], int] | None:
    """One function: the number of the first rule that matches, -1 if none does."""
    if not rules:
        return None
    lines = ["def first(context, asked):"]
    lines += [f"    {name} = context.{name}" for name in FIELDS]
    for at, rule in enumerate(rules):
        if rule.node is None:
            lines.append(f"    if asked.library({at}): return {at}")
            continue
        lines.append(f"    try:\n        if {expressions.python(rule.node)}: return {at}")
        if expressions.absorbs(rule.node):
            lines.append(f"    except FAULTS:\n        if asked.library({at}): return {at}")
        else:
            lines.append(f"    except FAULTS: asked.failed.append({rule.text.name!r})")
    lines.append("    return -1")
    names: dict[str, object] = {**expressions.RUNTIME, "FAULTS": (KeyError, ArithmeticError)}
    # The text is made of literals and of names that the parser knows, nothing of the configuration's own.
    exec(compile("\n".join(lines), "<rules>", "exec"), names)
    first = names["first"]
    assert callable(first)
    return first


def _variables(context: RuleContext, names: Iterable[str]) -> dict[str, dict[str, object]]:
    """The named parts of a context as plain dicts, which is what CEL takes."""
    return {name: _plain(getattr(context, name)) for name in names}


def _plain(part: msgspec.Struct) -> dict[str, object]:
    members = {name: getattr(part, name) for name in part.__struct_fields__}
    return {
        k: _plain(v) if isinstance(v, Warmth) else dict(v) if isinstance(v, Mapping) else v
        for k, v in members.items()
    }


def _seen(rule: _Compiled, context: RuleContext) -> str:
    """The values of what a rule reads: "task.step is 4, request.tools is 0"; "" if only the library understands it."""
    nodes = rule.node.walk() if rule.node is not None else ()
    paths = dict.fromkeys(n.value for n in nodes if n.op == "field" and isinstance(n.value, tuple))
    return ", ".join(f"{'.'.join(path)} is {_value(context, path)}" for path in paths)


def _value(context: RuleContext, path: tuple[str, ...]) -> str:
    value: object = context
    for name in path:
        value = getattr(value, name)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}={v}" for k, v in value.items()) + "}"
    return repr(value) if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else f"{value}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
