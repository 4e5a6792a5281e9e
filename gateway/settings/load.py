"""From files and environment to Settings, finding all problems in one pass."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import yaml

from gateway.core.addresses import judge
from gateway.core.budget import ALERT_PERCENTS, AMOUNT_MAX, BudgetMode, OnExceed
from gateway.core.cache_rules import CacheRules
from gateway.core.catalog import Catalog, Deployment, Order, Tier
from gateway.core.config_overlay import Documents
from gateway.core.entry import Unit
from gateway.core.identity import RateLimit
from gateway.core.prices import ListedModel, PriceBook, listed_models, load_price_book
from gateway.core.task import TaskDefault
from gateway.core.windows import parse_window
from gateway.settings.breakers import read_breakers
from gateway.settings.cache_rules import read_cache_rules
from gateway.settings.caching import read_caching
from gateway.settings.calibration import calibrated, kept
from gateway.settings.credentials import read_credentials, read_sources
from gateway.settings.demo import DemoMode, add_demo
from gateway.settings.model import (
    BudgetSpec,
    ConfigError,
    LogLevel,
    Overlaid,
    Place,
    Problem,
    Secret,
    Settings,
    TeamSpec,
    Timeouts,
    WebhookSpec,
)
from gateway.settings.overlay import Laid, lay
from gateway.settings.places import places
from gateway.settings.providers import Shipped, read_known, read_providers
from gateway.settings.rules import read_routing
from gateway.settings.section import Section
from gateway.settings.telemetry import read_telemetry
from gateway.settings.yaml_marks import LOADER, parse

_MIB = 2**20
_MOST = 1_000_000_000
_SHORTEST_SECRET = 16
_MOST_WORKERS = 256
_DAY_S = 86_400
_SQLITE = ("sqlite:///", "sqlite+aiosqlite:///")
_POSTGRES = ("postgresql://", "postgres://", "postgresql+asyncpg://")


def environment() -> Mapping[str, str]:
    """The environment of this process: the one place that reads it."""
    return os.environ


def shipped(name: str) -> Path:
    """A file or folder that comes with the release: "config/prices.yaml", "migrations".

    In an installed wheel it is inside of the package, in a checkout beside it.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / "_shipped" / name
    return inside if inside.exists() else package.parent / name


def load(
    path: Path | None,
    env: Mapping[str, str],
    overlay: Documents = (),
    *,
    lists: Path | None = None,
    today: date | None = None,
) -> Settings:
    """The configuration at `path`, else at $TOLLHOUSE_CONFIG, else the shipped config/gateway.yaml.

    `overlay` is what operators have written over the admin API. `lists` is the folder with providers.yaml and prices.yaml, by default the shipped one; `today` is the day on which
    their rows must hold. Raises ConfigError with every problem found.
    """
    day = today or datetime.now(UTC).date()
    named = env.get("TOLLHOUSE_CONFIG")
    path = path or (Path(named) if named else shipped("config/gateway.yaml"))
    problems: list[Problem] = []
    root = _open(path, env, problems)
    if not problems or root.names:
        found = _lists(lists or shipped("config"), problems, day)
        laid = Laid(root.node)
        if overlay:
            laid = lay(root, overlay, _discovered(root, found.shipped, env, found.known.file), problems)
            root = Section(laid.root, "", root.file, problems)
        settings = _settings(root, found, env, problems, Overlaid(overlay, laid.shadowed))
        if not problems:
            return settings
    # A key that is read twice is complained about twice.
    raise ConfigError(sorted(dict.fromkeys(problems), key=lambda p: (p.file, p.line)))


def _discovered(root: Section, shipped: Shipped, env: Mapping[str, str], file: str) -> dict[str, str]:
    """Known providers that their key in the environment switches on, and the file that knows them."""
    asked = Section(root.node, "", root.file, [])  # what is wrong is said by whoever reads it for good
    if not asked.flag("discover_providers", True):
        return {}
    return {name: file for name, known in shipped.known.items() if any(env.get(n) for n in known.key_env)}


def foreign(path: Path) -> Any:
    """A YAML file of somebody else's, as it stands. Raises OSError; ValueError if it is no YAML."""
    try:
        return yaml.load(path.read_text("utf-8"), Loader=LOADER)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"is not YAML: {' '.join(str(error).split())}") from None


def written(config: Mapping[str, Any]) -> str:
    """A configuration as the text of a file."""
    return yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True, width=110)


def listed_names() -> frozenset[str]:
    """The models of the shipped price list, as "provider/model"."""
    doc: Any = yaml.load(shipped("config/prices.yaml").read_bytes(), Loader=LOADER)
    return frozenset(f"{item.provider}/{item.model}" for item in listed_models(doc))


def _open(path: Path, env: Mapping[str, str], problems: list[Problem]) -> Section:
    file = _shown(path)
    text = ""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        problems.append(Problem(file, 0, "", "is not UTF-8 text"))
    except OSError as error:
        problems.append(Problem(file, 0, "", f"cannot be read: {error.strerror}"))
    return Section(parse(text, file, env, problems), "", file, problems)


def _shown(path: Path) -> str:
    """Relative to where the operator stands, if it is below."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@dataclass(frozen=True, slots=True)
class _Lists:
    shipped: Shipped
    book: PriceBook
    cache_rules: CacheRules
    known: Section
    prices_file: str


def _lists(folder: Path, problems: list[Problem], today: date) -> _Lists:
    """providers.yaml and prices.yaml: part of the release, so the environment does not reach in. They take most of the time
    of a reading and hardly ever change, so they are kept.
    """
    files = (folder / "providers.yaml", folder / "prices.yaml")
    try:
        return _kept_lists(*files, *(file.stat().st_mtime_ns for file in files), today)
    except OSError as error:
        lost = Problem(_shown(Path(str(error.filename))), 0, "", f"cannot be read: {error.strerror}")
        raise ConfigError([*problems, lost]) from error
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error


@functools.lru_cache(maxsize=4)
def _kept_lists(providers: Path, prices: Path, _written: int, _written_too: int, today: date) -> _Lists:
    problems: list[Problem] = []
    root = _open(providers, {}, problems)
    known, cache_rules = read_known(root), read_cache_rules(root, today)
    doc: Any = yaml.load(prices.read_bytes(), Loader=LOADER)
    try:
        book = load_price_book(doc)
        models = listed_models(doc)
    except ValueError as error:
        raise ConfigError([*problems, Problem(_shown(prices), 0, "", str(error))]) from error
    if problems:
        raise ConfigError(problems)
    listed: dict[str, list[ListedModel]] = {}
    for model in models:
        listed.setdefault(model.provider, []).append(model)
    return _Lists(Shipped(known, listed, frozenset(book.by_price)), book, cache_rules, root, _shown(prices))


def _settings(
    root: Section, lists: _Lists, env: Mapping[str, str], problems: list[Problem], overlaid: Overlaid
) -> Settings:
    timeouts = _timeouts(root.section("timeouts"))
    named = root.section("credentials")
    credentials = read_credentials(named, read_sources(root.section("admin_credentials")), env)
    found = read_providers(
        root.section("providers"),
        root.flag("discover_providers", True),
        lists.shipped,
        env,
        timeouts,
        credentials,
    )
    for name in found.own_keys & credentials.keys():
        named.wrong(name, f"the key of provider {name} goes by that name already", "call it something else")
    others = bool(found.deployments)
    if root.choice("demo", DemoMode, DemoMode.AUTO).wanted(others):
        add_demo(found, () if others else lists.shipped.model_names)
    if not found.deployments and not problems:
        root.wrong("providers", "nothing is configured that could answer a request", "set a provider's key")
    state_dir = Path(root.text("state_dir", "./var")).expanduser()
    measured = kept(state_dir) if any(d.replicas for d in found.deployments.values()) else {}
    catalog = _catalog(root, tuple(calibrated(d, measured) for d in found.deployments.values()))
    teams, budgets = _teams(root, catalog)
    settings = Settings(
        file=root.file,
        listen=root.listen("listen", "127.0.0.1:4000"),
        admin_listen=root.listen("admin_listen", "127.0.0.1:4001"),
        state_dir=state_dir,
        database_url=_database_url(root, state_dir),
        redis_url=_redis_url(root),
        admin_key=_secret(root, "admin_key", env.get("TOLLHOUSE_ADMIN_KEY", "")),
        pepper=_secret(root, "pepper", env.get("TOLLHOUSE_PEPPER", "")),
        workers=root.integer("workers", 1, 1, _MOST_WORKERS),
        providers=found.providers,
        catalog=catalog,
        credentials=found.credentials,
        prices=lists.book.merged(found.own_prices.values()),
        routing=read_routing(root, catalog),
        tenants=root.texts("tenants") or ("default",),
        teams=teams,
        budgets=budgets,
        task_default=TaskDefault(
            root.nano_usd("task_budget_usd"), root.choice("task_on_exceed", OnExceed, OnExceed.ERROR)
        ),
        limits=_limits(root.section("limits")),
        timeouts=timeouts,
        body_limit_bytes=root.integer("body_limit_bytes", 32 * _MIB, 1024, 1024 * _MIB),
        log_level=root.choice("log_level", LogLevel, LogLevel.INFO),
        telemetry=read_telemetry(root.section("telemetry"), env),
        drain_s=root.number("drain_s", 30, 0, 3600),
        reaper_grace_s=root.number("reaper_grace_s", 600, 1, _DAY_S),
        expose_cost=root.flag("expose_cost", True),
        webhook=_webhook(root),
        breakers=read_breakers(root.section("breakers")),
        crash_file=Path(env["TOLLHOUSE_CRASH_FILE"]) if env.get("TOLLHOUSE_CRASH_FILE") else None,
        keyless=tuple(found.keyless),
        places=_places(root, lists, found.deployments, env),
        cache_rules=lists.cache_rules,
        overlaid=overlaid,
        caching=read_caching(root.section("caching"), [team.id for team in teams], list(found.deployments)),
    )
    root.done()
    return settings


def _places(
    root: Section, lists: _Lists, deployments: Iterable[str], env: Mapping[str, str]
) -> dict[str, Place]:
    """Deployments that are not written anywhere come with the price list."""
    key_env = {name: known.key_env for name, known in lists.shipped.known.items()}
    listed = {f"deployment:{name}": Place(lists.prices_file, 0) for name in deployments}
    return listed | places(root, lists.known, key_env, env)


def _catalog(root: Section, deployments: tuple[Deployment, ...]) -> Catalog:
    """Requests for "auto" go to the default tier: `standard`, or the one that there is."""
    tiers = [
        tier for tier in (Tier.STANDARD, Tier.FAST, Tier.SMALL) if any(d.tier is tier for d in deployments)
    ]
    tier = root.optional_choice("default_tier", Tier)
    if tier and tier not in tiers:
        root.wrong("default_tier", f"no deployment is in tier {tier}")
    order = root.choice("candidate_order", Order, Order.WEIGHT)
    return Catalog.of(deployments, tier or (tiers or [Tier.STANDARD])[0], _fallbacks(root, tiers), order)


def _fallbacks(root: Section, tiers: list[Tier]) -> dict[Tier, tuple[Tier, ...]]:
    """`fallbacks: {small: [standard]}`: nothing falls anywhere that is not written."""
    section = root.section("fallbacks")
    found = {}
    for tier in Tier:
        words = section.texts(tier.value)
        for word in words:
            if word not in tiers or word == tier:
                section.wrong(tier.value, f"no other tier with a deployment is called {word!r}")
        if words:
            found[tier] = tuple(Tier(word) for word in words if word in tiers)
    section.done()
    return found


def _timeouts(section: Section) -> Timeouts:
    default = Timeouts()
    values = {
        f.name: section.number(f.name, getattr(default, f.name), 0.01, _DAY_S) for f in fields(Timeouts)
    }
    section.done()
    return Timeouts(**values)


def _limits(section: Section) -> RateLimit:
    limit = RateLimit(
        requests_per_min=section.optional_integer("requests_per_min", 1, _MOST),
        tokens_per_min=section.optional_integer("tokens_per_min", 1, _MOST),
        concurrent=section.optional_integer("concurrent", 1, _MOST),
    )
    section.done()
    return limit


def _webhook(root: Section) -> WebhookSpec | None:
    section = root.section("webhook")
    url, secret = section.text("url"), _secret(section, "secret", "")
    section.done()
    if url and (reason := judge(url).reason):
        section.wrong("url", f"may not be used: {reason}")
    if url and secret is None and not section.unresolved("secret"):
        section.wrong("secret", "is required", "openssl rand -hex 32")
    if secret is not None and not url:
        section.wrong("url", "is required", "for example https://hooks.my-company.com/tollhouse")
    return WebhookSpec(url, secret) if url and secret is not None else None


def _database_url(root: Section, state_dir: Path) -> str:
    url = root.text("database_url") or f"sqlite+aiosqlite:///{state_dir / 'ledger.db'}"
    if not url.startswith(_SQLITE + _POSTGRES):
        hint = "for example postgresql://gateway@127.0.0.1:5432/gateway"
        root.wrong("database_url", "must begin with postgresql:// or sqlite:///", hint)
    several = root.integer("workers", 1, 1, _MOST_WORKERS) > 1
    if several and url.startswith(_SQLITE) and not root.unresolved("database_url"):
        root.wrong(
            "workers", "only one process can serve from a SQLite file", "set database_url to a Postgres"
        )
    return url


def _redis_url(root: Section) -> str | None:
    url = root.text("redis_url")
    if url and not url.startswith(("redis://", "rediss://", "unix://")):
        root.wrong("redis_url", "must begin with redis://, rediss:// or unix://")
    return url or None


def _secret(root: Section, key: str, from_environment: str) -> Secret | None:
    value = root.text(key) or from_environment
    if value and len(value) < _SHORTEST_SECRET:
        root.wrong(key, f"must have at least {_SHORTEST_SECRET} characters", "openssl rand -hex 32")
    return Secret(value) if value else None


def _teams(root: Section, catalog: Catalog) -> tuple[tuple[TeamSpec, ...], tuple[BudgetSpec, ...]]:
    tenants = root.texts("tenants") or ("default",)
    teams: list[TeamSpec] = []
    budgets: list[BudgetSpec] = []
    for name, entry in root.section("teams").named():
        team = TeamSpec(
            name,
            entry.text("tenant", tenants[0]),
            entry.texts("models"),
            _limits(entry.section("limits")),
            entry.nano_usd("task_budget_usd"),
        )
        if team.tenant not in tenants:
            entry.wrong("tenant", f"there is no tenant {team.tenant!r}", "list it under `tenants:`")
        for model in team.models:
            if model not in catalog.by_model:
                entry.wrong("models", f"no deployment serves {model!r}")
        if "budget" in entry:
            budgets += _budget(entry.section("budget"), f"team:{name}")
        entry.done()
        teams.append(team)
    known = {f"tenant:{t}" for t in tenants} | {f"team:{t.id}" for t in teams}
    for item in root.sections("budgets"):
        scope = item.required("scope", "tenant:<id>, team:<id> or key:<id>")
        kind, _, name = scope.partition(":")
        if scope and (kind not in ("tenant", "team", "key") or not name):
            item.wrong("scope", f"must be tenant:<id>, team:<id> or key:<id>, not {scope!r}")
        elif kind != "key" and scope not in known:
            item.wrong("scope", f"no traffic reaches this budget: there is no {scope}")
        budgets += _budget(item, scope)
    return tuple(teams), tuple(budgets)


def _budget(section: Section, scope: str) -> list[BudgetSpec]:
    limits: dict[Unit, int | None] = {
        Unit.USD: section.nano_usd("limit_usd"),
        **{u: section.optional_integer(f"limit_{u}", 0, AMOUNT_MAX) for u in Unit if u is not Unit.USD},
    }
    given = [unit for unit in limits if f"limit_{unit}" in section]
    if not given:
        section.wrong("limit_usd", "is required", 'for example "50"')
    for unit in given[1:]:
        section.wrong(f"limit_{unit}", f"a budget has one limit, and this one has limit_{given[0]}")
    window = section.text("window", "month")
    zone = section.text("zone", "UTC")
    try:
        parse_window(window, zone)
    except ValueError as error:
        section.wrong("window", str(error))
    on_exceed = section.choice("on_exceed", OnExceed, OnExceed.ERROR)
    mode = section.choice("mode", BudgetMode, BudgetMode.ENFORCE)
    landing = section.optional_integer("landing_percent", 0, 50)
    alerts = _percents(section, "alerts")
    section.done()
    unit = given[0] if given else Unit.USD
    limit = limits[unit]
    if limit is None:
        return []
    return [BudgetSpec(scope, limit, window, on_exceed, zone, unit, mode, alerts, landing)]


def _percents(section: Section, key: str) -> tuple[int, ...]:
    texts = section.texts(key)
    if key not in section:
        return ALERT_PERCENTS
    if not all(t.isascii() and t.isdigit() and 1 <= int(t[:4]) <= 100 for t in texts):
        section.wrong(key, "must be a list of percents from 1 to 100", "for example [50, 80, 100]")
        return ALERT_PERCENTS
    return tuple(sorted({int(t) for t in texts}))
