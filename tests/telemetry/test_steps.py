"""Steps on a clock that the test turns."""

from gateway.telemetry.steps import Span, Steps


class HandClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_spans_cover_the_request_in_order() -> None:
    clock = HandClock()
    steps = Steps(clock)
    clock.now_s = 100.25
    steps.mark("read")
    clock.now_s = 100.75
    steps.mark("call")
    clock.now_s = 101.75
    steps.mark("call")

    assert steps.spans() == (
        Span("read", 100.0, 0.25),
        Span("call", 100.25, 0.5),
        Span("call", 100.75, 1.0),
    )
    assert steps.elapsed_s() == 1.75


def test_waits_are_not_the_gateways_time() -> None:
    clock = HandClock()
    steps = Steps(clock)
    clock.now_s = 100.5
    steps.pause()
    clock.now_s = 103.5
    steps.resume()
    clock.now_s = 104.0

    assert steps.gateway_ms() == "1000.000"
    steps.pause()
    clock.now_s = 109.0
    assert steps.gateway_ms() == "1000.000", "a wait that still runs does not count either"


def test_unpaired_pauses_do_no_harm() -> None:
    clock = HandClock()
    steps = Steps(clock)
    steps.resume()
    steps.pause()
    clock.now_s = 101.0
    steps.pause()
    clock.now_s = 102.0
    steps.resume()
    steps.resume()

    assert steps.gateway_s() == 0.0
    assert steps.elapsed_s() == 2.0


def test_marks_that_nobody_will_ask_for_are_not_kept() -> None:
    steps = Steps(HandClock(), keep=False)
    steps.mark("read")
    assert steps.spans() == ()
