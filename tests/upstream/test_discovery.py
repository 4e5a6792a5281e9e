"""Where replicas are: by DNS that knows nothing, many, or never answers; by a cluster's endpoints, as a pod asks."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gateway.core.catalog import ReplicaKind, ReplicaSource
from gateway.ports import Unanswered
from gateway.upstream.discovery import Address, Discovery, endpoints

DNS = ReplicaSource(ReplicaKind.DNS, host="tier.gpu.svc", port="8000", path="/v1")


class Resolver:
    """Answers `known`, or hangs until `go`."""

    def __init__(self, *known: str) -> None:
        self.known: Sequence[str] = known
        self.asked = 0
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, host: str, port: int) -> Sequence[Address]:
        self.asked += 1
        await self.go.wait()
        if not self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(address, port) for address in self.known]


async def test_every_address_of_a_name_is_a_replica() -> None:
    discovery = Discovery(resolve=Resolver("10.0.0.9", "10.0.0.4", "fd00::1", "10.0.0.4"))
    assert await discovery.find(DNS) == (
        "http://10.0.0.4:8000/v1",
        "http://10.0.0.9:8000/v1",
        "http://[fd00::1]:8000/v1",
    )


async def test_a_name_that_is_unknown_is_said_so() -> None:
    with pytest.raises(Unanswered, match="DNS knows no tier.gpu.svc: .*not known"):
        await Discovery(resolve=Resolver()).find(DNS)


async def test_of_a_thousand_addresses_256_are_used_always_the_same_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    many = [f"10.0.{i // 256}.{i % 256}" for i in range(1_000)]
    discovery = Discovery(resolve=Resolver(*many))
    one = await discovery.find(DNS)
    assert (len(one), await discovery.find(DNS)) == (256, one)
    assert caplog.messages == ["tier.gpu.svc has 1000 addresses; 256 are used"]
    assert await Discovery(resolve=Resolver(*reversed(many))).find(DNS) == one


async def test_a_resolver_that_hangs_is_asked_once_and_its_late_answer_is_taken() -> None:
    resolver = Resolver("10.0.0.4")
    resolver.go.clear()
    discovery = Discovery(resolve=resolver, timeout_s=0.01)
    for _ in range(3):
        with pytest.raises(Unanswered, match=r"does not answer for tier.gpu.svc within 0.01 s"):
            await discovery.find(DNS)
    assert resolver.asked == 1
    resolver.go.set()
    discovery._timeout_s = 30.0  # on a busy machine 0.01 s are over before the answer is passed on
    assert await discovery.find(DNS) == ("http://10.0.0.4:8000/v1",)
    assert resolver.asked == 1
    resolver.go.clear()
    discovery._timeout_s = 0.01
    with pytest.raises(Unanswered):
        await discovery.find(DNS)
    await discovery.stop()  # while it hangs


async def test_the_real_resolver() -> None:
    local = ReplicaSource(ReplicaKind.DNS, host="localhost", port="8000")
    assert "http://127.0.0.1:8000/v1" in await Discovery().find(local)


# --- Kubernetes --------------------------------------------------------------------------------------------


def endpoint(address: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions}


def slices(*endpoints: dict[str, Any], ports: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    ports = ports or [{"name": "http", "port": 8000}]
    return {"kind": "EndpointSliceList", "items": [{"endpoints": list(endpoints), "ports": ports}]}


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is mounted into a pod, with a certificate of "localhost" as the cluster's."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "the cluster's certificate is made with the openssl command"
    path = tmp_path_factory.mktemp("serviceaccount")
    made = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    named = ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        [*made, *named, "-keyout", path / "key", "-out", path / "ca.crt"], check=True, capture_output=True
    )
    (path / "token").write_text("token-1\n")
    (path / "namespace").write_text("own")
    return path


class Cluster:
    """The API server, as far as it is asked."""

    def __init__(self) -> None:
        self.answer: tuple[int, bytes] = 200, b""
        self.asked: list[tuple[str, str]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((str(request.rel_url), request.headers.get("Authorization", "")))
        return web.Response(status=self.answer[0], body=self.answer[1])

    def says(self, doc: object, status: int = 200) -> None:
        self.answer = status, json.dumps(doc).encode()


@asynccontextmanager
async def cluster(account: Path) -> AsyncIterator[tuple[Cluster, Discovery]]:
    it = Cluster()
    app = web.Application()
    app.router.add_get("/{tail:.*}", it.handle)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(account / "ca.crt", account / "key")
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    discovery = Discovery(api=f"https://localhost:{runner.addresses[0][1]}", account=account)
    await discovery.start()
    try:
        yield it, discovery
    finally:
        await discovery.stop()
        await runner.cleanup()


SERVICE = ReplicaSource(ReplicaKind.KUBERNETES, service="tier", namespace="gpu", port="http", scheme="https")


async def test_the_ready_endpoints_of_a_service(account: Path) -> None:
    async with cluster(account) as (api, discovery):
        api.says(
            slices(
                endpoint("10.0.0.4", ready=True),
                endpoint("10.0.0.5", ready=False, serving=True, terminating=True),
                endpoint("10.0.0.6", ready=False),
                endpoint("10.0.0.7"),
                endpoint("10.0.0.8", ready=None),
                endpoint("10.0.0.9", ready=True, terminating=True),
                ports=[{"name": "metrics", "port": 9000}, {"name": "http", "port": 8000}],
            )
        )
        assert await discovery.find(SERVICE) == (
            "https://10.0.0.4:8000/v1",
            "https://10.0.0.7:8000/v1",
            "https://10.0.0.8:8000/v1",
        )
        (account / "token").write_text("token-2")  # it is replaced while the gateway runs
        api.says(slices(endpoint("10.0.0.4")))
        await discovery.find(ReplicaSource(ReplicaKind.KUBERNETES, service="tier"))
        path = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices?labelSelector=kubernetes.io/service-name%3Dtier"
        assert api.asked == [
            (path.format("gpu"), "Bearer token-1"),
            (path.format("own"), "Bearer token-2"),
        ]


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (403, b"{}", "answers HTTP 403 about Service gpu/tier"),
        (200, b"<html>", "cannot be read"),
        (200, b"[]", "is no list of EndpointSlices"),
        (200, b'{"items": [{"ports": 5}]}', "is no list of EndpointSlices"),
        (200, json.dumps(slices(endpoint("10.0.0.4", ready=False))).encode(), "tier has no address"),
        (200, b" " * (17 << 20), "more than 16777216 bytes"),
    ],
)
async def test_what_a_cluster_says_instead(account: Path, status: int, body: bytes, says: str) -> None:
    async with cluster(account) as (api, discovery):
        api.answer = status, body
        with pytest.raises(Unanswered, match=says):
            await discovery.find(SERVICE)


async def test_outside_of_a_cluster_and_where_it_does_not_answer(account: Path, tmp_path: Path) -> None:
    for discovery, says in (
        (Discovery(account=tmp_path), "there is no service account here"),
        (Discovery(account=account, api="https://127.0.0.1:1"), "the cluster's API cannot be asked"),
    ):
        await discovery.start()
        with pytest.raises(Unanswered, match=says):
            await discovery.find(SERVICE)
        await discovery.stop()


def test_a_port_is_named_or_the_only_one() -> None:
    two = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]
    listed = slices(endpoint("10.0.0.4"), ports=two)
    assert list(endpoints(listed, "metrics")) == [("10.0.0.4", 9000)]
    assert list(endpoints(listed, "8000")) == [("10.0.0.4", 8000)]
    for port in ("", "grpc"):
        with pytest.raises(Unanswered, match=rf"no one port '{port}', but http \(8000\), metrics \(9000\)"):
            list(endpoints(listed, port))
    assert list(endpoints(slices(endpoint("10.0.0.4")), "")) == [("10.0.0.4", 8000)]
