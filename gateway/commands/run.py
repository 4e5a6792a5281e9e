"""serve and demo: read the settings, then hand over to the application."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from gateway import settings as config
from gateway.commands.opening import config_errors_told, load_settings
from gateway.commands.output import OperatorError
from gateway.core.errors import GatewayError
from gateway.settings import Listen, Settings


def serve(
    path: Path | None,
    *,
    host: str | None,
    port: int | None,
    admin_port: int | None,
    workers: int | None,
    first_run: bool,
) -> int:
    settings = load_settings(path)
    settings = replace(
        settings,
        listen=_moved(settings.listen, host, port),
        admin_listen=_moved(settings.admin_listen, None, admin_port),
        workers=workers or settings.workers,
    )
    if settings.workers > 1 and settings.database_url.startswith("sqlite"):
        raise OperatorError("only one process can serve from a SQLite file", "set database_url to a Postgres")
    from gateway import start

    with _told(settings):
        return start.main(settings, config_path=path, first_run=first_run)


def demo(*, steps: int, json_out: bool) -> int:
    settings = demo_settings(config.environment())
    from gateway import start

    with _told(settings):
        return start.demo(settings, steps=steps, json_out=json_out)


@contextlib.contextmanager
def _told(settings: Settings) -> Iterator[None]:
    """What keeps a gateway from starting, as one line for the operator."""
    from gateway.start import CannotStart
    from gateway.storage.schema import SchemaMismatch

    with config_errors_told():
        try:
            yield
        except (CannotStart, SchemaMismatch) as error:
            raise OperatorError(str(error)) from error
        except GatewayError as error:
            hint = "`tollhouse doctor` tries everything"
            raise OperatorError(f"{settings.database_shown}: {error.message}", hint) from error


def demo_settings(env: Mapping[str, str]) -> Settings:
    """The embedded default, blind to configuration and keys around it: a demo spends nobody's money."""
    seen = {name: value for name, value in env.items() if name == "TOLLHOUSE_STATE_DIR"}
    return config.load(config.shipped("config/gateway.yaml"), seen)


def _moved(listen: Listen, host: str | None, port: int | None) -> Listen:
    return Listen(host or listen.host, listen.port if port is None else port)
