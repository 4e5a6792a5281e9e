"""doctor: try each thing that the gateway depends on, and say what to do about those that fail."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from gateway import __version__
from gateway import settings as config
from gateway.commands import database, overlay, replica_findings
from gateway.commands.findings import Finding, State
from gateway.commands.output import moment, print_json, print_table, say
from gateway.settings import ConfigError, Listen, Settings

_TIMEOUT_S = 3.0
#: When this version was made: a clock before it is wrong.
_RELEASED_MS = 1_796_000_000_000  # 2026-11-30


def doctor(path: Path | None, as_json: bool) -> int:
    """0 if everything that is needed works, 1 if not, 2 if the configuration cannot be read."""
    try:
        settings = config.load(path, config.environment())
    except ConfigError as error:
        findings = [
            Finding("configuration", State.FAIL, f"{p.file}:{p.line} {p.key}: {p.message}", p.hint)
            for p in error.problems
        ]
        _print(findings, as_json)
        return 2
    findings = asyncio.run(examine(path, settings))
    _print(findings, as_json)
    return 1 if any(f.state is State.FAIL for f in findings) else 0


async def examine(path: Path | None, settings: Settings) -> list[Finding]:
    """Everything, in the order in which a person would want to mend it."""
    now_ms = time.time_ns() // 1_000_000
    state_dir = _state_dir(settings)
    findings = [_version(), Finding("configuration", State.OK, f"{settings.file} has no problems"), state_dir]
    findings.append(_pepper(settings, state_dir.state is not State.FAIL))
    findings += await database.examine(settings)
    settings, written = await overlay.examine(path, settings)
    findings += written
    findings.append(_clock(now_ms))
    findings += await asyncio.gather(
        _redis(settings), _port("requests", settings.listen), _port("admin", settings.admin_listen)
    )
    return [*findings, *_providers(settings), *await replica_findings.examine(settings)]


def _print(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "ok": all(f.state is not State.FAIL for f in findings),
                "findings": [asdict(f) for f in findings],
            }
        )
        return
    print_table(
        ["", "subject", "found", "what to do"], [[f.state, f.subject, f.found, f.to_do] for f in findings]
    )
    failed = sum(f.state is State.FAIL for f in findings)
    say(f"{failed} of {len(findings)} fail" if failed else "everything that is needed works")


def _version() -> Finding:
    python = ".".join(map(str, sys.version_info[:3]))
    return Finding("version", State.OK, f"tollhouse {__version__}, Python {python}")


def _state_dir(settings: Settings) -> Finding:
    path = settings.state_dir
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = path / f".doctor.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        return Finding(
            "state directory", State.FAIL, f"{path}: {error.strerror}", "make it writable, or set state_dir"
        )
    return Finding("state directory", State.OK, f"{path} can be written")


def _pepper(settings: Settings, directory_works: bool) -> Finding:
    if settings.pepper is not None:
        return Finding("pepper", State.OK, "is configured")
    path = settings.state_dir / "pepper"
    if not path.exists():
        if directory_works:
            return Finding("pepper", State.OK, f"will be made in {path}")
        return Finding("pepper", State.FAIL, "there is none and none can be made", "mend the state directory")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        return Finding("pepper", State.FAIL, f"{path} can be read by other users", f"chmod 600 {path}")
    if settings.database_url.startswith("postgres"):
        return Finding(
            "pepper",
            State.WARN,
            f"{path}, on this machine only",
            "give every replica the same TOLLHOUSE_PEPPER, or keys made here fail elsewhere",
        )
    return Finding("pepper", State.OK, str(path))


def _clock(now_ms: int) -> Finding:
    if now_ms < _RELEASED_MS:
        return Finding(
            "clock", State.FAIL, f"says {moment(now_ms)}", "set it: budgets of a day or month follow it"
        )
    return Finding("clock", State.OK, moment(now_ms))


async def _redis(settings: Settings) -> Finding:
    if settings.redis_url is None:
        many = settings.database_url.startswith("postgres")
        to_do = (
            "with several replicas each limits rates for itself; set redis_url to share them" if many else ""
        )
        return Finding("redis", State.OK, "not configured, not needed", to_do)
    import redis.asyncio
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError

    client = redis.asyncio.from_url(
        settings.redis_url,
        socket_connect_timeout=_TIMEOUT_S,
        socket_timeout=_TIMEOUT_S,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        await client.ping()
    except (RedisError, OSError) as error:
        to_do = "start it or mend redis_url; until then each replica limits rates for itself"
        return Finding("redis", State.WARN, f"{settings.redis_shown} does not answer: {error}", to_do)
    finally:
        await client.aclose()
    return Finding("redis", State.OK, f"{settings.redis_shown} answers")


async def _port(name: str, listen: Listen) -> Finding:
    """Free, served by a gateway, or taken by somebody else."""
    subject = f"port for {name}"
    if listen.port == 0:
        return Finding(subject, State.OK, "any free one")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listen.host, listen.host)
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, listen.port)
    except (OSError, TimeoutError):
        return Finding(subject, State.OK, f"{listen} is free")
    answer = b""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            writer.write(f"GET /readyz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            answer = await reader.read(65_536)
    except (OSError, TimeoutError):
        pass
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    try:
        said = json.loads(body)
    except ValueError:
        said = None
    # The public listener names itself; the admin listener has the same answer without a name.
    if not isinstance(said, dict) or not (
        said.get("service") == "tollhouse" or {"status", "reasons"} <= said.keys()
    ):
        to_do = "stop it, or choose another port with --port and --admin-port"
        return Finding(subject, State.FAIL, f"something else listens at {listen}", to_do)
    if head.split(b" ", 2)[1:2] == [b"200"]:
        return Finding(subject, State.OK, f"a gateway serves at {listen}")
    return Finding(
        subject, State.FAIL, f"the gateway at {listen} is not ready: {said.get('reasons')}", "see its log"
    )


def _providers(settings: Settings) -> Iterator[Finding]:
    for provider in settings.providers.values():
        models = sum(d.provider.name == provider.name for d in settings.catalog.deployments)
        what = f"{models} model{'' if models == 1 else 's'}"
        key = "a key is set (not tried: that would call it)" if provider.credential else "needs no key"
        yield Finding(f"provider {provider.name}", State.OK, f"{what}; {key}")
    if settings.demo:
        yield Finding(
            "providers",
            State.WARN,
            "no provider has a key, so the built-in demo answers",
            "export one, for example OPENAI_API_KEY or ANTHROPIC_API_KEY",
        )
    unpriced = [d.name for d in settings.catalog.deployments if not settings.prices.by_price.get(d.price)]
    if unpriced:
        to_do = "declare `price:`; under a hard budget these models are refused"
        yield Finding("prices", State.WARN, f"none for {', '.join(unpriced)}", to_do)
    if settings.catalog.needs_litellm:
        if importlib.util.find_spec("litellm") is None:
            yield Finding(
                "litellm", State.FAIL, "is needed and not installed", "install the locked requirements"
            )
        else:
            yield Finding("litellm", State.OK, "is installed, and loaded when a provider needs it")
