"""A replica that is a real vLLM on this machine's CPU, with a tiny model that was made here."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

MODEL = "small"
BLOCK_TOKENS = 32
START_S = 600.0
_END_S = 60.0

#: Nothing is looked up anywhere; one thread each, for there are few cores; the same block hashes in every replica.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
_FLAGS = {
    "served-model-name": MODEL,
    "host": "127.0.0.1",
    "dtype": "float32",
    "max-model-len": "32768",
    "max-num-batched-tokens": "2048",
    "max-num-seqs": "8",
    "block-size": str(BLOCK_TOKENS),
    "num-gpu-blocks-override": "4096",
    "scheduling-policy": "priority",
    "tool-call-parser": "hermes",
    "structured-outputs-config": json.dumps({"backend": "xgrammar", "disable_any_whitespace": True}),
}
_SWITCHES = (
    "enforce-eager",
    "enable-prefix-caching",
    "enable-prompt-tokens-details",
    "enable-request-id-headers",
    "enable-auto-tool-choice",
)


class NotStarted(Exception):
    """The server ended, or did not answer in time; the message holds the end of its log."""


@dataclass(slots=True)
class RealVllm:
    """`more`: further flags. It begins without a cache each time it is started, at the same address."""

    python: Path
    model: Path
    port: int
    log: Path
    more: Sequence[str] = ()
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def start(self) -> None:
        """`ready` tells when it serves. Not `vllm serve`: in the package for CPUs that command does not find itself."""
        flags = [part for name, value in _FLAGS.items() for part in (f"--{name}", value)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *("nice", "-n", "15", self.python, "-W", "ignore", "-m"),
                    *("vllm.entrypoints.openai.api_server", "--model", self.model, "--port", str(self.port)),
                    *(*flags, *(f"--{name}" for name in _SWITCHES), *self.more),
                ],
                env={**os.environ, **_ENVIRONMENT},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def ready(self) -> float:
        """Seconds that it took from now on. Raises `NotStarted`."""
        began_s = time.monotonic()
        async with aiohttp.ClientSession() as http:
            while time.monotonic() < began_s + START_S:
                if self.process is None or self.process.poll() is not None:
                    break
                try:
                    async with http.get(self.url + "/health") as answer:
                        if answer.status == 200:
                            return time.monotonic() - began_s
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.5)
        raise NotStarted(self.log.read_text(errors="replace")[-2_000:])

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Of the API server alone, as when it runs out of memory; its engine is a process of its own, and is left."""
        assert self.process is not None
        self.process.kill()

    async def ended(self) -> None:
        """Returns when no process of it is left; one that does not end is killed."""
        if self.process is None:
            return
        try:
            async with asyncio.timeout(_END_S):
                while self.process.poll() is None:
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process = None
