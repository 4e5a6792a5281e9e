"""`/v1/tasks`: a key declares tasks, looks at them, changes their budgets, and says how they ended.

Dollars are exact decimal texts, other amounts whole numbers, instants RFC 3339 in UTC. A body with a fault is refused
with the path of the field, such as `budgets[0].limit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from gateway.core.budget import ALERT_PERCENTS, Budget, OnExceed
from gateway.core.entry import Unit
from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.identity import KeyRecord
from gateway.core.money import PICO_PER_NANO, pico_from_usd_text, usd_text
from gateway.core.task_facts import BreakerRow, OutcomeRow, TaskFacts, TaskRow

TASK_BODY_BYTES_MAX = 64 << 10
#: Of one task, in any unit ($100,000,000): the slices of all children of a task still add up within a BIGINT.
LIMIT_MAX = 10**17
_NAME_CHARS_MAX = 200
_PARAM_CHARS_MAX = 200
_USD_CHARS_MAX = 40

# --- what the desk is asked ---------------------------------------------------------------------------------


class TaskDesk(Protocol):
    """Acts for the holder of a key, who reaches tasks of its own only (`storage.own_tasks`): others raise `NotFound`."""

    async def declare(
        self,
        key: KeyRecord,
        name: str,
        budgets: Sequence[tuple[Unit, int, OnExceed, tuple[int, ...]]],
        labels: Mapping[str, str],
        parent: str | None,
    ) -> tuple[TaskFacts, str]:
        """The task and the text of its key."""
        ...

    async def view(self, key: KeyRecord, task_id: str) -> TaskFacts: ...

    async def change_budget(
        self, key: KeyRecord, task_id: str, unit: Unit, limit: int, reason: str
    ) -> TaskFacts: ...

    async def record_outcome(
        self, key: KeyRecord, task_id: str, success: bool, score: float | None, labels: Mapping[str, str]
    ) -> TaskFacts: ...

    async def end(self, key: KeyRecord, task_id: str, reason: str) -> TaskFacts: ...

    async def pause(self, key: KeyRecord, task_id: str, reason: str) -> TaskFacts: ...

    async def resume(self, key: KeyRecord, task_id: str, reason: str) -> TaskFacts: ...


# --- what is read -------------------------------------------------------------------------------------------

_PRINTABLE = r"^[^\x00-\x1f\x7f]*$"
Name = Annotated[str, StringConstraints(min_length=1, max_length=_NAME_CHARS_MAX, pattern=_PRINTABLE)]
Text = Annotated[str, StringConstraints(max_length=1_000, pattern=_PRINTABLE)]
Labels = Annotated[dict[Name, Text], Field(max_length=50)]
Ratio = Annotated[float, Field(ge=0.01, le=1)]


class _In(BaseModel):
    """A body that is read: unknown fields are mistakes, and texts are not turned into numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Limit(_In):
    """`limit` is read by its unit: nano-dollars inside, dollars outside."""

    unit: Annotated[Unit, Field(strict=False)]
    limit: int

    @field_validator("limit", mode="before")
    @classmethod
    def _in_its_unit(cls, value: Any, known: ValidationInfo) -> Any:
        unit = known.data.get("unit")
        if unit is None:
            return 0  # its unit is refused already
        if unit is Unit.USD:
            amount, most = _nano_usd(value), f"${usd_text(LIMIT_MAX)}"
        elif isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"must be a whole number of {unit.replace('_', ' ')}")
        else:
            amount, most = value, str(LIMIT_MAX)
        if not 0 <= amount <= LIMIT_MAX:
            raise ValueError(f"must be from 0 to {most}")
        return amount


class _Budget(_Limit):
    window: Literal["lifetime"] = "lifetime"
    on_exceed: Annotated[OnExceed, Field(strict=False)] = OnExceed.ERROR
    alert_ratios: Annotated[list[Ratio], Field(max_length=20)] = [p / 100 for p in ALERT_PERCENTS]

    @field_validator("alert_ratios")
    @classmethod
    def _whole_percents(cls, ratios: list[float]) -> list[float]:
        if any(abs(ratio * 100 - round(ratio * 100)) > 1e-9 for ratio in ratios):
            raise ValueError("must be whole percents, such as 0.8")
        return ratios

    @property
    def alert_percents(self) -> tuple[int, ...]:
        return tuple(sorted({round(ratio * 100) for ratio in self.alert_ratios}))


class _Declaration(_In):
    name: Name
    budgets: list[_Budget] = []
    labels: Labels = {}
    parent: Name | None = None

    @field_validator("budgets")
    @classmethod
    def _one_per_unit(cls, budgets: list[_Budget]) -> list[_Budget]:
        if len({b.unit for b in budgets}) < len(budgets):
            raise ValueError("one budget per unit")
        return budgets


class _Change(_Limit):
    reason: Name


class _Outcome(_In):
    success: bool
    score: Annotated[float, Field(allow_inf_nan=False)] | None = None
    labels: Labels = {}


class _State(_In):
    state: Literal["running", "paused"]
    reason: Text = ""


class _End(_In):
    reason: Text = ""


B = TypeVar("B", bound=_In)


def _nano_usd(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('must be dollars as a text, such as "0.25"')
    text = str(value)
    if len(text) > _USD_CHARS_MAX:
        raise ValueError(f"must have at most {_USD_CHARS_MAX} characters")
    nano, rest = divmod(pico_from_usd_text(text), PICO_PER_NANO)
    if rest:
        raise ValueError("is finer than a nano-dollar (9 decimals)")
    return nano


def _read(model: type[B], body: bytes) -> B:
    """Raises `InvalidRequest` with the first field that is wrong; what was sent is not repeated."""
    try:
        return model.model_validate(msgspec.json.decode(body))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        param = _path(first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "model_type":
            what = "must be an object"
        raise InvalidRequest(f"{param or 'the body'}: {what}", param=param or None) from None
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise InvalidRequest("the request body is not valid JSON") from None


def _path(loc: Sequence[int | str]) -> str:
    """("budgets", 0, "limit") as "budgets[0].limit"."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".")[:_PARAM_CHARS_MAX]


# --- one request --------------------------------------------------------------------------------------------


async def answer_task(
    desk: TaskDesk, key: KeyRecord, verb: str, task_id: str, body: bytes
) -> tuple[int, dict[str, object]]:
    """(status, document) of "declare", "show", "change", "budgets", "outcome" or "done". Raises `GatewayError`."""
    if verb == "declare":
        wanted = _read(_Declaration, body)
        budgets = [(b.unit, b.limit, b.on_exceed, b.alert_percents) for b in wanted.budgets]
        facts, text = await desk.declare(key, wanted.name, budgets, wanted.labels, wanted.parent)
        return 201, {**_document(facts), "key": text}
    if not 0 < len(task_id) <= _NAME_CHARS_MAX or not task_id.isprintable():
        raise NotFound("there is no such task")  # a database does not even take every text
    if verb == "budgets":
        wish = _read(_Change, body)
        facts = await desk.change_budget(key, task_id, wish.unit, wish.limit, wish.reason)
    elif verb == "outcome":
        said = _read(_Outcome, body)
        facts = await desk.record_outcome(key, task_id, said.success, said.score, said.labels)
    elif verb == "change":
        state = _read(_State, body)
        change = desk.resume if state.state == "running" else desk.pause
        facts = await change(key, task_id, state.reason)
    elif verb == "done":
        facts = await desk.end(key, task_id, _read(_End, body or b"{}").reason)
    else:
        facts = await desk.view(key, task_id)
    return 200, _document(facts)


# --- what is written ----------------------------------------------------------------------------------------


def _document(facts: TaskFacts) -> dict[str, object]:
    """`*_usd` at the top are those of its dollar budget, children included; `cost_usd` is of its own calls alone."""
    task = facts.task
    usd = next((b for b in facts.budgets if b.unit is Unit.USD), None)
    return {
        "object": "task",
        **_row(task),
        "state_reason": task.state_reason,
        "parent": task.parent_task_id,
        "depth": task.depth,
        "external_id": task.external_id,
        "source": task.source,
        "labels": dict(facts.labels),
        "created_at": _instant(task.created_at_ms),
        "last_at": _instant(task.last_at_ms),
        "attempts": task.attempts,
        "spent_usd": usd_text(task.cost_nano_usd if usd is None else usd.spent),
        "held_usd": None if usd is None else usd_text(usd.reserved),
        "remaining_usd": None if usd is None else usd_text(max(0, usd.room)),
        "next_step_usd": None if facts.step_nano_usd is None else usd_text(facts.step_nano_usd),
        "steps_left": facts.steps_left,
        "budgets": [_budget(b) for b in facts.budgets],
        "budgets_above": [{"task": b.scope.partition(":")[2], **_budget(b)} for b in facts.above],
        "children": [_row(child) for child in facts.children],
        "outcome": None if facts.outcome is None else _outcome(facts.outcome),
        "breakers": [_breaker(event) for event in facts.events],
    }


def _row(task: TaskRow) -> dict[str, object]:
    return {
        "id": task.task_id,
        "name": task.name,
        "state": task.state,
        "steps": task.steps,
        "cost_usd": usd_text(task.cost_nano_usd),
    }


def _budget(b: Budget) -> dict[str, object]:
    def shown(amount: int) -> int | str:
        return usd_text(amount) if b.unit is Unit.USD else amount

    return {
        "unit": b.unit.value,
        "limit": shown(b.limit),
        "spent": shown(b.spent),
        "held": shown(b.reserved),
        "kept_back": shown(b.landing),
        "remaining": shown(max(0, b.room)),
        "window": b.window,
        "on_exceed": b.on_exceed.value,
        "alert_ratios": [percent / 100 for percent in b.alert_percents],
    }


def _breaker(event: BreakerRow) -> dict[str, object]:
    """One episode: what was seen, what was done, and who let the task go on."""
    return {
        "breaker": event.breaker,
        "action": event.action,
        "tripped": event.tripped,
        "message": event.message,
        "evidence": dict(event.evidence),
        "at": _instant(event.at_ms),
        "resumed_at": None if event.resumed_at_ms is None else _instant(event.resumed_at_ms),
        "resumed_by": event.resumed_by,
    }


def _outcome(said: OutcomeRow) -> dict[str, object]:
    return {
        "success": said.success,
        "score": said.score,
        "labels": dict(said.labels),
        "at": _instant(said.at_ms),
    }


def _instant(at_ms: int) -> str:
    moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
