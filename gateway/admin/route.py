"""What a route is: where, for whom, what it takes and gives. The OpenAPI document is made from these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from pydantic import BaseModel

from gateway.admin.call import PAGE_MAX, Resource
from gateway.core.buckets import LATEST_YEAR
from gateway.core.offices import Right

_TEXT_MAX = 200


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter of the query. `parse` raises ValueError saying what it must be."""

    name: str
    parse: Callable[[str], Any]
    schema: Mapping[str, Any]
    about: str
    #: may be given several times, also as `name[]`; `parse` gets them joined by commas
    many: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """`body` None = takes none; `reply` None = any object. `listed`: the reply is a page of `reply`s."""

    method: str
    path: str
    resource: Resource
    right: Right
    tag: str
    reply: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    params: tuple[Param, ...] = ()
    listed: bool = False
    status: int = 200
    once: bool = False  # takes an Idempotency-Key
    tagged: bool = False  # replies with an ETag, and takes If-Match where it changes something
    #: media types besides JSON
    media: tuple[str, ...] = ()
    summary: str = field(default="")
    under: str = "/admin/v1"

    @property
    def name(self) -> str:
        return f"{self.method} {self.address}"

    @property
    def address(self) -> str:
        return self.under + self.path

    def parsed(self, query: Sequence[tuple[str, str]]) -> dict[str, Any]:
        """Raises `ParamError` for a parameter that is unknown, given twice, or wrong."""
        known = {p.name: p for p in self.params}
        texts: dict[str, list[str]] = {}
        for name, text in query:
            name = name.removesuffix("[]")
            if name not in known:
                raise ParamError(name, f"is not a parameter here; known: {', '.join(known) or 'none'}")
            texts.setdefault(name, []).append(text)
        found = {}
        for name, given in texts.items():
            param = known[name]
            if len(given) > 1 and not param.many:
                raise ParamError(name, "is given more than once")
            try:
                found[name] = param.parse(",".join(given))
            except ValueError as error:
                raise ParamError(name, str(error)) from None
        return found


class ParamError(Exception):
    def __init__(self, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.name, self.message = name, message


def text(name: str, about: str = "") -> Param:
    def parse(given: str) -> str:
        if not 0 < len(given) <= _TEXT_MAX or not given.isprintable():
            raise ValueError(f"must be 1 to {_TEXT_MAX} printable characters")
        return given

    return Param(name, parse, {"type": "string", "minLength": 1, "maxLength": _TEXT_MAX}, about)


def whole(name: str, most: int, about: str = "") -> Param:
    def parse(given: str) -> int:
        if not (given.isascii() and given.isdigit()) or not 1 <= int(given[:20]) <= most:
            raise ValueError(f"must be a whole number from 1 to {most}")
        return int(given)

    return Param(name, parse, {"type": "integer", "minimum": 1, "maximum": most}, about)


def moment(name: str, about: str = "") -> Param:
    """A UTC day, an instant, or seconds since 1970; parsed to milliseconds."""
    schema = {
        "anyOf": [{"type": "string", "format": "date-time"}, {"type": "string", "format": "date"}, SECONDS]
    }
    return Param(name, _moment, schema, about or "a day, an instant, or seconds since 1970")


def local_moment(name: str, about: str = "") -> Param:
    """As `moment`; without an offset it is left as it is, for a time zone that another parameter names."""

    def parse(given: str) -> int | datetime:
        digits = given.isascii() and given.isdigit() and len(given) != 8
        try:
            when = None if digits else datetime.fromisoformat(given)
        except ValueError:
            when = None
        found: int | datetime = _moment(given) if when is None or when.tzinfo is not None else when
        year = (datetime.fromtimestamp(found / 1_000, UTC) if isinstance(found, int) else found).year
        if not 1970 <= year <= LATEST_YEAR:
            raise ValueError(f"must be from 1970 to {LATEST_YEAR}")
        return found

    return Param(name, parse, moment(name).schema, about)


SECONDS: Mapping[str, Any] = {"type": "integer", "minimum": 0, "maximum": 253_402_300_799}


def _moment(given: str) -> int:
    if given.isascii() and given.isdigit() and len(given) not in (0, 8):
        seconds = int(given[:20])
        if seconds > SECONDS["maximum"]:
            raise ValueError("must be before the year 10000")
        return seconds * 1000
    try:
        when = datetime.fromisoformat(given)
        ms = int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise ValueError(
            'must be a day ("2026-11-30"), an instant ("2026-11-30T12:00:00Z") or seconds since 1970'
        ) from None
    if ms < 0:
        raise ValueError("must be after 1970")
    return ms


def choice(name: str, options: type[StrEnum] | Sequence[str], about: str = "") -> Param:
    known = [str(option) for option in options]

    def parse(given: str) -> str:
        if given not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return given

    return Param(name, parse, {"type": "string", "enum": known}, about)


def words(name: str, options: Mapping[str, str], about: str = "") -> Param:
    """A list of words, commas between or given several times; aliases become what they stand for."""

    def parse(given: str) -> tuple[str, ...]:
        found = tuple(dict.fromkeys(options.get(word, "") for word in given.split(",")))
        if "" in found:
            wrong = next(word for word in given.split(",") if word not in options)
            raise ValueError(f"cannot be {wrong!r}; choose from {', '.join(options)}")
        return found

    schema = {"type": "array", "items": {"type": "string", "enum": list(options)}}
    return Param(name, parse, schema, about, many=True)


#: Of every list in pages.
PAGED = (
    whole("limit", PAGE_MAX, "rows of a page"),
    Param("cursor", str, {"type": "string"}, "`next_cursor` of the page before"),
)
