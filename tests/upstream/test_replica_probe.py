"""What a replica answers when it is asked how it is, and what it may not do to us."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gateway.core.catalog import Deployment, Provider, ReplicaKind, ReplicaSource, Wire
from gateway.ports import ServedModel, Unanswered
from gateway.upstream.discovery import Discovery
from gateway.upstream.replicas import METRICS_BYTES_MAX, HttpReplicas, root_of
from tests.support.fake_vllm import FakeVllm

Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


def of(source: ReplicaSource | None = None) -> Deployment:
    provider = Provider("gpu", Wire.OPENAI, "", "cred")
    return Deployment(
        "gpu/m", provider, "m", "m", "", replicas=source or ReplicaSource(ReplicaKind.STATIC, urls=("x",))
    )


@asynccontextmanager
async def asking(timeout_s: float = 5.0) -> AsyncIterator[HttpReplicas]:
    replicas = HttpReplicas({"cred": "sk-1"}, Discovery(), lambda _: None, timeout_s=timeout_s)
    await replicas.start()
    try:
        yield replicas
    finally:
        await replicas.stop()


@asynccontextmanager
async def serving(**pages: Page) -> AsyncIterator[str]:
    """A server with these pages; its base URL."""
    app = web.Application()
    for name, page in pages.items():
        app.router.add_get("/" + name.replace("__", "/"), page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def says(body: bytes | str, status: int = 200, **headers: str) -> Page:
    async def page(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, headers=headers)

    return page


async def test_what_vllm_says_of_itself() -> None:
    async with FakeVllm() as replica, asking() as replicas:
        text = await replicas.metrics(of(), replica.base_url)
        assert "vllm:num_requests_running" in text
        assert await replicas.models(of(), replica.base_url) == (ServedModel("small", 32_768),)
        assert await replicas.version(replica.base_url) == "0.32.0"


async def test_models_are_asked_with_the_key_and_health_without() -> None:
    seen: dict[str, str | None] = {}

    def page(body: bytes) -> Page:
        async def answer(request: web.Request) -> web.Response:
            seen[request.path] = request.headers.get("Authorization")
            return web.Response(body=body)

        return answer

    async with serving(health=page(b""), metrics=page(b"x 1\n"), v1__models=page(b'{"data": []}')) as url:
        async with asking() as replicas:
            assert await replicas.metrics(of(), url) == "x 1\n"
            assert await replicas.models(of(), url) == ()
            assert await replicas.version(url) == ""
    assert seen == {"/health": None, "/metrics": None, "/v1/models": "Bearer sk-1"}


@pytest.mark.parametrize(
    ("pages", "why"),
    [
        ({"health": says("", 503), "metrics": says("x 1\n")}, "/health answers HTTP 503"),
        ({"health": says("", 302, Location="http://127.0.0.1:1/")}, "/health answers HTTP 302"),
        ({"health": says(""), "metrics": says("", 500)}, "/metrics answers HTTP 500"),
        ({"health": says(""), "metrics": says(b"x" * (METRICS_BYTES_MAX + 1))}, "more than 4194304 bytes"),
    ],
)
async def test_whose_health_says_no(pages: dict[str, Page], why: str) -> None:
    async with serving(**pages) as url, asking() as replicas:
        with pytest.raises(Unanswered, match=why) as error:
            await replicas.metrics(of(), url)
        assert error.value.slow is False


async def test_a_server_without_metrics_is_well_if_its_health_says_so() -> None:
    async with serving(health=says("")) as url, asking() as replicas:
        assert await replicas.metrics(of(), url) == ""
        quiet = ReplicaSource(ReplicaKind.STATIC, urls=("x",), health_path="")
        with pytest.raises(Unanswered, match="/metrics answers HTTP 404"):
            await replicas.metrics(of(quiet), url)


async def test_who_is_slow_may_only_be_busy_and_who_is_away_is_not() -> None:
    go = asyncio.Event()

    async def page(_: web.Request) -> web.Response:
        await go.wait()
        return web.Response()

    async with serving(health=page) as url, asking(0.05) as replicas:
        with pytest.raises(Unanswered, match=r"no answer within 0\.05 s") as error:
            await replicas.metrics(of(), url)
        assert error.value.slow is True
        go.set()
        with pytest.raises(Unanswered) as error:
            await replicas.metrics(of(), "http://127.0.0.1:1/v1")
        assert error.value.slow is False


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"5", b'{"data": 5}', b'{"data": [{"name": "m"}]}', b'{"data": ["m"]}'])  # fmt: skip
async def test_models_that_are_no_list_of_models(body: bytes) -> None:
    async with serving(v1__models=says(body), version=says(body)) as url, asking() as replicas:
        with pytest.raises(Unanswered, match="something that is no list of models"):
            await replicas.models(of(), url)
        assert await replicas.version(url) == ""


async def test_a_context_that_is_no_number_is_not_said() -> None:
    body = b'{"data": [{"id": "a", "max_model_len": "8k"}, {"id": "b", "max_model_len": -1}, {"id": "c", "max_model_len": true}]}'
    async with serving(v1__models=says(body)) as url, asking() as replicas:
        assert await replicas.models(of(), url) == tuple(ServedModel(name, None) for name in "abc")


def test_where_a_servers_own_pages_are() -> None:
    assert root_of("http://10.0.0.4:8000/v1") == "http://10.0.0.4:8000"
    assert root_of("https://proxy/gpu0/v1") == "https://proxy/gpu0"
    assert root_of("http://[fd00::1]:8000/api/v3") == "http://[fd00::1]:8000"
    assert root_of("http://10.0.0.4:8000") == "http://10.0.0.4:8000"


async def test_a_url_without_its_end_is_told_so() -> None:
    async with serving(v1__models=says('{"data": []}')) as url, asking() as replicas:
        assert await replicas.models(of(), url) == ()
        with pytest.raises(
            Unanswered, match="/models answers HTTP 404; does its URL lack the /v1 at the end?"
        ):
            await replicas.models(of(), url.removesuffix("/v1"))
