#!/usr/bin/env python3
"""Become a gateway as it would run in production, in front of the mock provider: keys, ledger and metrics on.

Writes a configuration, migrates the database, puts in a key that the load generator knows beforehand, then turns
into `tollhouse serve` (one process, so that what is measured is the gateway alone).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from gateway.core.secrets import ID_RANDOM_BYTES, SECRET_RANDOM_BYTES, hmac_of, key_text, new_key
from gateway.storage import schema
from gateway.storage.accounts import Accounts
from gateway.storage.database import open_database
from gateway.storage.transact import Fetch, Sql, Tx

#: Known to everybody, and worth nothing outside of a database made here.
KEY_ID, SECRET = new_key(b"bench"[:ID_RANDOM_BYTES], b"b" * SECRET_RANDOM_BYTES)
KEY = key_text(KEY_ID, SECRET)
PEPPER = "benchmark-" * 4

CONFIG = """\
listen: 127.0.0.1:{port}
admin_listen: 127.0.0.1:{admin_port}
state_dir: {state}
database_url: {database_url}
pepper: {pepper}
discover_providers: false
demo: off
providers:
  mock:
    base_url: http://{mock}/v1
    deployments:
      - &model
        model: mock-model
        context_tokens: 2000000
        max_output_tokens: 4096
        price: {{input_usd_per_mtok: "3", cache_read_usd_per_mtok: "0.30", output_usd_per_mtok: "15"}}
  mock-anthropic:
    wire: anthropic
    base_url: http://{mock}/v1
    deployments: [*model]
log_level: warning
"""
BUDGET = """\
budgets:
  - {{scope: "tenant:default", limit_usd: "1000000", window: month}}
"""


def write_config(
    state: Path, port: int, admin_port: int, mock: str, database_url: str, *, budget: bool
) -> Path:
    """The configuration file, inside of `state`."""
    state.mkdir(parents=True, exist_ok=True)
    file = state / "gateway.yaml"
    file.write_text(
        (CONFIG + (BUDGET if budget else "")).format(
            port=port, admin_port=admin_port, mock=mock, state=state, database_url=database_url, pepper=PEPPER
        )
    )
    return file


_KNOWN = Sql("UPDATE virtual_key SET key_id = $1, secret_hmac = $2 WHERE key_id = $3")


async def prepare(database_url: str) -> None:
    """The schema, the default team, and the key that the load knows: made as usual, then given its known secret."""
    await schema.migrate(database_url)
    database = open_database(database_url)
    try:
        accounts = Accounts(database, actor="bench")
        await accounts.ensure_defaults()
        made, _ = await accounts.create_key(pepper=PEPPER.encode(), name="bench")

        def make_known() -> Tx[None]:
            yield Fetch(_KNOWN, (KEY_ID, hmac_of(PEPPER.encode(), SECRET), made.key_id))

        await database.write(make_known)
    finally:
        await database.close()


def serve_command(config: Path) -> list[str]:
    return [sys.executable, "-c", "from gateway.cli import main; main()", "serve", "--config", str(config)]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--port", type=int, required=True)
    ap.add_argument("--mock", required=True, help="host:port of the mock provider")
    ap.add_argument("--state", type=Path, required=True)
    ap.add_argument(
        "--database", default="", help="URL of an empty database; default: SQLite in the state folder"
    )
    ap.add_argument("--budget", action="store_true", help="limit the tenant (to far more than is used)")
    args = ap.parse_args()
    state = args.state.resolve()
    database_url = args.database or f"sqlite:///{state / 'ledger.db'}"
    config = write_config(state, args.port, args.port + 1000, args.mock, database_url, budget=args.budget)
    asyncio.run(prepare(database_url))
    command = serve_command(config)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
