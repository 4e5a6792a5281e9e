"""The replicas of a self-hosted deployment: where they are found, and by which numbers one is picked."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from gateway.core.catalog import ReplicaKind, ReplicaSource, Wire
from gateway.settings.section import Section

_MOST = 256
_MOST_TOKENS = 1_000_000_000
_WIRES = (Wire.OPENAI, Wire.ANTHROPIC)
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_][A-Za-z0-9_-]{0,62})*\.?")
#: Names of Services, namespaces and ports in Kubernetes are DNS labels.
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_EXAMPLE = "for example [http://10.0.0.4:8000/v1, http://10.0.0.5:8000/v1]"


def what_is_wrong_with_url(base_url: str) -> tuple[str, str]:
    """(what, hint); ("", "") if it is a base URL that can be used."""
    try:
        parts = urlsplit(base_url)
        bad = parts.scheme not in ("http", "https") or not parts.hostname or (parts.port or 1) > 65535
    except ValueError:
        bad = True
        parts = urlsplit("")
    if bad:
        return f"must be an http or https URL, not {base_url!r}", ""
    if parts.username or parts.password:
        return "must not hold a user name or a password", "give the secret as `key:`"
    if parts.query or parts.fragment:
        return "must not hold a query or a fragment", ""
    return "", ""


def read_replicas(item: Section, wire: Wire) -> ReplicaSource | None:
    """`replicas:` of a deployment: a list of base URLs, or a mapping; None if there is none."""
    if "replicas" not in item:
        return None
    if wire not in _WIRES:
        item.wrong("replicas", f"a provider of wire {wire} has none", "set `wire: openai`")
    if item.is_list("replicas"):
        return ReplicaSource(ReplicaKind.STATIC, urls=_urls(item, "replicas"))
    if item.is_single("replicas"):
        item.wrong("replicas", "must be a list of base URLs or a mapping", _EXAMPLE)
        return None
    section = item.section("replicas")
    found = _source(section)
    section.done()
    return found


def _source(section: Section) -> ReplicaSource:
    given = [name for name in ("urls", "dns", "kubernetes") if name in section]
    if not given:
        section.wrong("", "does not say where the replicas are", "give `urls`, `dns` or `kubernetes`")
    for name in given[1:]:
        section.wrong(name, f"replicas are found in one way, and these by `{given[0]}` already")
    kind = ReplicaKind.STATIC if given[:1] == ["urls"] or not given else ReplicaKind(given[0])
    dns, kubernetes = section.section("dns"), section.section("kubernetes")
    host = service = namespace = port = ""
    if "dns" in section:
        host, port = dns.required("host", "the name of a headless Service"), _port_number(dns)
        if host and not _HOST.fullmatch(host):
            dns.wrong(
                "host", f"must be a host name, not {host!r}", "scheme, port and path have keys of their own"
            )
    if "kubernetes" in section:
        service = _label(kubernetes, "service", "the name of the Service in front of the replicas")
        namespace = _label(kubernetes, "namespace", "")
        port = _port_of_service(kubernetes)
    dns.done()
    kubernetes.done()
    scheme = section.text("scheme", "http")
    if scheme not in ("http", "https"):
        section.wrong("scheme", f"must be http or https, not {scheme!r}")
    for key in ("scheme", "path"):
        if key in section and kind is ReplicaKind.STATIC:
            section.wrong(key, "is part of each base URL")
    return ReplicaSource(
        kind=kind,
        urls=_urls(section, "urls"),
        host=host,
        service=service,
        namespace=namespace,
        port=port,
        scheme=scheme,
        path=_path(section, "path", "/v1").rstrip("/"),
        health_path=_path(section, "health_path", "/health"),
        metrics_path=_path(section, "metrics_path", "/metrics"),
        refresh_s=section.number("refresh_s", 5.0, 0.5, 3_600),
        poll_s=section.number("poll_s", 1.0, 0.1, 60),
        prefill_tokens_per_s=section.number("prefill_tokens_per_s", 0, 1, 10_000_000) or None,
        first_token_max_s=section.number("first_token_max_s", 14.0, 0.1, 600),
        tau_tokens=section.optional_integer("tau_tokens", 0, _MOST_TOKENS),
        warm_ratio=section.number("warm_ratio", 0.8, 0.01, 1.0),
        exploration=section.number("exploration", 0.005, 0.0, 0.01),
        decode_bound=section.flag("decode_bound", False),
        kv_tokens=section.integer("kv_tokens", 500_000, 1_000, _MOST_TOKENS),
    )


def _urls(section: Section, key: str) -> tuple[str, ...]:
    found: list[str] = []
    for text in section.texts(key):
        url = text.rstrip("/")
        wrong, hint = what_is_wrong_with_url(url)
        if wrong:
            section.wrong(key, wrong, hint)
        elif url in found:
            section.wrong(key, f"{url} is there twice")
        found.append(url)
    if key in section and not found:
        section.wrong(key, "lists no replica", _EXAMPLE)
    if len(found) > _MOST:
        section.wrong(key, f"lists {len(found)} replicas; {_MOST} are the most")
    return tuple(found)


def _port_number(section: Section) -> str:
    if "port" not in section:
        section.wrong("port", "is required", "for example 8000")
    port = section.optional_integer("port", 1, 65_535)
    return "" if port is None else str(port)


def _port_of_service(section: Section) -> str:
    """A number or a name; "" = the Service has one port only."""
    port = section.text("port")
    if port.isdigit():
        return _port_number(section)
    if port and not _LABEL.fullmatch(port):
        section.wrong("port", f"must be the number or the name of a port, not {port!r}")
    return port


def _label(section: Section, key: str, hint: str) -> str:
    name = section.required(key, hint) if hint else section.text(key)
    if name and not _LABEL.fullmatch(name):
        section.wrong(key, f"must be a name as Kubernetes allows it, not {name!r}")
    return name


def _path(section: Section, key: str, default: str) -> str:
    path = section.text(key, default)
    if (path and not path.startswith("/")) or not path.isascii() or any(c in path for c in " ?#"):
        section.wrong(key, f"must begin with a slash and have no query, not {path!r}")
    return path
