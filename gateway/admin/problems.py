"""What went wrong, as problem details (RFC 9457): one shape for every error of the admin API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from aiohttp import web
from pydantic import ValidationError

CONTENT_TYPE = "application/problem+json"


@dataclass(frozen=True, slots=True)
class Fault:
    """One field that is wrong: "limits.concurrent", and what it must be."""

    field: str
    message: str


class Problem(Exception):
    """An answer that is an error. `detail` is for people and holds no secret."""

    def __init__(
        self,
        status: int,
        detail: str,
        faults: Sequence[Fault] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.faults, self.headers = status, detail, tuple(faults), headers or {}

    def response(self) -> web.Response:
        body: dict[str, object] = {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        if self.faults:
            body["errors"] = [{"field": f.field, "message": f.message} for f in self.faults]
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(body),
            content_type=CONTENT_TYPE,
            headers=self.headers,
        )


def not_found(what: str) -> Problem:
    return Problem(404, f"There is no such {what}.")


def invalid(field: str, message: str) -> Problem:
    return Problem(422, f"{field}: {message}", [Fault(field, message)])


def from_validation(error: ValidationError) -> Problem:
    """Pydantic's findings, without the input that it would repeat: a body may hold a secret."""
    faults = [
        Fault(".".join(str(part) for part in e["loc"]) or "body", e["msg"].removeprefix("Value error, "))
        for e in error.errors(include_input=False, include_url=False, include_context=False)
    ]
    return Problem(422, "; ".join(f"{f.field}: {f.message}" for f in faults), faults)
