"""`tollhouse config ...`: declarations, as those in gateway/cli.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

configuration = typer.Typer(
    help="What was written over the admin API, beside the configuration files.", no_args_is_help=True
)


@configuration.callback()
def _group() -> None:
    """More than one command may come."""


@configuration.command()
def export(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="As of every command.")] = None,
) -> int:
    """Print what was written over the admin API as YAML, to be moved into a configuration file."""
    from gateway.commands import overlay

    return overlay.export(config)
