"""300 ways to write an address that a webhook must not reach (test matrix, row 14), and some that it may."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, ip_address

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core.addresses import PORTS, Verdict, is_metadata_service, judge, judge_ip

INNER = (
    *(
        "127.0.0.1",
        "127.8.9.10",
        "10.1.2.3",
        "172.16.0.1",
        "172.31.255.254",
        "192.168.1.1",
        "169.254.169.254",
    ),
    *(
        "100.64.0.1",
        "100.100.100.200",
        "0.0.0.0",
        "168.63.129.16",
        "192.0.0.192",
        "224.0.0.1",
        "255.255.255.255",
    ),
)


def spellings(inner: str) -> list[str]:
    """Hosts that some resolver or parser takes for this IPv4 address."""
    address = IPv4Address(inner)
    a, b, c, d = address.packed
    n = int(address)
    wide = inner.translate({ord("0") + i: 0xFF10 + i for i in range(10)})
    return [
        inner,
        f"{inner}.",
        str(n),
        f"{n:#x}",
        f"{n:#X}",
        f"0{n:o}",
        f"{a:#x}.{b:#x}.{c:#x}.{d:#x}",
        f"0{a:o}.0{b:o}.0{c:o}.0{d:o}",
        f"{a:03}.{b:03}.{c:03}.{d:03}",
        f"{a}.{b}.{c << 8 | d}",
        f"{a}.{b << 16 | c << 8 | d}",
        f"{a:#x}.{b << 16 | c << 8 | d}",
        f"[::ffff:{inner}]",
        f"[::ffff:{n >> 16:x}:{n & 0xFFFF:x}]",
        f"[::{inner}]",
        f"[64:ff9b::{inner}]",
        f"[2002:{n >> 16:x}:{n & 0xFFFF:x}::1]",
        f"user@{inner}",
        f"public.example.com@{inner}",
        f"{inner}%00.example.com",
        wide,
        inner.replace(".", "。"),
    ]


OTHER = [
    # this machine and this network, by name
    *("https://localhost/", "https://LOCALHOST./", "https://a.localhost/", "https://localhost.localdomain/"),
    *("https://metadata/", "https://metadata.google.internal/", "https://instance-data.ec2.internal/"),
    *("https://kubernetes.default.svc/", "https://db.cluster.local/", "https://router.lan/", "https://nas.local/"),
    *("https://1.0.0.127.in-addr.arpa/", "https://intranet/", "https://x.test/", "https://host.docker/"),
    # IPv6
    *("https://[::1]/", "https://[::]/", "https://[0:0:0:0:0:0:0:1]/", "https://[fe80::1]/", "https://[fe80::1%25eth0]/"),
    *("https://[fe80::1%eth0]/", "https://[fc00::1]/", "https://[fd00:ec2::254]/", "https://[ff02::1]/"),
    *("https://[2001::1]/", "https://[2001:db8::1]/", "https://[3fff::1]/", "https://[64:ff9b:1::1]/", "https://[100::1]/"),
    *("https://[::ffff:0:127.0.0.1]/", "https://[2001:0:7f00:1::]/", "https://[2606:4700:4700::1111%1]/"),
    *("https://::1/", "https://[::1/", "https://::1]/", "https://[]/", "https://[1.2.3.4]/", "https://[g::1]/"),
    # numbers that are no address, or another one elsewhere
    *("https://256.1.1.1/", "https://1.1.1/", "https://1/", "https://4294967296/", "https://1.2.3.4.5/", "https://0x/"),
    *("https://example.0x7f/", "https://example.1/", "https://0/", "https://00.0.0.0/", "https://1.2.3.04/"),
    # labels that are none
    *("https://xn--abc-.com/", "https://xn--.com/", "https://xn--a.com/", "https://xn--127-.com/", "https://ab--cd.com/"),
    *("https://xn--8g7ccp.example.com/", "https://xn--orhcp.example.com/", "https://xn--ocalhost-6h39b.com/", "https://-a.example.com/", "https://a-.example.com/"),
    *("https://a_b.example.com/", "https://.example.com/", "https://example..com/", "https://example.com../"),
    *(f"https://{'a' * 64}.example.com/", f"https://{'a.' * 127}com/"),
    # the URL itself
    *("http://example.com/", "ftp://example.com/", "file:///etc/passwd", "gopher://example.com:443/", "//example.com/"),
    *("https:example.com", "https:/example.com/", "https:///example.com/", "https://", "", "example.com", "javascript:1"),
    *("https://example.com:80/", "https://example.com:22/", "https://example.com:6379/", "https://example.com:0/"),
    *("https://example.com:65536/", "https://example.com:443:443/", "https://example.com:/", "https://example.com:4x3/"),
    *("https://example.com:+443/", "https://user:secret@example.com/", "https://@example.com/", "https://example.com#a"),
    *("https://example.com\\@127.0.0.1/", "https:\\\\127.0.0.1\\", "https://127.0.0.1\\.example.com/"),
    *(" https://example.com/", "https://example.com/ ", "https://exam\tple.com/", "https://example.com/\r\nX: y"),
    *("https://example.com/\x00", "https://exam%70le.com/", "https://exämple.com/", "https://example.com/ä"),
    *("https://ⓔxample.com/", "https://exam\u00adple.com/", f"https://example.com/{'a' * 2_048}"),
]  # fmt: skip
REFUSED = [*(f"https://{host}/hook" for inner in INNER for host in spellings(inner)), *OTHER]


def test_no_spelling_of_an_inner_address_is_allowed() -> None:
    assert len(set(REFUSED)) >= 300
    assert [url for url in REFUSED if judge(url).allowed] == []
    # In a test's own rules only the loopback's two usual spellings are added.
    own = {
        "https://127.0.0.1/hook",
        "https://127.0.0.1./hook",
        "https://[::1]/",
        "https://[0:0:0:0:0:0:0:1]/",
    }
    assert {url for url in REFUSED if judge(url, loopback=True).allowed} == own


@pytest.mark.parametrize(
    ("url", "verdict"),
    [
        ("https://hooks.example.com/a?b=@c", Verdict("", "https", "hooks.example.com", 443)),
        ("HTTPS://Hooks.Example.COM:8443", Verdict("", "https", "hooks.example.com", 8443)),
        ("https://example.com./", Verdict("", "https", "example.com", 443)),
        ("https://xn--bcher-kva.example.com/", Verdict("", "https", "xn--bcher-kva.example.com", 443)),
        ("https://8.8.8.8/", Verdict("", "https", "8.8.8.8", 443, IPv4Address("8.8.8.8"))),
        (
            "https://[2606:4700:4700::1111]:8443/",
            Verdict("", "https", "2606:4700:4700::1111", 8443, IPv6Address("2606:4700:4700::1111")),
        ),
        ("https://[64:ff9b::8.8.8.8]/", Verdict("", "https", "64:ff9b::8.8.8.8", 443, IPv6Address("64:ff9b::808:808"))),
    ],
)  # fmt: skip
def test_public_addresses_and_names_are_allowed(url: str, verdict: Verdict) -> None:
    assert judge(url) == verdict


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://example.com/", "it must begin with https://"),
        ("https://u:p@example.com/", "it must not have a user or a password"),
        ("https://example.com:22/", "port 22 is not among those allowed: 443, 8443"),
        ("https://10.0.0.1/", "its address is not a public one"),
        ("https://2130706433/", "an IPv4 address must be written as four decimal numbers"),
        ("https://db/", "its host is a name inside a network, not one of the public DNS"),
        (
            "https://exämple.com/",
            "it has characters outside of printable ASCII; write a host in its xn-- form",
        ),
    ],
)
def test_a_refusal_says_why(url: str, reason: str) -> None:
    assert judge(url) == Verdict(reason)


def test_ports_can_be_chosen_and_tests_may_use_the_loopback() -> None:
    assert judge("https://example.com:9443/", ports=PORTS | {9443}).allowed
    assert judge("http://127.0.0.1:8080/hook", loopback=True) == Verdict(
        "", "http", "127.0.0.1", 8080, IPv4Address("127.0.0.1")
    )
    assert judge("http://[::1]:8080/", loopback=True).allowed
    for url in ("http://127.0.0.2:8080/", "http://localhost:8080/", "http://127.1/", "http://example.com/"):
        assert not judge(url, loopback=True).allowed


def edges(network: str) -> tuple[bool, bool, bool, bool]:
    """(before, first, last, after) of a range."""
    n = IPv4Network(network)
    first, last = int(n.network_address), int(n.broadcast_address)
    return (
        judge_ip(IPv4Address(first - 1)) if first else False,
        judge_ip(IPv4Address(first)),
        judge_ip(IPv4Address(last)),
        judge_ip(IPv4Address(last + 1)) if last < 2**32 - 1 else False,
    )


@pytest.mark.parametrize(
    "network",
    [
        *("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        "203.0.113.0/24",
    ],
)  # fmt: skip
def test_ranges_are_refused_to_their_edges(network: str) -> None:
    assert edges(network) == (True, False, False, True)


def test_the_ends_of_the_address_space_are_refused() -> None:
    assert edges("0.0.0.0/8") == (False, False, False, True)
    assert edges("224.0.0.0/3") == (True, False, False, False)
    assert [judge_ip(text) for text in ("not an address", "", "8.8.8.8 ", "8.8.8.8")] == [
        False,
        False,
        False,
        True,
    ]
    assert [
        judge_ip("127.0.0.1"),
        judge_ip("127.0.0.1", loopback=True),
        judge_ip("127.0.0.2", loopback=True),
    ] == [
        False,
        True,
        False,
    ]
    assert [judge_ip(IPv6Address(text)) for text in ("2606:4700::1", "2606:4700::1%eth0", "64:ff9b::10.0.0.1")] == [
        True,
        False,
        False,
    ]  # fmt: skip


@given(st.ip_addresses())
@example(ip_address("::ffff:8.8.8.8"))
def test_what_is_allowed_is_global_by_the_standard_library_too(address: IPv4Address | IPv6Address) -> None:
    if judge_ip(address) and not str(address).startswith("64:ff9b:"):
        assert (address.is_global, address.is_multicast) == (True, False)


@given(st.text(max_size=60), st.text(alphabet="0123456789.x:[]%@abcdef/\\#?", max_size=40))
def test_no_text_makes_it_fail(text: str, host: str) -> None:
    assert judge(text).allowed in (True, False)
    verdict = judge(f"https://{host}/")
    assert verdict.address is None or judge_ip(verdict.address)


def test_a_provider_may_be_inside_of_a_network_but_is_no_metadata_service() -> None:
    for inner in ("169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "192.0.0.192"):
        for host in spellings(inner):
            if (host[0] == "[" and "ffff" not in host) or "@" in host or not host.isascii():
                continue  # leads elsewhere, or is no base URL
            assert is_metadata_service(f"http://{host}/v1"), host
    for host in (
        "metadata.google.internal",
        "METADATA.google.internal.",
        "[fd00:ec2::254]",
        "[fe80::1%25eth0]",
    ):
        assert is_metadata_service(f"http://{host}:80/v1"), host
    for url in (
        "http://10.0.0.4:8000/v1",
        "http://vllm.svc:8000",
        "https://api.openai.example/v1",
        "not a url",
    ):
        assert not is_metadata_service(url), url
