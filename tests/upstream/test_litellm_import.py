"""litellm costs seconds, memory and trust: only who builds a LitellmUpstream pays, and nothing else imports it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(code: str) -> str:
    # -W error: a warning at import would be litellm's to explain
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_adapter_does_not_import_litellm() -> None:
    run("import gateway.upstream.litellm, sys; assert 'litellm' not in sys.modules")


def test_building_it_imports_litellm_without_network_proxy_or_noise() -> None:
    code = """
import os, socket, sys
def refuse(*args): raise AssertionError(f"the network was touched: {args}")
sys.addaudithook(lambda event, args: refuse(event, args) if event in ("socket.connect", "socket.getaddrinfo") else None)
from gateway.upstream.litellm import LitellmUpstream
LitellmUpstream({})
import litellm, logging
assert os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
assert not [name for name in sys.modules if name.startswith("litellm.proxy.proxy_server")]
assert (litellm.callbacks, litellm.success_callback, litellm.failure_callback) == ([], [], [])
assert (litellm.num_retries, litellm.drop_params, litellm.modify_params) == (0, False, False)
assert logging.getLogger("LiteLLM").disabled
"""
    assert run(code) == ""


def test_no_other_module_imports_litellm() -> None:
    names = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "gateway").rglob("*.py"))
        if re.search(r"^\s*(import|from) litellm\b", path.read_text(), re.MULTILINE)
    ]
    assert names == ["gateway/upstream/litellm.py"]
