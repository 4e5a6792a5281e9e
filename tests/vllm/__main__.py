"""`make test-vllm VLLM=http://127.0.0.1:18001/v1`: exit code 1 if a step reads less from the cache through the gateway."""

from __future__ import annotations

import argparse
import asyncio
import sys

import aiohttp

from tests.vllm.parity import parity


async def _model(base_url: str) -> str:
    async with aiohttp.ClientSession() as http, http.get(f"{base_url}/models") as answer:
        return str((await answer.json())["data"][0]["id"])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm", description=__doc__)
    parser.add_argument("--url", required=True, help="base URL of a running vLLM, with /v1")
    parser.add_argument("--model", default="", help="the first one that it serves, if not given")
    asked = parser.parse_args()
    base_url = asked.url.rstrip("/")
    try:
        model = asked.model or asyncio.run(_model(base_url))
    except (aiohttp.ClientError, OSError):
        print(
            f"nothing answers at {base_url}; ../shared/upstream/README.md says how to start one",
            file=sys.stderr,
        )
        return 2
    steps = asyncio.run(parity(base_url, model, "vllm"))
    print(f"{'conversation':16}{'level':10}{'step':>5}{'prompt':>8}{'direct':>8}{'gateway':>8}")
    for s in steps:
        note = "  LOST" if s.lost else ""
        print(f"{s.conversation:16}{s.level:10}{s.step:5}{s.prompt:8}{s.direct:8}{s.through:8}{note}")
    lost = sum(s.lost for s in steps)
    print(f"{len(steps)} steps, {lost} of them read less through the gateway")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
