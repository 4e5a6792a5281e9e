"""What must hold between a gateway and its replicas, whoever plays them; each check returns what is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from tests.support.fake_vllm import FakeVllm
from tests.vllm.load import Call
from tests.vllm.probes import answers
from tests.vllm.shapes import metric_families

#: Error kinds under which an attempt may have ended while replicas come and go. On a slow machine one that is told to end
#: may stay silent for as long as the gateway waits for the next byte.
_BROKEN = frozenset(
    {
        *("upstream_aborted", "upstream_lost", "upstream_error", "upstream_unreachable"),
        *("upstream_overloaded", "upstream_timeout"),
    }
)


async def alike(url: str, model: str) -> list[str]:
    """The fake, and the server at `url`, asked the same."""
    async with FakeVllm() as fake:
        ours, theirs = await answers(fake.url, "small"), await answers(url, model)
        wrong = [
            f"{name}: the fake answers {ours[name]}, the server {theirs[name]}"
            for name in ours
            if ours[name] != theirs[name]
        ]
        pages = []
        for root in (fake.url, url):
            async with aiohttp.ClientSession() as http, http.get(root + "/metrics") as answer:
                pages.append(metric_families(await answer.text()))
    played, real = pages
    for name, (kind, labels) in played.items():
        there = real.get(name)
        if there is None or there[0] != kind or not labels <= there[1]:
            wrong.append(f"{name}: the fake has {kind} {sorted(labels)}, the server {there}")
    return wrong


def settled_once(calls: Sequence[Call], entries: Sequence[Mapping[str, Any]], open_holds: int) -> list[str]:
    """Every call that got its answer has one entry with that answer's usage; every other attempt says how it broke."""
    wrong = [f"{open_holds} holds are open"] if open_holds else []
    by_request: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_request.setdefault(entry["request_id"], []).append(entry)
    attempts = [entry["attempt_id"] for entry in entries]
    if len(attempts) != len(set(attempts)):
        wrong.append("an attempt has two entries")
    for call in calls:
        mine = by_request.pop(call.request_id, [])
        good = [e for e in mine if e["kind"] == "post" and not e["error"]]
        if call.status != 200:
            wrong.append(f"{call.request_id}: {call.status} {call.error} before its first byte")
        elif call.whole and len(good) == 1 and call.usage is not None:
            (entry,) = good
            booked = entry["input_uncached"] + entry["cache_read"], entry["cache_read"], entry["output"]
            if booked != call.usage:
                wrong.append(f"{call.request_id}: booked {booked}, told {call.usage}")
        elif call.whole or good or not mine:
            wrong.append(f"{call.request_id}: {call} has {[(e['kind'], e['error']) for e in mine]}")
        bad = {e["error"] for e in mine if e not in good} - _BROKEN
        if bad:
            wrong.append(f"{call.request_id}: an attempt ended with {bad}")
    wrong += [f"{request_id}: an entry without a call" for request_id in by_request]
    return wrong


def served(entries: Sequence[Mapping[str, Any]], replica: str) -> tuple[int, int]:
    """(prompt, output) tokens booked for what that replica answered; a replica is named as clients see it."""
    mine = [e for e in entries if e["served_by"] == replica and e["kind"] == "post" and not e["error"]]
    return sum(e["input_uncached"] + e["cache_read"] for e in mine), sum(e["output"] for e in mine)


async def counted(url: str) -> tuple[int, int]:
    """(prompt, output) tokens of a server since it was started, as it counts them."""
    async with aiohttp.ClientSession() as http, http.get(url + "/metrics") as answer:
        lines = (await answer.text()).splitlines()
    sums = {"vllm:prompt_tokens_total": 0.0, "vllm:generation_tokens_total": 0.0}
    for line in lines:
        name = line.partition("{")[0]
        if name in sums:
            sums[name] += float(line.rpartition(" ")[2])
    prompt, output = sums.values()
    return int(prompt), int(output)
