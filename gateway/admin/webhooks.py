"""Webhooks: who is told what, and what became of it. Those of the configuration are shown, and changed there."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from gateway.admin.bodies import Patch
from gateway.admin.call import Call, Json, Reply, etag_of
from gateway.admin.in_force import source_of
from gateway.admin.problems import Problem, invalid, not_found
from gateway.admin.route import PAGED, Route, choice
from gateway.admin.schemas import In, Name
from gateway.admin.shown import InstantOut, Out, SourceOut, shown
from gateway.admin.store import DeliveryRow, WebhookCountsRow, WebhookRow
from gateway.core.offices import Once, Page, Right
from gateway.core.webhook import KINDS, secret_of

CONFIGURED = "configuration"
Url = Annotated[str, StringConstraints(min_length=1, max_length=2_048)]
Kinds = Annotated[
    list[
        Literal[
            "budget_alert",
            "budget_shadow",
            "budget_warning",
            "bound_breach",
            "task_paused",
            "breaker_tripped",
            "breaker_warning",
            "credential_refused",
        ]
    ],
    Field(max_length=len(KINDS)),
]


class WebhookIn(In):
    """`kinds`: what it is told; none = everything. The URL must be public, https, at port 443 or 8443."""

    name: Name
    url: Url
    kinds: Kinds = Field(default_factory=list)
    enabled: bool = True


class WebhookPatch(Patch):
    """`new_secret` makes another secret, which the reply shows once; the old one signs nothing from then on."""

    name: Name = ""
    url: Url = ""
    kinds: Kinds = Field(default_factory=list)
    enabled: bool = True
    new_secret: Literal[True] = True


class WebhookCountsOut(Out):
    """Messages by what became of them, of the last 90 days."""

    pending: int
    delivered: int
    dead: int
    last_delivered_at: InstantOut


class WebhookOut(Out):
    """Of the URL only the host is shown: the rest is often a secret of the receiver."""

    webhook_id: str
    origin: Literal["configuration", "api"]
    name: str
    address: str
    kinds: list[str]
    enabled: bool
    secret_version: int
    created_at: InstantOut
    source: SourceOut | None


class WebhookListed(WebhookOut):
    """A webhook, and what became of its messages."""

    messages: WebhookCountsOut


class WebhookCreated(WebhookOut):
    """A webhook, and, once, the secret that signs its messages."""

    secret: str


class WebhookChanged(WebhookOut):
    """A webhook, and, once, its new secret, if there is one."""

    secret: str | None = None


class DeliveryOut(Out):
    """One message on its way to one receiver. `next_at`: when it is tried again, while it is pending."""

    delivery_id: str
    kind: str
    state: Literal["pending", "delivered", "dead"]
    created_at: InstantOut
    attempts: int
    next_at: InstantOut
    delivered_at: InstantOut
    dead_at: InstantOut
    last_error: str


async def list_webhooks(call: Call) -> Reply:
    """That of the configuration first; all of them at once."""
    rows = [_with_counts(_shown(it), counts) for it, counts in await call.registry.webhooks()]
    configured = _configured(call)
    if configured is not None:
        rows.insert(0, _with_counts(configured, await call.registry.configured_webhook_counts()))
    return Reply({"data": rows, "has_more": False, "next_cursor": None})


async def create_webhook(call: Call) -> Reply:
    """Its `secret` is shown once; a receiver checks `X-Tollhouse-Signature` with it."""
    wanted = WebhookIn.model_validate(call.body)
    _refuse_address(call, wanted.url)

    def again(body: Json, once: Once) -> Json:
        del once
        return {"secret": secret_of(call.deps.pepper, body["webhook_id"], body["secret_version"])}

    return await call.change(
        lambda it: it.add_webhook(wanted.name, wanted.url, sorted(set(wanted.kinds)), wanted.enabled),
        _shown,
        status=201,
        secret=lambda made: {"secret": _secret(call, made)},
        again=again,
    )


async def get_webhook(call: Call) -> Reply:
    webhook_id = call.path["webhook_id"]
    if webhook_id == CONFIGURED:
        configured = _configured(call)
        if configured is None:
            raise not_found(f"webhook {CONFIGURED}")
        return Reply(configured, etag=etag_of(configured))
    body = _shown(await call.registry.webhook(webhook_id))
    return Reply(body, etag=etag_of(body))


async def change_webhook(call: Call) -> Reply:
    """What is left out stays; gateways follow within a second."""
    patch = WebhookPatch.model_validate(call.body)
    given = patch.model_fields_set
    _refuse_configured(call)
    if "url" in given:
        _refuse_address(call, patch.url)

    def change(before: Any) -> Any:
        call.expect(_shown(before))
        changes = {name: getattr(patch, name) for name in given & {"name", "url", "enabled"}}
        if "kinds" in given:
            changes["kinds"] = tuple(sorted(set(patch.kinds)))
        if "new_secret" in given:
            changes["secret_version"] = before.secret_version + 1
        return dataclasses.replace(before, **changes)

    def again(body: Json, once: Once) -> Json:
        del once
        return {"secret": secret_of(call.deps.pepper, body["webhook_id"], body["secret_version"])}

    new = "new_secret" in given
    return await call.change(
        lambda it: it.change_webhook(call.path["webhook_id"], change),
        _shown,
        secret=(lambda made: {"secret": _secret(call, made)}) if new else None,
        again=again if new else None,
    )


async def delete_webhook(call: Call) -> Reply:
    """What it has not got yet is not sent to it any more."""
    _refuse_configured(call)

    def expect(found: Any) -> None:
        call.expect(_shown(found))

    return await call.change(lambda it: it.drop_webhook(call.path["webhook_id"], expect), _shown)


async def test_webhook(call: Call) -> Reply:
    """Send it a message of the kind `test`, as any other is sent; its deliveries say what became of it."""
    webhook_id = call.path["webhook_id"]
    if webhook_id == CONFIGURED and _configured(call) is None:
        raise not_found(f"webhook {CONFIGURED}")
    return await call.change(lambda it: it.test_webhook(webhook_id), _delivery, status=202)


async def list_deliveries(call: Call) -> Reply:
    """The latest first, of the last 90 days."""
    webhook_id = call.path["webhook_id"]
    if webhook_id == CONFIGURED and _configured(call) is None:
        raise not_found(f"webhook {CONFIGURED}")

    async def rows(filters: Mapping[str, Any], after: Any, limit: int) -> Page[DeliveryRow]:
        return await call.registry.deliveries(webhook_id, filters, after, limit)

    return await call.page(rows, _delivery)


def _configured(call: Call) -> Json | None:
    address = call.deps.configured().webhook
    if not address:
        return None
    return shown(
        WebhookOut(
            webhook_id=CONFIGURED,
            origin="configuration",
            name=CONFIGURED,
            address=_address(address),
            kinds=[],
            enabled=True,
            secret_version=1,
            created_at=None,
            source=source_of(call.deps.configured(), "webhook"),
        )
    )


def _refuse_configured(call: Call) -> None:
    if call.path["webhook_id"] == CONFIGURED:
        raise Problem(409, "This one is in the configuration: change it there.")


def _refuse_address(call: Call, url: str) -> None:
    reason = call.deps.judge_url(url)
    if reason:
        raise invalid("url", f"may not be used: {reason}")


def _secret(call: Call, it: WebhookRow) -> str:
    return secret_of(call.deps.pepper, it.webhook_id, it.secret_version)


def _shown(it: WebhookRow) -> Json:
    return shown(
        WebhookOut(
            webhook_id=it.webhook_id,
            origin="api",
            name=it.name,
            address=_address(it.url),
            kinds=list(it.kinds),
            enabled=it.enabled,
            secret_version=it.secret_version,
            created_at=it.created_at_ms,
            source=None,
        )
    )


def _with_counts(body: Json, counts: WebhookCountsRow) -> Json:
    told = WebhookCountsOut(
        pending=counts.pending,
        delivered=counts.delivered,
        dead=counts.dead,
        last_delivered_at=counts.last_delivered_at_ms,
    )
    return {**body, "messages": shown(told)}


def _address(url: str) -> str:
    """Scheme and host: a path or a query may be a secret."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.partition('/')[0].partition('?')[0].rpartition('@')[2]}"


def _delivery(row: DeliveryRow) -> Json:
    state: Literal["pending", "delivered", "dead"] = (
        "delivered"
        if row.delivered_at_ms is not None
        else "dead"
        if row.dead_at_ms is not None
        else "pending"
    )
    return shown(
        DeliveryOut(
            delivery_id=row.delivery_id,
            kind=row.kind,
            state=state,
            created_at=row.created_at_ms,
            attempts=row.attempts,
            next_at=(row.next_at_ms or row.created_at_ms) if state == "pending" else None,
            delivered_at=row.delivered_at_ms,
            dead_at=row.dead_at_ms,
            last_error=row.last_error,
        )
    )


_STATE = choice("state", ("pending", "delivered", "dead"))
ROUTES = (
    Route("GET", "/webhooks", list_webhooks, Right.OPERATE, "webhooks", WebhookListed, listed=True),
    Route("POST", "/webhooks", create_webhook, Right.OPERATE, "webhooks", WebhookCreated, WebhookIn, status=201, once=True),
    Route("GET", "/webhooks/{webhook_id}", get_webhook, Right.OPERATE, "webhooks", WebhookOut, tagged=True),
    Route("PATCH", "/webhooks/{webhook_id}", change_webhook, Right.OPERATE, "webhooks", WebhookChanged, WebhookPatch, once=True, tagged=True),
    Route("DELETE", "/webhooks/{webhook_id}", delete_webhook, Right.OPERATE, "webhooks", WebhookOut, once=True, tagged=True),
    Route("POST", "/webhooks/{webhook_id}/test", test_webhook, Right.OPERATE, "webhooks", DeliveryOut, status=202, once=True),
    Route("GET", "/webhooks/{webhook_id}/deliveries", list_deliveries, Right.OPERATE, "webhooks", DeliveryOut, params=(_STATE, *PAGED), listed=True),
)  # fmt: skip
