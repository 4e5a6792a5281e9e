"""Rules in CEL that pick a tier from the request and the agent's state. The first match wins.

What an expression may use (every field always has a value; there are no nulls):
  request  model, dialect, client, purpose, stream, context_tokens, max_output_tokens (0 = not given),
           tools (their number), last_role, has_images, reasoning_effort ("" = not given), labels (map)
  task     step (1 = first request), age_s, spent_usd, budget_used (0.0 to 1.0), tool_errors, repeats,
           interactive
  team     id, name, budget_used, labels
  key      the same
  cache    fast, standard, small: each with warm_tokens and expires_in_s
  time     unix_s, minute, hour, weekday (1 = Monday), all UTC
A label that may be missing is read as `'env' in request.labels && request.labels.env == 'prod'`. Numbers of
different kinds compare, but do not add: `double(task.step) * 0.1`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime

import cel

from gateway.core.catalog import Tier


@dataclass(frozen=True, slots=True)
class Caps:
    """What a rule limits besides choosing a tier; None = leaves it alone."""

    max_output_tokens: int | None = None
    reasoning_effort: str | None = None
    service_tier: str | None = None


@dataclass(frozen=True, slots=True)
class RuleText:
    """A rule as written in the configuration. `why` is shown to people; default: the expression."""

    name: str
    when: str
    tier: Tier
    caps: Caps = Caps()
    why: str = ""


class RuleError(ValueError):
    """A rule cannot work. `column` is 1-based within the expression, None if the fault has no place."""

    def __init__(self, name: str, message: str, column: int | None = None) -> None:
        self.name = name
        self.message = message
        self.column = column
        at = "" if column is None else f" at column {column}"
        super().__init__(f"rule {name!r}{at}: {message}")


@dataclass(frozen=True, slots=True)
class RequestFacts:
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
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskFacts:
    step: int = 1
    age_s: float = 0.0
    spent_usd: float = 0.0
    budget_used: float = 0.0
    tool_errors: int = 0
    repeats: int = 0
    interactive: bool = False


@dataclass(frozen=True, slots=True)
class OwnerFacts:
    """Of a team or of a key."""

    id: str = ""
    name: str = ""
    budget_used: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Warmth:
    """How much of this task's prefix a tier has in its cache, and for how long."""

    warm_tokens: int = 0
    expires_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CacheFacts:
    fast: Warmth = Warmth()
    standard: Warmth = Warmth()
    small: Warmth = Warmth()


@dataclass(frozen=True, slots=True)
class TimeFacts:
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


@dataclass(frozen=True, slots=True)
class RuleContext:
    """Everything that rules may look at, for one request."""

    request: RequestFacts = RequestFacts()
    task: TaskFacts = TaskFacts()
    team: OwnerFacts = OwnerFacts()
    key: OwnerFacts = OwnerFacts()
    cache: CacheFacts = CacheFacts()
    time: TimeFacts = TimeFacts()


@dataclass(frozen=True, slots=True)
class Decision:
    """`rule` is "" when none matched; `failed` names rules that could not be evaluated and so did not match."""

    rule: str
    tier: Tier
    caps: Caps
    why: str
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Compiled:
    text: RuleText
    program: cel.Program


@dataclass(frozen=True, slots=True)
class RuleSet:
    """Rules compiled once; empty is fine."""

    rules: tuple[_Compiled, ...] = ()
    default_tier: Tier = Tier.STANDARD
    #: the variables that any rule reads: the others are not converted for CEL
    used: tuple[str, ...] = ()

    @classmethod
    def compile(cls, rules: Sequence[RuleText], default_tier: Tier = Tier.STANDARD) -> RuleSet:
        """Raises `RuleError` for the first rule that is malformed, misspelt or can never match."""
        compiled: list[_Compiled] = []
        names: set[str] = set()
        always = ""
        for text in rules:
            if text.name in names:
                raise RuleError(text.name, "another rule has the same name")
            if always:
                raise RuleError(text.name, f"can never match, because rule {always!r} before it always does")
            names.add(text.name)
            program = _compile(text)
            compiled.append(_Compiled(text, program))
            if not program.variables():
                always = text.name
        used = {name for rule in compiled for name in rule.program.variables()}
        return cls(tuple(compiled), default_tier, tuple(sorted(used & _FIELDS.keys())))

    def decide(self, context: RuleContext) -> Decision:
        """The first rule whose expression is true; a rule that fails is passed over and named in the decision."""
        if not self.rules:
            return Decision("", self.default_tier, Caps(), "no rules")
        variables = cel.Context(variables=_variables(context, self.used))
        failed: list[str] = []
        for rule in self.rules:
            # any exception: cel raises KeyError, TypeError, RuntimeError and ValueError for faults of the rule
            try:
                matched = rule.program.execute(variables)
            except Exception:
                matched = None
            if matched is True:
                text = rule.text
                return Decision(text.name, text.tier, text.caps, text.why or text.when, tuple(failed))
            if matched is not False:
                failed.append(rule.text.name)
        return Decision("", self.default_tier, Caps(), "no rule matched", tuple(failed))


_FIELDS: Mapping[str, frozenset[str]] = {
    "request": frozenset(f.name for f in fields(RequestFacts)),
    "task": frozenset(f.name for f in fields(TaskFacts)),
    "team": frozenset(f.name for f in fields(OwnerFacts)),
    "key": frozenset(f.name for f in fields(OwnerFacts)),
    "cache": frozenset(f.name for f in fields(CacheFacts)),
    "time": frozenset(f.name for f in fields(TimeFacts)),
}
_SYNTAX_ERROR = re.compile(r"<input>:(\d+):(\d+): (?:Syntax error: )?(.*)")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"")
_READ = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\s*\.\s*([A-Za-z_]\w*)(?!\w|\s*\()")
_MACRO_VARIABLE = re.compile(r"\.\s*(?:all|exists|exists_one|map|filter)\(\s*([A-Za-z_]\w*)\s*,")


def _compile(text: RuleText) -> cel.Program:
    try:
        program = cel.compile(text.when)
    except ValueError as error:
        found = _SYNTAX_ERROR.search(str(error))
        if found is None:
            raise RuleError(text.name, str(error)) from error
        raise RuleError(text.name, found[3], int(found[2]) if found[1] == "1" else None) from error
    _refuse_misspelt(text, program)
    try:
        outcome = program.execute(cel.Context(variables=_variables(RuleContext(), _FIELDS)))
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
    return program


def _refuse_misspelt(text: RuleText, program: cel.Program) -> None:
    # strings are blanked, not removed, so that columns stay right
    source = _STRING.sub(lambda s: " " * len(s[0]), text.when)
    bound = set(_MACRO_VARIABLE.findall(source))
    for name in program.variables():
        if name not in _FIELDS and name not in bound:
            at = re.search(rf"(?<![\w.]){re.escape(name)}\b", source)
            column = _column(source, at.start()) if at else None
            raise RuleError(text.name, f"there is no {name!r}; there are {_listed(_FIELDS)}", column)
    for read in _READ.finditer(source):
        root, member = read[1], read[2]
        if root in _FIELDS and root not in bound and member not in _FIELDS[root]:
            problem = f"{root} has no {member!r}; it has {_listed(_FIELDS[root])}"
            raise RuleError(text.name, problem, _column(source, read.start(2)))


def _column(source: str, offset: int) -> int | None:
    """None on any line but the first, where a column alone would mislead."""
    return None if "\n" in source[:offset] else offset + 1


def _variables(context: RuleContext, names: Iterable[str]) -> dict[str, dict[str, object]]:
    """The named parts of a context as plain dicts, which is what CEL takes."""
    return {name: _plain(getattr(context, name)) for name in names}


def _plain(part: object) -> dict[str, object]:
    # not dataclasses.asdict: its deep copy costs more than the evaluation
    members = {f.name: getattr(part, f.name) for f in fields(part)}  # type: ignore[arg-type]
    return {k: _plain(v) if isinstance(v, Warmth) else v for k, v in members.items()}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
