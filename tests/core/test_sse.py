"""Events come out whole and the same, however the bytes were cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import UpstreamMalformed
from gateway.core.sse import MAX_EVENT_BYTES, SseSplitter, event_data

STREAMS = {
    "lf": [b"data: a\n\n", b": comment\n\n", b"event: x\ndata: b\ndata:c\n\n"],
    "crlf": [b"data: a\r\n\r\n", b"event: x\r\ndata: b\r\n\r\n"],
    "cr": [b"data: a\r\r", b"data: b\r\r"],
    "mixed": [b"data: a\n\r\n", b"data: b\r\n\n", b"data: c\r\r\n", b"data: d\n\n"],
    "bom": [b"\xef\xbb\xbfdata: a\n\n", b"data: \xc3\xa9\n\n"],
    "blank lines": [b"\n\n", b"\ndata: a\n\n", b"\n\n"],
    "no space, no data": [b"data:a\n\n", b"data\n\n", b"id: 7\nretry: 3\n\n"],
}


def split(stream: bytes, cuts: tuple[int, ...]) -> list[bytes]:
    splitter, events = SseSplitter(), []
    for start, end in itertools.pairwise((0, *cuts, len(stream))):
        events += splitter.feed(stream[start:end])
    last = splitter.end()
    assert splitter.rest() == b""
    return events + ([last] if last else [])


@pytest.mark.parametrize("name", STREAMS)
def test_every_cut_gives_the_same_events(name: str) -> None:
    events = STREAMS[name]
    stream = b"".join(events)
    assert split(stream, ()) == events
    for cuts in itertools.combinations(range(len(stream) + 1), 2):
        assert split(stream, cuts) == events
    assert split(stream, tuple(range(len(stream)))) == events


@given(
    st.lists(st.sampled_from([b"data: x", b"data:", b"\n", b"\r", b"\r\n", b"y", b": c"]), max_size=25),
    st.data(),
)
def test_no_cut_matters(pieces: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(pieces)
    cuts = tuple(sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6))))

    def out(cuts: tuple[int, ...]) -> tuple[list[bytes], bytes]:
        splitter, events = SseSplitter(), []
        for start, end in itertools.pairwise((0, *cuts, len(stream))):
            events += splitter.feed(stream[start:end])
        last = splitter.end()
        return [*events, last], splitter.rest()

    whole, rest = out(())
    assert out(cuts) == (whole, rest)
    assert b"".join(whole) + rest == stream


def test_an_event_goes_out_as_soon_as_it_is_whole() -> None:
    splitter = SseSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\ndata: b\r\n\r") == [b"data: a\n\n"]
    assert splitter.feed(b"\n") == [b"data: b\r\n\r\n"]
    data = b"data: c\n\n"
    assert splitter.feed(data)[0] is data  # the usual case copies nothing
    assert (splitter.feed(b"data: cut"), splitter.end(), splitter.rest()) == ([], b"", b"data: cut")


@pytest.mark.parametrize(
    ("event", "name", "data"),
    [
        (b"data: a\n\n", "", b"a"),
        (b"data:a\n\n", "", b"a"),
        (b"data:  a \n\n", "", b" a "),
        (b"data: a\ndata: b\ndata:\n\n", "", b"a\nb\n"),
        (b"event: x\r\ndata: a\r\n\r\n", "x", b"a"),
        (b"data: a\revent:y\r\r", "y", b"a"),
        (b"\xef\xbb\xbfdata: a\n\n", "", b"a"),
        (b": comment\n\n", "", b""),
        (b"data\n\n", "", b""),
        (b"id: 1\nretry: 2\ndata: a: b\n\n", "", b"a: b"),
    ],
)
def test_name_and_data(event: bytes, name: str, data: bytes) -> None:
    assert event_data(event) == (name, data)


def test_an_event_is_bounded_however_it_comes() -> None:
    largest = b"data: " + b"x" * (MAX_EVENT_BYTES - 8) + b"\n\n"
    assert SseSplitter().feed(largest) == [largest]
    for stream in (b"data: x" + largest[6:], b"data: " + b"x" * MAX_EVENT_BYTES, largest[:-2] + b"x\r\n\r\n"):
        for size in (1 << 16, len(stream)):
            cuts = tuple(range(size, len(stream), size))
            with pytest.raises(UpstreamMalformed, match="1 MiB"):
                split(stream, cuts)
