"""Signs that a client runs in circles."""

from __future__ import annotations

from gateway.core.breakers import RING_SIZE, BodyRepeat, Retries, observe, observe_retry


def test_the_same_body_counts_up_and_others_do_not() -> None:
    state, counts = BodyRepeat(), []
    for at, body in enumerate((b"a", b"b", b"a", b"a", b"b")):
        state, repeats = observe(state, body, float(at))
        counts.append(repeats)
    assert counts == [1, 1, 2, 3, 2]


def test_a_repeat_is_forgotten_after_ten_minutes() -> None:
    state, _ = observe(BodyRepeat(), b"a", 0.0)
    assert observe(state, b"a", 599.9)[1] == 2
    assert observe(state, b"a", 600.0)[1] == 1


def test_the_ring_stays_small() -> None:
    state = BodyRepeat()
    for n in range(200):
        state, _ = observe(state, n.to_bytes(2, "big"), 0.0)
    assert [h for h, _ in state.seen] == [n.to_bytes(2, "big") for n in range(200 - RING_SIZE, 200)]


def after(retries: int, requests: int) -> Retries:
    state = Retries()
    for n in range(requests):
        state = observe_retry(state, n < retries)
    return state


def test_a_key_amplifies_when_over_a_fifth_of_its_last_fifty_requests_are_retries() -> None:
    assert not after(retries=10, requests=50).amplified
    assert after(retries=11, requests=50).amplified
    assert not after(retries=49, requests=49).amplified  # too few to tell
    assert not after(retries=11, requests=51).amplified  # the oldest has left the window
