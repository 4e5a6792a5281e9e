"""import litellm: their configuration as ours, and what could not be carried."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from gateway import settings as config
from gateway.commands.output import OperatorError, complain, print_json
from gateway.core.litellm_config import Imported, imported

_HEAD = """# Made by `tollhouse import litellm {name}`; see what it could not carry before you rely on it.
# `tollhouse check --config FILE` shows what it amounts to.
"""


def litellm(path: Path, out: Path | None, as_json: bool) -> int:
    """Ours goes to `out` or to standard output, what is left over to standard error. 0 even if something is."""
    found = _imported(path)
    if as_json:
        print_json(
            {
                "config": found.config,
                "left": [asdict(left) for left in found.left],
                "variables": found.variables,
            }
        )
        return 0
    text = _HEAD.format(name=path.name) + config.written(found.config)
    if out is None:
        sys.stdout.write(text)
    else:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise OperatorError(f"{out} exists already", "choose another name; nothing was written") from None
        except OSError as error:
            raise OperatorError(f"{out} cannot be written: {error.strerror}") from None
    for left in found.left:
        complain(f"{path}: {left.where}: {left.why}")
    if found.variables:
        complain(f"set in the environment: {', '.join(found.variables)}")
    count = len(found.left)
    complain(
        f"{count} thing{'' if count == 1 else 's'} could not be carried"
        if count
        else "everything was carried"
    )
    return 0


def _imported(path: Path) -> Imported:
    try:
        theirs = config.foreign(path)
        if not isinstance(theirs, Mapping):
            raise OperatorError(
                f"{path} is not a configuration of LiteLLM's proxy", "it begins with model_list:"
            )
        return imported(theirs, config.listed_names())
    except OSError as error:
        raise OperatorError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise OperatorError(f"{path}: {error}") from None
