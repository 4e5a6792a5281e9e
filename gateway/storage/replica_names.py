"""The name under which a gateway's processes are known to the ledger, the same after a restart: it is how they find
their own journal. Two that run at once must never have the same, for one would fence the other.
"""

from __future__ import annotations

import fcntl
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def taken(state_dir: Path, port: int) -> Iterator[str]:
    """A name for as long as this lasts. Processes of one gateway add their index.

    A gateway on a fixed port is that port's: nobody else on the machine can have it. One on any free port (0) takes
    the first name in `state_dir/replicas` that nobody holds, and makes one if all are held; the kernel lets go of it
    when the process dies, however it dies.
    """
    if port:
        yield f"{socket.gethostname()}-{port}"
        return
    directory = state_dir / "replicas"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _first_free(directory) as file:
        file.seek(0)
        name = file.read().strip()
        if not name:
            name = f"{socket.gethostname()}-any{secrets.token_hex(4)}"
            file.write(name)
            file.flush()
        yield name


def _first_free(directory: Path) -> IO[str]:
    number = 0
    while True:
        file = (directory / str(number)).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            file.close()
            number += 1
