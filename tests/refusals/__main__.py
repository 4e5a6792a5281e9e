"""`make refusals`: real clients whose budget is used up in the middle of a run. Exit code 1 if one starts a storm.

Each client of ../shared/clients runs with a key whose budget has room for a few calls, against a gateway with the demo
provider. When the budget is used up it may send one request more than the one that was refused, and none of them may
reach the provider. What is not installed is installed by name below var/clients; what cannot be had is said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gateway.demo.bill import BillFile
from gateway.demo.provider import BILL_NAME
from tests.refusals.clients import CLIENTS, Absent, Client, Packages, command_of, environment_of
from tests.support.running import Serving, Tollhouse

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT.parent / "shared" / "clients"
EXTRA_MAX = 1


@dataclass(frozen=True, slots=True)
class Row:
    client: str
    version: str
    surface: str
    absent: str = ""
    exit: int | None = None
    served: int = 0
    refused: tuple[int, ...] = ()  # statuses, in order
    extra: int = 0
    reached_provider: int = 0
    said: str = ""

    @property
    def wrong(self) -> str:
        if self.absent:
            return ""
        if not self.refused:
            return "it was never refused"
        if self.reached_provider > self.served:
            return f"{self.reached_provider} calls reached the provider, and {self.served} fit"
        if self.extra > EXTRA_MAX:
            return f"{self.extra} extra requests"
        return ""


class Gateway:
    """A gateway process, and what it says of requests in its access log."""

    def __init__(self, tollhouse: Tollhouse, serving: Serving) -> None:
        self._tollhouse = tollhouse
        self._serving = serving

    @property
    def url(self) -> str:
        return self._serving.url

    async def key(self, calls: int) -> tuple[str, str]:
        """Id and text of a new key with room for so many calls."""
        made = await self._command("keys", "create", "client", "--json")
        document = json.loads(made)
        key_id = document["key_id"]
        await self._command(
            "budgets", "set", f"key:{key_id}", str(calls), "--unit", "calls", "--window", "lifetime"
        )
        return key_id, document["key"]

    def statuses(self, key_id: str) -> list[int]:
        """Of the key's model calls so far, in order of their ends."""
        lines = re.findall(r'^\{.*"request_id".*\}$', self._serving.said, re.M)
        asked = (json.loads(line) for line in lines)
        return [line["status"] for line in asked if line.get("key_id") == key_id and line["method"] == "POST"]

    def billed(self) -> int:
        file = BillFile(self._tollhouse.state / "demo" / BILL_NAME)
        lines = [line for line in file.after(0) if line.operation != "count_tokens"]
        file.close()
        return len(lines)

    async def _command(self, *arguments: str) -> str:
        status, out, err = await self._tollhouse.run(*arguments)
        if status:
            raise RuntimeError(f"tollhouse {' '.join(arguments)} failed: {err}")
        return out


async def try_client(
    gateway: Gateway, client: Client, packages: Packages, scripts: Path, timeout_s: int
) -> Row:
    version = client.version
    try:
        program = packages.program(client)
    except Absent as why:
        return Row(client.name, version, client.surface, absent=str(why))
    key_id, key = await gateway.key(client.fits)
    billed = gateway.billed()
    process = await asyncio.create_subprocess_exec(
        *command_of(client, program, scripts, gateway.url),
        env=environment_of(client, program, packages.modules(), key, timeout_s),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out, _ = await process.communicate()
    end_those_left_behind(key)
    await asyncio.sleep(0.5)  # the access log is written a moment later
    statuses = gateway.statuses(key_id)
    refused = tuple(status for status in statuses if status in (400, 402, 404))
    return Row(
        client.name,
        version,
        client.surface,
        exit=process.returncode,
        served=statuses.count(200),
        refused=refused,
        extra=max(0, len(refused) - client.asks),
        reached_provider=gateway.billed() - billed,
        said=_said(out.decode(errors="replace")),
    )


def end_those_left_behind(key: str) -> None:
    """Some clients leave a daemon: whoever still has this run's key in its environment was started by it."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"CLIENT_API_KEY={key}".encode() in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGTERM)
        except OSError:
            continue  # it ended by itself, or is somebody else's


def _said(output: str) -> str:
    """The line in which the client says why it ended, as far as it does."""
    told = [line.strip() for line in output.splitlines() if "used up" in line]
    return (told[-1] if told else (output.strip().splitlines() or [""])[-1].strip())[:160]


async def run(options: argparse.Namespace) -> list[Row]:
    packages = Packages(options.packages, not options.no_install)
    wanted = [c for c in CLIENTS if not options.only or options.only.lower() in c.name.lower()]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="tollhouse-refusals-") as directory:
        tollhouse = Tollhouse(Path(directory), listen="127.0.0.1:0")
        async with tollhouse.serve("--first-run") as serving:
            gateway = Gateway(tollhouse, serving)
            for client in wanted:
                rows.append(await try_client(gateway, client, packages, options.scripts, options.timeout))
                if not options.json:
                    print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Row) -> str:
    if row.absent:
        return f"| {row.client} | {row.version} | {row.surface} | absent: {row.absent} | | | | |"
    counted = ", ".join(f"{n} x {status}" for status, n in Counter(row.refused).items()) or "none"
    return (
        f"| {row.client} | {row.version} | {row.surface} | {row.served} | {counted} | {row.extra} | "
        f"{row.reached_provider - row.served} | {row.exit} |" + f" !! {row.wrong}" * bool(row.wrong)
    )


def _summary(rows: Sequence[Row]) -> str:
    tried = [row for row in rows if not row.absent]
    wrong = sum(1 for row in tried if row.wrong)
    absent = len(rows) - len(tried)
    return f"{len(tried)} clients, {absent} absent: {wrong} with more than {EXTRA_MAX} extra request"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.refusals", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--scripts", type=Path, default=SCRIPTS, help="default: ../shared/clients")
    parser.add_argument("--packages", type=Path, default=ROOT / "var" / "clients", help="where clients are")
    parser.add_argument("--no-install", action="store_true", help="only what is there already")
    parser.add_argument("--only", default="", help="clients whose name contains this")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for each client")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.scripts.is_dir():
        print(f"refusals: there is no {options.scripts}, so there is no client to run", file=sys.stderr)
        return 2
    if not options.json:
        print("| client | version | surface | served | refused | extra | refused, yet sent on | exit |")
        print("|---|---|---|---|---|---|---|---|")
    rows = asyncio.run(run(options))
    if options.json:
        print(json.dumps([{**asdict(row), "wrong": row.wrong} for row in rows], indent=1))
    else:
        print(_summary(rows))
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
