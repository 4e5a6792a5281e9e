"""check: is the configuration usable, and what does it amount to."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.commands import overlay
from gateway.commands.budgets import when_used_up
from gateway.commands.opening import told
from gateway.commands.output import amount, complain, dollars, print_json, print_table, say
from gateway.commands.prices import per_mtok
from gateway.core.catalog import Deployment, ReplicaKind, ReplicaSource, Wire
from gateway.core.prices import PriceRow
from gateway.core.rules import Caps, RuleContext
from gateway.settings import ConfigError, Settings

#: Where a provider without a base URL is found.
_URL_OF = {Wire.DEMO: "(started by the gateway)", Wire.LITELLM: "(known to litellm)"}


def check(path: Path | None, as_json: bool) -> int:
    """0 if the configuration can be used, 2 if not."""
    try:
        found = overlay.load_in_force(path)
    except ConfigError as error:
        if as_json:
            print_json({"ok": False, "problems": [asdict(p) for p in error.problems]})
        else:
            complain(told(error.problems))
        return 2
    if as_json:
        print_json({"ok": True, "problems": [], **summary(found.settings), "overlay": overlay.summary(found)})
    else:
        _print_summary(found.settings)
        overlay.print_summary(found)
    return 0


def summary(settings: Settings) -> dict[str, Any]:
    """What is configured, without secrets, for `--json`."""
    return {
        "file": settings.file,
        "listen": str(settings.listen),
        "admin_listen": str(settings.admin_listen),
        "state_dir": str(settings.state_dir),
        "database": settings.database_shown,
        "redis": settings.redis_shown,
        "workers": settings.workers,
        "mode": settings.routing.mode,
        "providers": [
            {"name": p.name, "wire": p.wire, "base_url": p.base_url, "key": bool(p.credential)}
            for p in settings.providers.values()
        ],
        "without_key": list(settings.keyless),
        "deployments": [
            {
                "name": d.name,
                "model": d.model,
                "upstream_model": d.upstream_model,
                "provider": d.provider.name,
                "tier": d.tier,
                "price": d.price or None,
                "aliases": list(d.aliases),
                "context_tokens": d.context_tokens,
                "max_output_tokens": d.max_output_tokens,
                "replicas": asdict(d.replicas) if d.replicas else None,
            }
            for d in settings.catalog.deployments
        ],
        "rules": [
            {
                "name": r.name,
                "when": r.when,
                "tier": None if r.model else r.tier,
                "model": r.model or None,
                "caps": asdict(r.caps),
            }
            for r in settings.routing.texts
        ],
        "caching": caching_levels(settings),
        "virtual_models": {
            name: [{"name": r.text.name, "when": r.text.when, "target": r.text.target} for r in rules.rules]
            for name, rules in settings.routing.virtual.items()
        },
        "notes": notes(settings),
        "teams": [t.id for t in settings.teams],
        "budgets": [asdict(b) for b in settings.budgets],
        "task_budget_nano_usd": settings.task_default.nano_usd,
        "task_on_exceed": settings.task_default.on_exceed,
    }


def caching_levels(settings: Settings) -> dict[str, str]:
    """Whose prompts are shaped how far: "all", then what differs, narrower ones later."""
    policy = settings.caching
    return {
        "all": policy.level.value,
        **{f"deployment {name}": level.value for name, level in policy.deployments.items()},
        **{f"team {name}": level.value for name, level in policy.teams.items()},
        **{f"key {name}": level.value for name, level in policy.keys.items()},
    }


def notes(settings: Settings) -> list[str]:
    """What is no problem and may still surprise."""
    sets = {"auto": settings.routing.rules, **settings.routing.virtual}
    return [
        f"rule {verdict.rule!r} of {name} cannot be evaluated on a request without labels ({verdict.why}): "
        "there it counts as not matched"
        for name, rules in sets.items()
        for verdict in rules.verdicts(RuleContext())
        if verdict.matched is None
    ]


def latest_price(settings: Settings, deployment: Deployment) -> PriceRow | None:
    rows = settings.prices.by_price.get(deployment.price, ())
    return rows[-1] if rows else None


def _print_summary(settings: Settings) -> None:
    say(f"{settings.file}: no problems")
    say(f"  requests  {settings.listen}    admin {settings.admin_listen}    workers {settings.workers}")
    say(f"  database  {settings.database_shown}    redis {settings.redis_shown or 'none'}")
    levels = ", ".join(f"{who} {level}" for who, level in caching_levels(settings).items())
    off = ", ".join(sorted(name.partition("@")[0] for name in settings.caching.off))
    say(f"  caching   {levels}" + (f"    off: {off}" if off else ""))
    print_table(
        ["provider", "wire", "base URL", "key"],
        [
            [
                p.name,
                p.wire,
                p.base_url or _URL_OF.get(p.wire, "(of its replicas)"),
                "yes" if p.credential else "not needed",
            ]
            for p in settings.providers.values()
        ],
    )
    rows = []
    for d in settings.catalog.deployments:
        row = latest_price(settings, d)
        rates = row.rates if row else None
        rows.append(
            [
                d.model,
                d.provider.name,
                d.tier,
                per_mtok(rates.input) if rates else "unknown",
                per_mtok(rates.cache_read) if rates else "-",
                per_mtok(rates.output) if rates else "unknown",
                f"{d.context_tokens:,}" if d.context_tokens else "-",
            ]
        )
    print_table(["model", "provider", "tier", "input $/M>", "cached>", "output $/M>", "context>"], rows)
    _print_replicas(settings)
    if settings.routing.texts:
        print_table(
            ["rule", "when", "to", "caps"],
            [[r.name, " ".join(r.when.split()), r.target, _caps(r.caps)] for r in settings.routing.texts],
            title=f"rules ({settings.routing.mode})",
        )
    for name, rules in settings.routing.virtual.items():
        say(f"virtual model {name}, otherwise {rules.default_model or rules.default_tier}")
        print_table(
            ["rule", "when", "to"],
            [[r.text.name, " ".join(r.text.when.split()), r.text.target] for r in rules.rules],
        )
    for note in notes(settings):
        say(f"note: {note}")
    tasks = settings.task_default
    if settings.budgets or tasks.nano_usd is not None:
        budgets = [
            [b.scope, amount(b.limit, b.unit), b.window, when_used_up(b.on_exceed, b.mode)]
            for b in settings.budgets
        ]
        if tasks.nano_usd is not None:
            budgets.append(["every task", dollars(tasks.nano_usd), "lifetime", tasks.on_exceed.value])
        print_table(["budget of", "limit>", "window", "when used up"], budgets)
    if settings.demo:
        say("no provider has a key here, so the demo provider answers; set one, for example OPENAI_API_KEY")


def _caps(caps: Caps) -> str:
    return ", ".join(f"{name} {most}" for name, most in asdict(caps).items() if most is not None) or "-"


def where(source: ReplicaSource) -> str:
    """Where the replicas of a deployment are found, in words."""
    match source.kind:
        case ReplicaKind.STATIC:
            return ", ".join(source.urls)
        case ReplicaKind.DNS:
            return f"every address of {source.host}, port {source.port}"
        case ReplicaKind.KUBERNETES:
            port = f", port {source.port}" if source.port else ""
            place = f" in {source.namespace}" if source.namespace else ""
            return f"endpoints of Service {source.service}{place}{port}"


def _print_replicas(settings: Settings) -> None:
    rows = [
        [
            d.name,
            where(d.replicas),
            f"{d.replicas.prefill_tokens_per_s:,.0f}" if d.replicas.prefill_tokens_per_s else "not measured",
            f"{d.replicas.first_token_max_s:g}",
        ]
        for d in settings.catalog.deployments
        if d.replicas is not None
    ]
    if rows:
        print_table(["deployment", "replicas", "prefill tokens/s>", "first token at most s>"], rows)
