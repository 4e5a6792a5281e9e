"""Ask a replica how it is: /health, /metrics, and once /v1/models and /version. Never on the way of a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import aiohttp
import msgspec

from gateway.core.catalog import Deployment, ReplicaSource, Wire
from gateway.ports import ServedModel, Unanswered
from gateway.upstream.discovery import Discovery, bounded

TIMEOUT_S = 2.0
#: vLLM's page has about 100 KB.
METRICS_BYTES_MAX = 4 << 20
_SMALL_BYTES_MAX = 1 << 20
_VERSION_CHARS_MAX = 64
_CONNECTIONS_MAX = 512


class HttpReplicas:
    """`ports.Replicas` between `start` and `stop`. `credentials` maps a credential's name to its secret; `forget` is
    told of addresses that are gone.
    """

    def __init__(
        self,
        credentials: Mapping[str, str],
        discovery: Discovery,
        forget: Callable[[str], None],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._credentials = credentials
        self._discovery = discovery
        self.forget = forget
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        await self._discovery.start()
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS_MAX, limit_per_host=4),
            auto_decompress=False,  # nothing of a small answer may become a large one
            headers={"Accept-Encoding": "identity"},
        )

    async def stop(self) -> None:
        await self._discovery.stop()
        if self._http is not None:
            await self._http.close()

    async def find(self, deployment: Deployment) -> tuple[str, ...]:
        return await self._discovery.find(_source(deployment))

    async def metrics(self, deployment: Deployment, address: str) -> str:
        source = _source(deployment)
        root = root_of(address)
        if source.health_path:
            status, _ = await self._get(root + source.health_path, {}, _SMALL_BYTES_MAX)
            if status != 200:
                raise Unanswered(f"{source.health_path} answers HTTP {status}")
        status, body = await self._get(root + source.metrics_path, {}, METRICS_BYTES_MAX)
        if status == 404 and source.health_path:
            return ""
        if status != 200:
            raise Unanswered(f"{source.metrics_path} answers HTTP {status}")
        return body.decode("utf-8", "replace")

    async def models(self, deployment: Deployment, address: str) -> tuple[ServedModel, ...]:
        status, body = await self._get(f"{address}/models", self._auth(deployment), _SMALL_BYTES_MAX)
        if status != 200:
            lacking = status == 404 and not address.endswith("/v1")
            hint = "; does its URL lack the /v1 at the end?" if lacking else ""
            raise Unanswered(f"/models answers HTTP {status}{hint}")
        try:
            rows = msgspec.json.decode(body)["data"]
            return tuple(ServedModel(str(row["id"]), _tokens(row)) for row in rows)
        except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise Unanswered("/models answers something that is no list of models") from error

    async def version(self, address: str) -> str:
        status, body = await self._get(f"{root_of(address)}/version", {}, _SMALL_BYTES_MAX)
        try:
            found = msgspec.json.decode(body) if status == 200 else None
        except msgspec.DecodeError:
            found = None
        return str(found.get("version", ""))[:_VERSION_CHARS_MAX] if isinstance(found, dict) else ""

    def _auth(self, deployment: Deployment) -> dict[str, str]:
        secret = self._credentials.get(deployment.provider.credential, "")
        if not secret:
            return {}
        anthropic = deployment.provider.wire is Wire.ANTHROPIC
        return {"x-api-key": secret} if anthropic else {"Authorization": f"Bearer {secret}"}

    async def _get(self, url: str, headers: Mapping[str, str], most: int) -> tuple[int, bytes]:
        if self._http is None:
            raise RuntimeError("ReplicaProbe before start")
        try:
            async with self._http.get(url, headers=headers, allow_redirects=False) as answer:
                return answer.status, await bounded(answer, most)
        except TimeoutError:
            raise Unanswered(f"no answer within {self._timeout_s:g} s", slow=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unanswered(str(error) or type(error).__name__) from error


def _source(deployment: Deployment) -> ReplicaSource:
    if deployment.replicas is None:
        raise ValueError(f"{deployment.name} has no replicas")
    return deployment.replicas


def root_of(address: str) -> str:
    """Where the server's own pages are: "http://10.0.0.4:8000" for "http://10.0.0.4:8000/v1"."""
    if address.endswith("/v1"):
        return address.removesuffix("/v1")
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc}"


def _tokens(row: Mapping[str, object]) -> int | None:
    found = row.get("max_model_len")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else None
