"""Where a webhook may go: judging a URL before it is used, and an address before it is connected to.

`judge` is about the text alone; a name may still resolve to anything, so each address that a resolver gives is put
to `judge_ip`, and the connection goes to the address that was judged. Refused is whatever is not plainly public:
an address in any spelling but the usual one, names that only exist inside a network, the cloud's own services.
Ranges: IANA special-purpose address registries for IPv4 and IPv6 (2026-11).
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Address = IPv4Address | IPv6Address

PORTS = frozenset({443, 8443})
MAX_URL_CHARS = 2_048

_V4_REFUSED = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier NAT, and a cloud's metadata at 100.100.100.200
        "127.0.0.0/8",
        "168.63.129.16/32",  # Azure's own services, at a public address
        "169.254.0.0/16",  # link-local, and metadata at most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocol assignments, and Oracle's metadata at 192.0.0.192
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
_V6_PUBLIC = IPv6Network("2000::/3")  # all that is assigned for use on the internet
_V6_REFUSED = tuple(
    IPv6Network(text)
    for text in (
        "2001::/23",  # protocol assignments, Teredo among them
        "2001:db8::/32",
        "2002::/16",  # 6to4: carries an IPv4 address
        "3fff::/20",
    )
)
#: IPv4 behind a network's NAT64; what counts is the address inside.
_NAT64 = IPv6Network("64:ff9b::/96")

#: Names that public DNS does not have, or that mean this machine or this network.
_INNER_SUFFIXES = (
    *("localhost", "localdomain", "local", "internal", "intranet", "private", "corp", "home", "lan", "arpa"),
    *("test", "invalid", "example", "onion", "alt"),
    *("svc", "cluster", "consul", "k8s", "docker", "kube"),
)
_URL = re.compile(r"(https?)://([^/?#\\]*)([/?][^#]*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]@%]+)(?::([0-9]{1,5}))?", re.IGNORECASE)
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_DECIMAL_V4 = re.compile(r"(?:(?:0|[1-9][0-9]{0,2})\.){3}(?:0|[1-9][0-9]{0,2})")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a URL goes, or why it may not be used. `reason` is "" when it may; only then the rest means anything."""

    reason: str
    scheme: str = ""
    host: str = ""  # lower case, without brackets and without a last dot
    port: int = 0
    address: Address | None = None  # of a host that is an address; None = a name to be resolved

    @property
    def allowed(self) -> bool:
        return not self.reason


def judge(url: str, *, ports: frozenset[int] = PORTS, loopback: bool = False) -> Verdict:
    """Whether a webhook may have this URL. Never raises, resolves nothing.

    `loopback`: for tests, http and https to 127.0.0.1 and [::1] at any port as well.
    """
    if len(url) > MAX_URL_CHARS:
        return Verdict(f"it is longer than {MAX_URL_CHARS} characters")
    if not url.isascii() or any(not "!" <= c <= "~" for c in url):
        return Verdict("it has characters outside of printable ASCII; write a host in its xn-- form")
    match = _URL.fullmatch(url)
    if match is None:
        return Verdict("it must be https://host/path, without a fragment or a backslash")
    scheme, authority = match[1].lower(), match[2]
    if "@" in authority:
        return Verdict("it must not have a user or a password")
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        return Verdict("its host cannot be read")
    host = parts[1].lower()
    port = int(parts[2]) if parts[2] else (443 if scheme == "https" else 80)
    address, reason = _address(host)
    if reason:
        return Verdict(reason)
    host = host.strip("[]").removesuffix(".")
    if loopback and address is not None and _is_this_host(address) and 0 < port < 65_536:
        return Verdict("", scheme, host, port, address)
    if scheme != "https":
        return Verdict("it must begin with https://")
    if port not in ports:
        return Verdict(f"port {port} is not among those allowed: {', '.join(map(str, sorted(ports)))}")
    if address is not None and not judge_ip(address):
        return Verdict("its address is not a public one")
    return Verdict("", scheme, host, port, address)


def judge_ip(address: str | Address, *, loopback: bool = False) -> bool:
    """Whether a connection to this address may be made: plainly public ones only (and 127.0.0.1, ::1 if `loopback`).

    What is not the text of an address is refused, too.
    """
    if isinstance(address, str):
        try:
            address = ip_address(address)
        except ValueError:
            return False
    if loopback and _is_this_host(address):
        return True
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _V4_REFUSED)
    if address.scope_id is not None:
        return False
    if address in _NAT64:
        return judge_ip(IPv4Address(int(address) & 0xFFFF_FFFF))
    return address in _V6_PUBLIC and not any(address in network for network in _V6_REFUSED)


def _is_this_host(address: Address) -> bool:
    return str(address) in ("127.0.0.1", "::1")


def _address(host: str) -> tuple[Address | None, str]:
    """(the address that a host is, why it may not be used); (None, "") for a name that may."""
    if host.startswith("["):
        try:
            return IPv6Address(host[1:-1]), ""
        except AddressValueError:
            return None, "its host is not an IPv6 address"
    name = host.removesuffix(".")
    labels = name.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        # Resolvers read 127.1, 0177.0.0.1, 2130706433 and 0x7f.1 as addresses, and do not agree on all of them.
        if not _DECIMAL_V4.fullmatch(name):
            return None, "an IPv4 address must be written as four decimal numbers"
        try:
            return IPv4Address(name), ""
        except AddressValueError:
            return None, "its host is not an IPv4 address"
    if len(name) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        return None, "its host is not a name that DNS can have"
    if len(labels) < 2 or labels[-1] in _INNER_SUFFIXES:
        return None, "its host is a name inside a network, not one of the public DNS"
    if any(not _honest(label) for label in labels if label[2:4] == "--"):
        return None, "its host has an xn-- label that stands for nothing"
    return None, ""


def _honest(label: str) -> bool:
    """An A-label stands for characters outside of ASCII, none of which is only another form of others."""
    if not label.startswith("xn--"):
        return False  # other prefixes are reserved
    try:
        decoded = label[4:].encode("ascii").decode("punycode")
    except (UnicodeError, OverflowError):
        return False
    same = decoded.encode("punycode").decode("ascii") == label[4:]
    letters = all(c == "-" or unicodedata.category(c)[0] in "LMN" for c in decoded)
    return same and letters and not decoded.isascii() and unicodedata.normalize("NFKC", decoded) == decoded


#: Where clouds give their machines credentials, besides all that is link-local.
_METADATA = frozenset(
    {
        "168.63.129.16",
        "100.100.100.200",
        "192.0.0.192",
        "fd00:ec2::254",
        "metadata",
        "metadata.google.internal",
    }
)


def is_metadata_service(url: str) -> bool:
    """Whether a provider's base URL names a cloud's metadata service, in the usual spelling or another one of its address.
    Other addresses inside of a network are fine there: servers of one's own are called by them.
    """
    match = _URL.fullmatch(url)
    parts = _AUTHORITY.fullmatch(match[2]) if match is not None else None
    if parts is None:
        return match is not None and "%" in match[2]
    host = parts[1].lower().strip("[]").removesuffix(".")
    if host in _METADATA:
        return True
    address, reason = _address(parts[1].lower())
    if reason and _NUMBER.fullmatch(host.split(".")[-1]):
        return True  # an address in a spelling that hides it
    inner = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return any(
        found is not None and (found.is_link_local or str(found) in _METADATA) for found in (address, inner)
    )
