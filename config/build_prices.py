"""Generate prices.yaml from two maintained price lists, refusing where they disagree.

`listed_models.yaml` says which models we list. Their prices come from the `genai-prices` package (Decimals per
million tokens, dated, with hours) and from the price file inside the `litellm` package (floats per token, of today),
which is read without importing litellm. Each row becomes a flat mapping from a path such as `rates.cache_read` or
`service_tiers.flex.size_tiers.1.input` to a number; where both lists know a path they must agree, or
`listed_models.yaml` must hold a `resolved` note with the value, its source and the reason. A note that nothing
needs any more is an error too.

A price that changed since the committed file, without the lists saying when, becomes a new row dated `checked_on`;
the old row is kept, because entries of the ledger name it.

    python config/build_prices.py            write prices.yaml
    python config/build_prices.py --check    is the committed file what would be written? (both offline)
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import ROUND_CEILING, ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
LISTED = HERE / "listed_models.yaml"
PRICES = HERE / "prices.yaml"
SINCE_EVER = date(1970, 1, 1)

CLASSES = ("input", "output", "cache_read", "cache_write_5m", "cache_write_1h", "cache_write_12h")
WRITES = CLASSES[3:]

#: path -> dollars per million tokens, an edge in tokens, or a ratio
Flat = dict[str, Decimal]
Doc = dict[str, Any]


class Refused(Exception):
    """The sources do not say one thing; the message says what to do."""


@dataclass(frozen=True)
class Disagreement:
    price: str
    path: str
    genai: Decimal | None
    litellm: Decimal | None


def exact(value: Decimal) -> Decimal:
    """Whole pico-dollars per token. Float noise is dropped first; what is really finer is rounded up."""
    return (
        value.quantize(Decimal("1e-9"), ROUND_HALF_EVEN).quantize(Decimal("1e-6"), ROUND_CEILING).normalize()
    )


def text(value: Decimal) -> str:
    return format(value.normalize(), "f")


# --- genai-prices ---------------------------------------------------------------------------------------

_GENAI = {
    "input_mtok": "input",
    "output_mtok": "output",
    "cache_read_mtok": "cache_read",
    "cache_write_mtok": "cache_write_5m",
    "cache_write_5m_mtok": "cache_write_5m",
    "cache_write_1h_mtok": "cache_write_1h",
}


def genai_model(provider: str, model: str) -> Any | None:
    from genai_prices.data import providers

    return next((m for p in providers if p.id == provider for m in p.models if m.id == model), None)


def genai_price(prefix: str, price: Any) -> Flat:
    """One of its ModelPrices. Kinds of usage that have no class here (audio, searches) are left out."""
    flat: Flat = {}
    classes = {_GENAI[k]: v for k, v in vars(price).items() if k in _GENAI and v is not None}
    edges = sorted({t.start for v in classes.values() if not isinstance(v, Decimal) for t in v.tiers})
    for name, value in classes.items():
        flat[f"{prefix}rates.{name}"] = exact(value if isinstance(value, Decimal) else value.base)
    for n, edge in enumerate(edges, 1):
        flat[f"{prefix}size_tiers.{n}.above"] = Decimal(edge)
        for name, value in classes.items():
            reached = value
            if not isinstance(value, Decimal):
                reached = [value.base, *(t.price for t in value.tiers if t.start <= edge)][-1]
            flat[f"{prefix}size_tiers.{n}.{name}"] = exact(reached)
    if (per_thousand := vars(price).get("requests_kcount")) is not None:
        flat[f"{prefix}per_request"] = per_thousand / 1000
    return flat


def genai_rows(model: Any, checked_on: date, history_from: date | None) -> list[tuple[date, Flat]]:
    """Its dated prices, oldest first; daily windows belong to the price in force and later ones."""
    conditional = model.prices if isinstance(model.prices, list) else None
    if conditional is None:
        return [(SINCE_EVER, genai_price("", model.prices) | genai_variants(model, checked_on, model.prices))]
    dated = [
        (getattr(c.constraint, "start_date", SINCE_EVER), c.prices)
        for c in conditional
        if not hasattr(c.constraint, "start_time")
    ]
    daily = [c for c in conditional if hasattr(c.constraint, "start_time")]
    dated.sort(key=lambda d: d[0])
    if daily and len(dated) > 1 and history_from is None:
        raise Refused(f"{model.id} has daily windows and dated prices: give it `history_from`")
    rows: list[tuple[date, Flat]] = []
    for i, (start, price) in enumerate(dated):
        end = dated[i + 1][0] if i + 1 < len(dated) else None
        if end is not None and history_from is not None and end <= history_from:
            continue
        past = end is not None and end <= checked_on
        flat = genai_price("", price)
        flat |= genai_variants(
            model, end - timedelta(days=1) if past and end else max(start, checked_on), price
        )
        if not past:
            for c in daily:
                window = f"{c.constraint.start_time:%H:%M}-{c.constraint.end_time:%H:%M}"
                flat |= genai_price(f"hours.{window}.", c.prices)
        rows.append((start, flat))
    return rows


def genai_variants(model: Any, at: date, standard: Any) -> Flat:
    """Batch and service tiers on that day. What a variant does not name keeps the standard price."""
    flat: Flat = {}
    for variant in reversed(model.price_variants or ()):
        ((dimension, value), *more) = variant.when.items()
        since = getattr(variant.constraint, "start_date", SINCE_EVER)
        if more or since > at or dimension not in ("processing", "service_tier") or value == "default":
            continue
        prefix = "batch." if dimension == "processing" else f"service_tiers.{value}."
        overlaid = type(standard)(
            **{**vars(standard), **{k: v for k, v in vars(variant.prices).items() if v is not None}}
        )
        flat = {k: v for k, v in flat.items() if not k.startswith(prefix)} | genai_price(prefix, overlaid)
    return {k: v for k, v in flat.items() if not k.endswith("per_request")}


# --- litellm --------------------------------------------------------------------------------------------

_LITELLM = re.compile(
    r"(?P<kind>input_cost_per_token|output_cost_per_token|cache_read_input_token_cost|cache_creation_input_token_cost)"
    r"(?:_above_(?P<ttl>1|12)hr)?(?:_above_(?P<edge>\d+)k_tokens)?(?:_(?P<tier>batches|flex|priority|ultrafast))?"
)
_KIND = {
    "input_cost_per_token": "input",
    "output_cost_per_token": "output",
    "cache_read_input_token_cost": "cache_read",
    "cache_creation_input_token_cost": "cache_write_5m",
}


def litellm_file() -> dict[str, Doc]:
    spec = find_spec("litellm")
    if spec is None or not spec.submodule_search_locations:
        raise Refused("litellm is not installed: run `make prices`, which installs the locked requirements")
    path = Path(spec.submodule_search_locations[0]) / "model_prices_and_context_window_backup.json"
    loaded: dict[str, Doc] = json.loads(path.read_text())
    return loaded


def litellm_price(entry: Doc) -> Flat:
    """One of its entries. A cache write at 0 is its word for "not billed as such" and left out."""
    edges = sorted({int(m["edge"]) for k in entry if (m := _LITELLM.fullmatch(k)) and m["edge"]})
    flat: Flat = {}
    for key, value in entry.items():
        match = _LITELLM.fullmatch(key)
        if match is None or value is None:
            continue
        per_mtok = exact(Decimal(repr(value)) * 1_000_000)
        name = f"cache_write_{match['ttl']}h" if match["ttl"] else _KIND[match["kind"]]
        if name in WRITES and not per_mtok:
            continue
        tier = match["tier"]
        prefix = "" if tier is None else "batch." if tier == "batches" else f"service_tiers.{tier}."
        if match["edge"] is None:
            flat[f"{prefix}rates.{name}"] = per_mtok
        else:
            n = edges.index(int(match["edge"])) + 1
            flat[f"{prefix}size_tiers.{n}.above"] = Decimal(match["edge"]) * 1_000
            flat[f"{prefix}size_tiers.{n}.{name}"] = per_mtok
    for name, ratio in entry.get("provider_specific_entry", {}).items():
        flat[f"service_tiers.{name}.ratio"] = Decimal(repr(ratio))
    reasoning = entry.get("output_cost_per_reasoning_token")
    if reasoning is not None and reasoning != entry.get("output_cost_per_token"):
        raise Refused("a price of its own for reasoning tokens is not supported")
    return flat


# --- one row out of both --------------------------------------------------------------------------------


def disagreements(price: str, genai: Flat, litellm: Flat) -> list[Disagreement]:
    """Where both know a path and differ; and size tiers of the standard price that only one of them has."""
    paths = {p for p in genai.keys() & litellm.keys() if genai[p] != litellm[p]}
    paths |= {p for p in genai.keys() ^ litellm.keys() if re.fullmatch(r"size_tiers\.\d+\.above", p)}
    return [Disagreement(price, p, genai.get(p), litellm.get(p)) for p in sorted(paths)]


def resolve(found: list[Disagreement], notes: list[Doc], price: str) -> tuple[Flat, list[Disagreement]]:
    """(chosen values, disagreements that no note settles). A value "none" takes the path out."""
    chosen: Flat = {}
    for note in notes:
        if not note.get("source") or not note.get("reason"):
            raise Refused(f"{price}: a resolved note needs a source and a reason")
        for path, value in note["fields"].items():
            if path not in {d.path for d in found}:
                raise Refused(f"{price}: the resolved note for {path} settles nothing any more; remove it")
            chosen[path] = Decimal("NaN") if value == "none" else Decimal(value)
    return chosen, [d for d in found if d.path not in chosen]


def merged(genai: Flat, litellm: Flat, chosen: Flat) -> Flat:
    flat = {**litellm, **genai, **chosen}
    gone = [p.removesuffix("above") for p, v in flat.items() if v.is_nan()]
    return {p: v for p, v in flat.items() if not any(p.startswith(g) for g in gone)}


def filled(flat: Flat) -> Flat:
    """Close the gaps that would price too low.

    A size tier of the standard price that a service tier lacks costs the dearer of both, class by class. A class of
    cache writes that a tier lacks and the standard price has costs in proportion to input.
    """
    full = dict(flat)
    standard = {p: v for p, v in flat.items() if p.startswith("size_tiers.")}
    for special in specials(flat):
        if f"{special}rates.input" not in flat or f"{special}rates.output" not in flat:
            full = {p: v for p, v in full.items() if not p.startswith(special)}
            continue
        if special.startswith("hours."):
            continue
        for path, value in standard.items():
            base = flat.get(f"{special}rates.{path.rsplit('.', 1)[1]}", Decimal(0))
            full.setdefault(special + path, max(value, base))
    for part in sorted({p.rsplit(".", 1)[0] for p in full if p.endswith(".input")} - {"rates"}):
        for write in WRITES:
            if f"rates.{write}" in flat and f"{part}.{write}" not in full:
                share = (
                    Fraction(flat[f"rates.{write}"])
                    * Fraction(full[f"{part}.input"])
                    / Fraction(flat["rates.input"])
                )
                full[f"{part}.{write}"] = exact(Decimal(share.numerator) / Decimal(share.denominator))
    return full


def specials(flat: Flat) -> list[str]:
    """Prefixes of schedules beside the standard one: "service_tiers.flex.", "batch.", "hours.01:00-04:00."."""
    return sorted(
        {
            m[0]
            for p in flat
            if (m := re.match(r"(?:service_tiers\.[^.]+|batch|hours\.[^.]+)\.(?=rates|size)", p))
        }
    )


def as_ratios(flat: Flat) -> Flat:
    """Replace schedules that are an exact multiple of the standard one by their ratio."""
    short = dict(flat)
    for special in specials(flat):
        own = {p.removeprefix(special): v for p, v in flat.items() if p.startswith(special)}
        standard = {p: v for p, v in flat.items() if p.startswith(("rates.", "size_tiers."))}
        if special.startswith("hours.") or own.keys() != standard.keys():
            continue
        edges = all(own[p] == standard[p] for p in own if p.endswith(".above"))
        prices = {p: v for p, v in standard.items() if not p.endswith(".above") and v}
        ratios = {Fraction(own[p]) / Fraction(v) for p, v in prices.items()}
        if edges and len(ratios) == 1 and 10**9 % (ratio := ratios.pop()).denominator == 0:
            short = {p: v for p, v in short.items() if not p.startswith(special)}
            short[f"{special}ratio"] = Decimal(ratio.numerator) / Decimal(ratio.denominator)
    return short


# --- the document ---------------------------------------------------------------------------------------


class Line(dict[str, Any]):
    """A mapping that is written on one line."""


def rates_doc(flat: Flat, prefix: str) -> Line:
    return Line({f"{c}_usd_per_mtok": text(flat[prefix + c]) for c in CLASSES if prefix + c in flat})


def schedule_doc(flat: Flat, prefix: str = "") -> Doc:
    doc: Doc = {"rates": rates_doc(flat, f"{prefix}rates.")}
    edges = sorted(p for p in flat if re.fullmatch(re.escape(prefix) + r"size_tiers\.\d+\.above", p))
    if edges:
        doc["size_tiers"] = [
            Line(above_input_tokens=int(flat[p]), rates=rates_doc(flat, p.removesuffix("above")))
            for p in edges
        ]
    return doc


def special_doc(flat: Flat, prefix: str) -> Doc:
    ratio = flat.get(f"{prefix}ratio")
    return schedule_doc(flat, prefix) if ratio is None else Line(ratio=text(ratio))


def row_doc(flat: Flat) -> Doc:
    doc = schedule_doc(flat)
    names = sorted({p.split(".")[1] for p in flat if p.startswith("service_tiers.")})
    if names:
        doc["service_tiers"] = {name: special_doc(flat, f"service_tiers.{name}.") for name in names}
    if any(p.startswith("batch.") for p in flat):
        doc["batch"] = special_doc(flat, "batch.")
    windows = sorted({p.split(".")[1] for p in flat if p.startswith("hours.")})
    if windows:
        doc["hours"] = [
            {"from": w.split("-")[0], "to": w.split("-")[1], **schedule_doc(flat, f"hours.{w}.")}
            for w in windows
        ]
    if "per_request" in flat:
        doc["per_request_usd"] = text(flat["per_request"])
    return doc


def with_history(rows: list[Doc], committed: list[Doc], checked_on: str) -> list[Doc]:
    """Keep what was committed: an undated price that changed becomes a new row dated `checked_on`."""

    def content(row: Doc) -> Doc:
        return {k: v for k, v in row.items() if k not in ("valid_from", "source", "checked_on")}

    if len(rows) != 1 or not committed:
        return rows
    newest = committed[-1]
    if content(rows[0]) == content(newest) or newest["checked_on"] == checked_on:
        return [*committed[:-1], {**rows[0], "valid_from": newest["valid_from"]}]
    return [*committed, {**rows[0], "valid_from": checked_on}]


def model_rows(
    entry: Doc, defaults: Doc, litellm: dict[str, Doc], checked_on: date, versions: Doc
) -> tuple[list[Doc], list[Disagreement]]:
    """The dated rows of one listed model, and what its sources disagree about."""
    price = f"{entry['provider']}/{entry['model']}"
    name = entry.get("genai", entry["model"].removeprefix(defaults.get("prefix", "")))
    genai = genai_model(defaults["genai"], name)
    key = entry.get("litellm", defaults.get("litellm", "{model}").format(model=entry["model"]))
    known = litellm.get(key)
    if genai is None:
        raise Refused(f"{price}: genai-prices does not know {defaults['genai']} {name!r}")
    if (known is None) != ("single_source" in entry or "single_source" in defaults):
        raise Refused(
            f"{price}: litellm {'does not know' if known is None else 'knows'} {key!r}; see `single_source`"
        )
    dated = genai_rows(genai, checked_on, entry.get("history_from"))
    now = max(i for i, (start, _) in enumerate(dated) if start <= checked_on)
    today = litellm_price(known or {})
    found = disagreements(price, dated[now][1], today) if known else []
    chosen, open_ones = resolve(found, entry.get("resolved", []), price)
    current = as_ratios(filled(merged(dated[now][1], today, chosen)))
    alone = f"genai-prices {versions['genai-prices']}"
    both = f"{alone}, litellm {versions['litellm']}" if known else alone
    rows: list[Doc] = []
    for i, (start, flat) in enumerate(dated):
        full = current if i == now else as_ratios(filled(flat))
        if i > now:  # litellm knows today's price only; tiers that are multiples of it hold later too
            own = {p.split(".")[1] for p in full if p.startswith("service_tiers.")}
            full |= {p: v for p, v in current.items() if p.endswith(".ratio") and p.split(".")[1] not in own}
        rows.append(
            {
                "valid_from": start.isoformat(),
                **row_doc(full),
                "source": both if i == now else alone,
                "checked_on": checked_on.isoformat(),
            }
        )
    return rows, open_ones


def build(listed: Doc, committed: Doc) -> tuple[Doc, list[Disagreement]]:
    """The document of prices.yaml, and the disagreements that forbid writing it."""
    litellm = litellm_file()
    versions = {name: metadata.version(name) for name in ("genai-prices", "litellm")}
    checked_on: date = listed["checked_on"]
    before = {m["price"]: m["rows"] for m in committed.get("models", [])}
    models: list[Doc] = []
    open_ones: list[Disagreement] = []
    for entry in listed["models"]:
        price = f"{entry['provider']}/{entry['model']}"
        defaults = listed["providers"].get(entry["provider"], {})
        doc: Doc = {"price": price, "provider": entry["provider"], "model": entry["model"]}
        if "rows" in entry:
            rows = [own_row(own, checked_on) for own in entry["rows"]]
        else:
            rows, more = model_rows(entry, defaults, litellm, checked_on, versions)
            open_ones += more
            rows = with_history(rows, before.get(price, []), checked_on.isoformat())
        doc |= {k: entry[k] for k in ("tier", "aliases") if k in entry}
        doc |= sizes(entry, defaults, litellm)
        operations = entry.get("operations", defaults.get("operations"))
        doc |= {"operations": operations} if operations else {}
        models.append({**doc, "rows": rows})
    return {"version": 1, "models": models}, open_ones


def own_row(row: Doc, checked_on: date) -> Doc:
    return {
        "valid_from": SINCE_EVER.isoformat(),
        **row,
        "checked_on": row.get("checked_on", checked_on.isoformat()),
    }


def sizes(entry: Doc, defaults: Doc, litellm: dict[str, Doc]) -> Doc:
    """Context and output limits: ours, else genai-prices' context window, else litellm's."""
    name = entry.get("genai", entry["model"].removeprefix(defaults.get("prefix", "")))
    genai = genai_model(defaults.get("genai", ""), name)
    known = litellm.get(
        entry.get("litellm", defaults.get("litellm", "{model}").format(model=entry["model"])), {}
    )
    context = (
        entry.get("context_tokens") or getattr(genai, "context_window", None) or known.get("max_input_tokens")
    )
    output = entry.get("max_output_tokens") or known.get("max_output_tokens")
    return {k: int(v) for k, v in (("context_tokens", context), ("max_output_tokens", output)) if v}


class Writer(yaml.SafeDumper):
    def ignore_aliases(self, _: object) -> bool:
        return True


def _written_list(writer: Writer, items: list[Any]) -> yaml.Node:
    on_one_line = all(isinstance(item, str) for item in items)
    return writer.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=on_one_line)


def _written_str(writer: Writer, value: str) -> yaml.Node:
    # No reader may take "3" for a number or "01:00" for a time.
    return writer.represent_scalar("tag:yaml.org,2002:str", value, style='"' if value[:1].isdigit() else None)


Writer.add_representer(
    Line, lambda w, line: w.represent_mapping("tag:yaml.org,2002:map", line, flow_style=True)
)
Writer.add_representer(list, _written_list)
Writer.add_representer(str, _written_str)


def as_lines(value: object) -> object:
    """Put rates on one line again after they were read from a file."""
    if isinstance(value, dict):
        line = "input_usd_per_mtok" in value or "ratio" in value or "above_input_tokens" in value
        return (Line if line else dict)({k: as_lines(v) for k, v in value.items()})
    return [as_lines(v) for v in value] if isinstance(value, list) else value


HEADER = """\
# Prices of the models that Tollhouse lists, in dollars per million tokens. Written by config/build_prices.py
# (`make prices`); do not edit. What is listed, and how disagreements of the sources were settled, is in
# listed_models.yaml. Your own prices go into your configuration: they replace these by name.
# A row that starts in 1970 has no known start. Schema and fall-backs: gateway/core/prices.py.
"""


def written(doc: Doc) -> str:
    return HEADER + yaml.dump(as_lines(doc), Dumper=Writer, sort_keys=False, width=10_000)


def table(found: list[Disagreement]) -> Iterator[str]:
    yield f"{'price':44} {'path':44} {'genai-prices':>14} {'litellm':>14}"
    for d in found:
        sides = ["none" if v is None else text(v) for v in (d.genai, d.litellm)]
        yield f"{d.price:44} {d.path:44} {sides[0]:>14} {sides[1]:>14}"


def main(arguments: list[str]) -> int:
    listed = yaml.safe_load(LISTED.read_text())
    committed = yaml.safe_load(PRICES.read_text()) if PRICES.exists() else {}
    try:
        doc, open_ones = build(listed, committed)
    except Refused as e:
        print(e, file=sys.stderr)
        return 1
    if open_ones:
        print(
            "The sources disagree. Settle each in listed_models.yaml by a `resolved` note:", file=sys.stderr
        )
        print("\n".join(table(open_ones)), file=sys.stderr)
        return 1
    new = written(doc)
    if "--check" in arguments:
        if PRICES.exists() and PRICES.read_text() == new:
            return 0
        print("prices.yaml is not what would be generated: run `make prices`", file=sys.stderr)
        return 1
    PRICES.write_text(new)
    print(f"{len(doc['models'])} models written to {PRICES}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
