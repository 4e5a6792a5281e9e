"""What a scrape reads, and that no caller can make it grow."""

from __future__ import annotations

import re

import msgspec
import pytest

from gateway.core.entry import Kind
from gateway.core.explanation import Cause, Explanation, Verdict
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.page import family_text
from gateway.telemetry.series import Counter, Gauge, Histogram
from tests.telemetry.facts import CATALOG, attempt, outcome


def lines(metrics: Metrics, prefix: str) -> list[str]:
    return [line for line in metrics.render().decode().splitlines() if line.startswith(prefix)]


def test_what_was_not_read_from_a_cache_is_counted_by_cause() -> None:
    metrics = Metrics(CATALOG)
    miss = Explanation(Verdict.MISS, Cause.TOOLS_REORDERED, lost_tokens=1_000, lost_nano_usd=2_700_000)
    for said in (miss, miss, None):
        metrics.attempt(attempt(), msgspec.structs.replace(outcome(), miss=said))
    labels = '{cause="tools_reordered",model="large",provider="acme",team="core"}'
    assert lines(metrics, "tollhouse_cache_misses_total") == [f"tollhouse_cache_misses_total{labels} 2"]
    assert lines(metrics, "tollhouse_cache_lost_usd_total") == [
        f"tollhouse_cache_lost_usd_total{labels} 0.0054"
    ]


def test_one_request_shows_in_every_family() -> None:
    metrics = Metrics(CATALOG)
    metrics.request(
        operation="chat",
        client="claude-code",
        status=200,
        duration_s=1.25,
        first_token_s=0.4,
        overhead_s=0.0015,
    )
    metrics.attempt(attempt(), outcome())
    metrics.refusal("budget_exceeded")

    assert lines(metrics, "tollhouse_requests_total") == [
        'tollhouse_requests_total{operation="chat",client="claude-code",status_class="2xx"} 1'
    ]
    assert lines(metrics, "tollhouse_attempts_total") == [
        'tollhouse_attempts_total{provider="acme",deployment="large-eu",outcome="ok"} 1'
    ]
    assert lines(metrics, "tollhouse_ledger_entries_total") == [
        'tollhouse_ledger_entries_total{kind="post",quality="exact"} 1'
    ]
    assert lines(metrics, "tollhouse_tokens_total") == [
        'tollhouse_tokens_total{class="cache_read",model="large",provider="acme",team="core"} 900',
        'tollhouse_tokens_total{class="cache_write_5m",model="large",provider="acme",team="core"} 50',
        'tollhouse_tokens_total{class="input_uncached",model="large",provider="acme",team="core"} 100',
        'tollhouse_tokens_total{class="output",model="large",provider="acme",team="core"} 20',
    ]
    assert lines(metrics, "tollhouse_cost_usd_total") == [
        'tollhouse_cost_usd_total{model="large",provider="acme",team="core"} 0.03765'
    ]
    assert lines(metrics, "tollhouse_list_cost_usd_total") == [
        'tollhouse_list_cost_usd_total{model="large",provider="acme",team="core"} 0.0753'
    ]
    assert lines(metrics, "tollhouse_client_cost_usd_total") == [
        'tollhouse_client_cost_usd_total{client="claude-code"} 0.03765'
    ]
    assert lines(metrics, "tollhouse_refusals_total") == [
        'tollhouse_refusals_total{kind="budget_exceeded"} 1'
    ]
    assert lines(metrics, "tollhouse_overhead_seconds")[:5] == [
        'tollhouse_overhead_seconds_bucket{operation="chat",le="0.0002"} 0',
        'tollhouse_overhead_seconds_bucket{operation="chat",le="0.0005"} 0',
        'tollhouse_overhead_seconds_bucket{operation="chat",le="0.001"} 0',
        'tollhouse_overhead_seconds_bucket{operation="chat",le="0.002"} 1',
        'tollhouse_overhead_seconds_bucket{operation="chat",le="0.003"} 1',
    ]
    assert lines(metrics, "tollhouse_first_token_seconds_sum") == [
        'tollhouse_first_token_seconds_sum{operation="chat"} 0.4'
    ]


def test_a_stream_shows_its_first_event_and_its_pace() -> None:
    metrics = Metrics(CATALOG)
    metrics.attempt(attempt(), outcome())
    metrics.streamed(attempt(), 41, 2.0)
    labels = '{provider="acme",deployment="large-eu"}'
    assert lines(metrics, "tollhouse_attempt_first_token_seconds_sum") == [
        f"tollhouse_attempt_first_token_seconds_sum{labels} 0.4"
    ]
    assert lines(metrics, "tollhouse_inter_chunk_seconds_sum") == [
        f"tollhouse_inter_chunk_seconds_sum{labels} 0.05"
    ]


def test_what_budgets_refuse_is_counted_by_whose_it_is() -> None:
    metrics = Metrics(CATALOG)
    metrics.hold_refused("team", "usd", 1_500_000_000)
    metrics.hold_refused("team", "output_tokens", None)
    assert lines(metrics, "tollhouse_holds_refused_total") == [
        'tollhouse_holds_refused_total{scope="team",unit="output_tokens"} 1',
        'tollhouse_holds_refused_total{scope="team",unit="usd"} 1',
    ]
    assert lines(metrics, "tollhouse_refused_usd_total") == ['tollhouse_refused_usd_total{scope="team"} 1.5']


def test_cost_is_exact_where_a_float_is_not() -> None:
    metrics = Metrics(CATALOG)
    for _ in range(10):
        metrics.attempt(attempt(), outcome(100_000_001))
    metrics.attempt(attempt(), outcome(9_007_199_254_740_993))

    assert lines(metrics, "tollhouse_cost_usd_total") == [
        'tollhouse_cost_usd_total{model="large",provider="acme",team="core"} 9007200.254741003'
    ]


def test_an_attempt_is_named_by_how_it_ended() -> None:
    metrics = Metrics(CATALOG)
    metrics.attempt(attempt(), outcome(0, kind=Kind.VOID, error="upstream_unreachable"))
    metrics.attempt(attempt(), outcome(finish="client_gone"))
    metrics.attempt(attempt(), outcome(finish="length"))

    assert [re.findall(r'outcome="(.*?)"', x) for x in lines(metrics, "tollhouse_attempts_total")] == [
        ["client_gone"],
        ["ok"],
        ["upstream_unreachable"],
    ]


def test_names_outside_of_the_catalog_are_other() -> None:
    metrics = Metrics(CATALOG)
    metrics.attempt(attempt(model="sk-oops-a-key-as-model", provider="gone"), outcome())

    assert lines(metrics, "tollhouse_cost_usd_total") == [
        'tollhouse_cost_usd_total{model="other",provider="other",team="core"} 0.03765'
    ]


def test_ten_thousand_tasks_make_no_more_series_than_one() -> None:
    metrics = Metrics(CATALOG)

    def step(n: int) -> None:
        metrics.request(
            operation="chat", client="codex", status=200, duration_s=1.0, first_token_s=0.1, overhead_s=0.1
        )
        metrics.attempt(attempt(n), outcome())
        metrics.streamed(attempt(n), 41, 2.0)
        metrics.hold_refused("task", "usd", 5_000_000)
        metrics.refusal("budget_exceeded")
        metrics.breaker("loop", "stop")

    step(0)
    one_task = [line.rpartition(" ")[0] for line in metrics.render().decode().splitlines()]
    for n in range(1, 10_000):
        step(n)
    page = metrics.render().decode()

    assert [line.rpartition(" ")[0] for line in page.splitlines()] == one_task
    assert not re.search(r"(att|req|task)_[0-9a-f]|key0", page)
    assert lines(metrics, "tollhouse_requests_total")[0].endswith(" 10000")


def test_a_caller_that_makes_up_clients_and_teams_ends_in_other() -> None:
    metrics = Metrics(CATALOG, max_series=10)
    for n in range(10_000):
        metrics.request(operation="chat", client=f"client-{n}", status=200, duration_s=1.0)
        metrics.attempt(attempt(team=f"team-{n}"), outcome(1))

    requests = lines(metrics, "tollhouse_requests_total")
    assert len(requests) == 11
    assert 'tollhouse_requests_total{operation="chat",client="other",status_class="2xx"} 9990' in requests
    tokens = lines(metrics, "tollhouse_tokens_total")
    assert len(tokens) <= 21
    assert (
        'tollhouse_tokens_total{class="output",model="large",provider="acme",team="other"} 199960' in tokens
    )
    costs = lines(metrics, "tollhouse_cost_usd_total")
    assert sum(round(float(x.rpartition(" ")[2]) * 1e9) for x in costs) == 10_000, (
        "nothing is lost in the collapse"
    )


def test_when_closed_labels_run_over_too_everything_collapses() -> None:
    counter = Counter("t_total", "T.", ("a",), max_series=3)
    for n in range(100):
        counter.add((str(n),))
    assert family_text(counter.read()).splitlines()[2:] == [
        't_total{a="0"} 1',
        't_total{a="1"} 1',
        't_total{a="2"} 1',
        't_total{a="3"} 1',
        't_total{a="4"} 1',
        't_total{a="5"} 1',
        't_total{a="other"} 94',
    ]


def test_text_is_escaped_as_the_format_asks() -> None:
    counter = Counter("t_total", "A \\ and\na line.", ("a",))
    counter.add(('say "\\hi"\n',))
    assert family_text(counter.read()) == (
        "# HELP t_total A \\\\ and\\na line.\n# TYPE t_total counter\n"
        + 't_total{a="say \\"\\\\hi\\"\\n"} 1\n'
    )


def test_a_bound_belongs_to_its_bucket_and_infinity_counts_all() -> None:
    histogram = Histogram("t_seconds", "T.", (), (0.1, 1.0))
    for value in (0.1, 0.5, 1.0, 7.0):
        histogram.observe((), value)
    assert family_text(histogram.read()).splitlines() == [
        "# HELP t_seconds T.",
        "# TYPE t_seconds histogram",
        't_seconds_bucket{le="0.1"} 1',
        't_seconds_bucket{le="1.0"} 3',
        't_seconds_bucket{le="+Inf"} 4',
        "t_seconds_sum 8.6",
        "t_seconds_count 4",
    ]


def test_gauges_are_read_at_the_scrape() -> None:
    metrics = Metrics(CATALOG, version="0.1.0")
    in_flight = [0]
    metrics.gauge("tollhouse_inflight_requests", "Requests being served.", lambda: in_flight[0])
    metrics.gauge("tollhouse_breaker_open", "1 = ejected.", lambda: {("large-eu",): 1.0}, ("deployment",))
    in_flight[0] = 7

    assert lines(metrics, "tollhouse_inflight") == ["tollhouse_inflight_requests 7"]
    assert lines(metrics, "tollhouse_breaker") == ['tollhouse_breaker_open{deployment="large-eu"} 1.0']
    assert lines(metrics, "tollhouse_build_info") == ['tollhouse_build_info{version="0.1.0"} 1.0']


def test_the_page_describes_this_process() -> None:
    samples = dict(line.split() for line in lines(Metrics(CATALOG), "process_"))
    assert sorted(samples) == [
        "process_cpu_seconds_total",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_start_time_seconds",
        "process_virtual_memory_bytes",
    ]
    assert float(samples["process_resident_memory_bytes"]) > 1e6
    assert float(samples["process_start_time_seconds"]) > 1.7e9


def test_mistakes_in_a_definition_are_told() -> None:
    metrics = Metrics(CATALOG)
    with pytest.raises(ValueError, match="exists already"):
        metrics.gauge("tollhouse_requests_total", "Again.", lambda: 1.0, only_grows=True)
    with pytest.raises(ValueError, match="end in _total"):
        metrics.gauge("tollhouse_things_total", "No counter.", lambda: 1.0)
    with pytest.raises(ValueError, match="has no label"):
        Counter("t_total", "T.", ("a",), open_labels=("b",))
    with pytest.raises(ValueError, match="needs values for"):
        Counter("t_total", "T.", ("a",)).add(("x", "y"))
    with pytest.raises(ValueError, match="must rise"):
        Histogram("t_seconds", "T.", (), (2.0, 1.0))


def test_a_gauge_over_the_limit_is_cut() -> None:
    gauge = Gauge("t", "T.", lambda: {(str(n),): 1.0 for n in range(5_000)}, ("a",))
    assert len(family_text(gauge.read()).splitlines()) == 2 + 2_000
