"""What an inference engine tells in its Prometheus text: vLLM (0.32 and older names) and SGLang.

Names as served by vLLM 0.32.0 (recorded 2026-11-29) and in SGLang's documentation (2026-10). Several engines behind one
address (data parallel) are added up. Whatever is no number, negative or absent is None: metrics are a hint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

#: Longer texts are cut: the gauges come first, and nobody needs to serve more.
TEXT_MAX = 4 << 20
_COUNT_MAX = 1 << 53
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)(?:[ \t]+-?\d+)?[ \t]*$")
_LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_MODELS_MAX = 16
_WORD_MAX = 256

_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_CAPACITY = ("sglang:max_total_num_tokens",)
_CONFIG = ("vllm:cache_config_info", "sglang:cache_config_info")
_STARTED = ("process_start_time_seconds",)
_PROMPT = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total")
_PREEMPTIONS = ("vllm:num_preemptions_total",)
_REJECTIONS = ("vllm:admission_rejections_total",)
_NAMES = (_WAITING, _RUNNING, _KV_USAGE, _CAPACITY, _CONFIG, _STARTED, _PROMPT, _GENERATED, _QUERIES, _HITS)
_READ = frozenset(name for names in (*_NAMES, _PREEMPTIONS, _REJECTIONS) for name in names)


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading. None = not told, or nonsense."""

    waiting: int | None = None
    running: int | None = None
    kv_usage: float | None = None  # 0 to 1, of running requests; what is only cached counts as free
    kv_cache_size_tokens: int | None = None
    block_size: int | None = None  # tokens
    process_start_s: float | None = None  # since 1970 UTC
    prompt_tokens: int | None = None  # counters, since the start
    generation_tokens: int | None = None
    prefix_queries: int | None = None  # tokens
    prefix_hits: int | None = None
    preemptions: int | None = None
    rejections: int | None = None
    models: tuple[str, ...] = ()
    engine: str = ""  # "vllm" | "sglang"
    version: str = ""  # no metric tells it: whoever asks /version puts it here
    older_names: bool = False  # a naming that the engine has given up

    @property
    def counters(self) -> tuple[int | None, ...]:
        """What only a restart sets back."""
        return self.prompt_tokens, self.generation_tokens, self.prefix_queries, self.prefix_hits


def parse(text: str) -> Scrape:
    """Reads whatever of `text` can be read; an empty `Scrape` if it is no metrics at all."""
    seen: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text[:TEXT_MAX].splitlines():
        found = _LINE.match(line)
        if found is None or found[1] not in _READ:
            continue
        value = _number(found[3])
        if value is not None:
            seen.setdefault(found[1], []).append((dict(_LABEL.findall(found[2] or "")), value))
    config = [labels for name in _CONFIG for labels, _ in seen.get(name, ())]
    names = sorted(seen)
    return Scrape(
        waiting=_sum(seen, _WAITING),
        running=_sum(seen, _RUNNING),
        kv_usage=_most(seen, _KV_USAGE),
        kv_cache_size_tokens=_capacity(config) or _sum(seen, _CAPACITY) or None,
        block_size=next((n for labels in config if (n := _positive(labels.get("block_size")))), None),
        process_start_s=max((value for _, value in seen.get(_STARTED[0], ())), default=None),
        prompt_tokens=_sum(seen, _PROMPT),
        generation_tokens=_sum(seen, _GENERATED),
        prefix_queries=_sum(seen, _QUERIES),
        prefix_hits=_sum(seen, _HITS),
        preemptions=_sum(seen, _PREEMPTIONS),
        rejections=_sum(seen, _REJECTIONS),
        models=_models(labels for readings in seen.values() for labels, _ in readings),
        engine=next((e for e in ("vllm", "sglang") if any(name.startswith(e + ":") for name in names)), ""),
        older_names=any(name.startswith("vllm:gpu_") for name in names),
    )


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if isfinite(value) and 0 <= value <= _COUNT_MAX else None


def _positive(word: str | None) -> int | None:
    return (
        int(word) if word is not None and word.isascii() and word.isdigit() and 0 < len(word) < 16 else None
    )


def _sum(seen: dict[str, list[tuple[dict[str, str], float]]], names: Iterable[str]) -> int | None:
    """Of the first of these names that is there."""
    found = next((seen[name] for name in names if name in seen), None)
    return None if found is None else int(sum(value for _, value in found))


def _most(seen: dict[str, list[tuple[dict[str, str], float]]], names: Iterable[str]) -> float | None:
    found = next((seen[name] for name in names if name in seen), None)
    return None if found is None else min(1.0, max(value for _, value in found))


def _capacity(config: list[dict[str, str]]) -> int | None:
    """Tokens of all engines. Older servers tell blocks only."""
    total = 0
    for labels in config:
        size, blocks = _positive(labels.get("kv_cache_size_tokens")), _positive(labels.get("num_gpu_blocks"))
        total += size or (blocks or 0) * (_positive(labels.get("block_size")) or 0)
    return total or None


def _models(labels: Iterable[dict[str, str]]) -> tuple[str, ...]:
    found = {name[:_WORD_MAX] for each in labels if (name := each.get("model_name"))}
    return tuple(sorted(found)[:_MODELS_MAX])
