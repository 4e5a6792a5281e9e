"""What this run could not try, and why: said once, at its end, by whichever process of pytest prints the summary."""

from __future__ import annotations

import pytest

_KEY = "untested"
_said: list[str] = []


def untested(why: str) -> None:
    """`why` is a sentence for the person who ran the tests; the same one is said once."""
    if why not in _said:
        _said.append(why)


class Untested:
    """A plugin: workers of pytest-xdist give what they could not try to the process that prints."""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, object] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_KEY] = _said

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        # A worker that crashed has no output.
        for why in getattr(node, "workeroutput", {}).get(_KEY, ()):
            untested(why)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if _said:
            terminalreporter.section("NOT TESTED", sep="!", red=True)
            for why in _said:
                terminalreporter.line(why)
