"""Whose turn it is: teams in turn, interactive before batch, batch not for ever, and who gives way in a full queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.serving import QueuePolicy, Urgency
from gateway.core.waiting import Line, Ticket, TurnedAway

NOW, BATCH = Urgency.INTERACTIVE, Urgency.BATCH


def line_of(*tickets: Ticket, most: int = 100) -> Line:
    line = Line()
    for ticket in tickets:
        assert line.join(ticket, most) is None
    return line


def order(line: Line, now_s: float, after_s: float = 5.0) -> list[str]:
    found = []
    while (ticket := line.next(now_s, after_s)) is not None:
        found.append(f"{ticket.team}{ticket.since_s:g}")
    assert len(line) == 0
    return found


def test_teams_take_turns_and_each_team_s_calls_keep_their_order() -> None:
    tickets = [
        Ticket(team, NOW, at) for team, at in (("a", 0), ("a", 1), ("a", 2), ("b", 3), ("c", 4), ("b", 5))
    ]
    assert order(line_of(*tickets), 6.0) == ["a0", "b3", "c4", "a1", "b5", "a2"]


def test_batch_is_held_back_while_anybody_interactive_waits() -> None:
    line = line_of(Ticket("a", BATCH, 0), Ticket("b", NOW, 1), Ticket("a", NOW, 2))
    assert (line.waiting(NOW), line.waiting(BATCH)) == (2, 1)
    assert order(line, 3.0) == ["b1", "a2", "a0"]


def test_what_has_waited_long_enough_gets_every_other_place() -> None:
    batch = [Ticket("night", BATCH, at) for at in (0, 1, 2)]
    people = [Ticket("day", NOW, at) for at in (3, 4, 5)]
    assert order(line_of(*batch, *people), 6.0, after_s=5.0) == [
        "night0",
        "day3",
        "night1",
        "day4",
        "day5",
        "night2",
    ]
    assert order(line_of(*batch, *people), 60.0) == ["night0", "day3", "night1", "day4", "night2", "day5"]


def test_of_the_batch_calls_that_waited_too_long_the_oldest_is_first_whatever_its_team() -> None:
    line = line_of(Ticket("a", BATCH, 3), Ticket("b", BATCH, 1), Ticket("a", BATCH, 2.5))
    first = line.next(20.0, 5.0)
    assert first is not None
    assert first.team == "b"


# --- a full queue -----------------------------------------------------------------------------------------


def test_whoever_crowds_a_full_queue_is_turned_away_himself() -> None:
    line = line_of(Ticket("a", NOW, 0), Ticket("a", NOW, 1))
    more = Ticket("a", NOW, 2)
    assert line.join(more, 2) == TurnedAway(more, crowding=True)
    assert order(line, 3.0) == ["a0", "a1"]


def test_a_team_that_waits_less_displaces_the_newest_call_of_the_one_that_waits_most() -> None:
    loud = [Ticket("loud", NOW, at) for at in (0, 1, 2)]
    line = line_of(*loud)
    assert line.join(Ticket("quiet", NOW, 3), 3) == TurnedAway(loud[2], crowding=True)
    # two and one: a second call of the quiet team would make it no better
    again = Ticket("quiet", NOW, 4)
    assert line.join(again, 3) == TurnedAway(again, crowding=True)
    assert line.join(Ticket("third", NOW, 5), 3) == TurnedAway(loud[1], crowding=True)
    assert order(line, 6.0) == ["loud0", "quiet3", "third5"]


def test_nobody_s_fault_is_nobody_s_fault() -> None:
    line = line_of(Ticket("a", NOW, 0), Ticket("b", NOW, 1))
    third = Ticket("c", NOW, 2)
    assert line.join(third, 2) == TurnedAway(third, crowding=False)


def test_batch_gives_way_to_interactive_and_never_the_other_way_round() -> None:
    old, new = Ticket("night", BATCH, 0), Ticket("night", BATCH, 1)
    line = line_of(old, new, Ticket("other", BATCH, 2))
    assert line.join(Ticket("day", NOW, 3), 3) == TurnedAway(new, crowding=False)
    assert line.join(Ticket("day", NOW, 4), 3) is not None
    late = Ticket("fourth", BATCH, 5)
    assert line.join(late, 3) == TurnedAway(late, crowding=False)
    assert (line.waiting(NOW), line.waiting(BATCH)) == (2, 1)


def test_who_leaves_is_not_called() -> None:
    gone = Ticket("a", NOW, 0)
    line = line_of(gone, Ticket("a", NOW, 1))
    line.discard(gone)
    line.discard(gone)
    line.discard(Ticket("b", BATCH, 0))
    assert order(line, 2.0) == ["a1"]


_CALLS = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from([*Urgency]), st.booleans()), min_size=1, max_size=60
)


@given(_CALLS, st.integers(1, 8))
def test_nobody_is_lost_or_called_twice_and_a_queue_is_never_longer_than_it_may_be(
    calls: list[tuple[str, Urgency, bool]], most: int
) -> None:
    line, inside, ended = Line(), set[Ticket](), list[Ticket]()
    for at, (team, urgency, leaves) in enumerate(calls):
        ticket = Ticket(team, urgency, float(at))
        away = line.join(ticket, most)
        if away is None or away.ticket is not ticket:
            inside.add(ticket)
        if away is not None:
            inside.discard(away.ticket)
            ended.append(away.ticket)
            assert not (ticket.urgency is BATCH and away.ticket.urgency is NOW)
        if leaves and (called := line.next(float(at), 5.0)) is not None:
            inside.remove(called)
            ended.append(called)
        assert len(line) == len(inside) <= most
        assert line.waiting(NOW) + line.waiting(BATCH) == len(line)
    while (called := line.next(1e6, 5.0)) is not None:
        inside.remove(called)
        ended.append(called)
    assert not inside
    assert len({id(ticket) for ticket in ended}) == len(calls)


def test_a_policy_says_how_long_each_kind_waits() -> None:
    assert [QueuePolicy().longest_wait_s(u) for u in Urgency] == [10.0, 10.0]
    assert [QueuePolicy(3.0, 60.0).longest_wait_s(u) for u in Urgency] == [3.0, 60.0]
