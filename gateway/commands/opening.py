"""Where commands begin: settings, and the database behind them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from gateway import settings as config
from gateway.commands.output import OperatorError
from gateway.settings import ConfigError, Problem, Settings


@contextlib.contextmanager
def config_errors_told() -> Iterator[None]:
    """A ConfigError becomes one line per problem, `file:line: key: message (hint)`."""
    try:
        yield
    except ConfigError as error:
        raise OperatorError(told(error.problems)) from error


def told(problems: list[Problem]) -> str:
    count = len(problems)
    lines = [str(p) for p in problems]
    return "\n".join([*lines, f"{count} problem{'' if count == 1 else 's'} in the configuration"])


def load_settings(path: Path | None) -> Settings:
    with config_errors_told():
        return config.load(path, config.environment())
