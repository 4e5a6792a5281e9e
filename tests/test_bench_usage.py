"""The benchmark of reports keeps what it promises, on a year of a few entries."""

from __future__ import annotations

from bench.usage import compared, report
from tests.conftest import create_database
from tests.support.servers import PostgresServer


async def test_a_month_by_team_and_day_reads_sums_alone(postgres: PostgresServer) -> None:
    await create_database(postgres, "bench_usage")
    found = await compared(postgres.url("bench_usage"), 6_000)
    by = {(m.report, m.read_from): m for m in found.measured}
    teams = by["team and day", "sums"]
    assert teams.rows_read <= found.teams_times_hours
    assert teams.rows_read < by["team and day", "entries"].rows_read
    assert teams.rows == by["team and day", "entries"].rows > 10
    assert "team_hour" in found.plan
    assert "ledger" not in found.plan
    assert "| team and day | sums |" in report(found)
