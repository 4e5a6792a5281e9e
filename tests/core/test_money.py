"""Money is integers: one rounding, exact texts, and no binary fraction anywhere in the arithmetic."""

from __future__ import annotations

import ast
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gateway.core.money
from gateway.core.money import nano_from_pico, pico_from_usd_text, usd_text

CORE = Path(gateway.core.money.__file__).parent
ARITHMETIC = ("money", "rates", "prices", "windows", "budget")


@given(st.integers(-(10**24), 10**24))
def test_pico_dollars_round_up_to_whole_nano_dollars(pico: int) -> None:
    assert nano_from_pico(pico) - 1 < Fraction(pico, 1_000) <= nano_from_pico(pico)


@pytest.mark.parametrize(
    ("nano", "text"),
    [
        (0, "0"),
        (37_650_000, "0.03765"),
        (1, "0.000000001"),
        (-1_500_000_000, "-1.5"),
        (9_000_000_000_000_000_000, "9000000000"),
    ],
)
def test_nano_dollars_as_text(nano: int, text: str) -> None:
    assert usd_text(nano) == text


@given(st.integers(0, 10**20))
def test_a_text_of_dollars_is_read_exactly(pico: int) -> None:
    whole, frac = divmod(pico, 10**12)
    assert pico_from_usd_text(f"{whole}.{frac:012d}") == pico
    assert Fraction(usd_text(nano_from_pico(pico // 1_000 * 1_000))) * 10**12 == pico // 1_000 * 1_000


@pytest.mark.parametrize(
    "text", ["", ".5", "1.", "-1", "+1", "1e-6", "1,5", " 1", "1_0", "٣", "²", "0x1", "nan", "1.2.3"]
)
def test_a_text_that_is_not_plain_dollars_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a decimal number of dollars"):
        pico_from_usd_text(text)


def test_a_text_finer_than_a_pico_dollar_is_refused() -> None:
    assert pico_from_usd_text("0.000000000001") == 1
    with pytest.raises(ValueError, match="finer than a pico-dollar"):
        pico_from_usd_text("0.0000000000001")


def inexact(source: str) -> list[str]:
    """Float literals, calls of float() and true divisions in a module."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=float() | complex()):
                found.append(f"line {node.lineno}: a float literal")
            case ast.Call(func=ast.Name(id="float")):
                found.append(f"line {node.lineno}: float()")
            case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
                found.append(f"line {node.lineno}: a true division")
    return found


def test_the_lint_sees_each_way_to_be_inexact() -> None:
    assert sorted(inexact("a = 0.5\nb = float(1)\nc = 1 / 2\nc /= 2\nd = 1 // 2")) == [
        "line 1: a float literal",
        "line 2: float()",
        "line 3: a true division",
        "line 4: a true division",
    ]


@pytest.mark.parametrize(
    "path", [p for n in ARITHMETIC if (p := CORE / f"{n}.py").exists()], ids=lambda p: p.name
)
def test_no_float_takes_part_in_the_arithmetic_of_money(path: Path) -> None:
    assert inexact(path.read_text()) == []
