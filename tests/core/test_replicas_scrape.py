"""Metrics of vLLM, old and new, and of SGLang are read; nonsense is left out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.replicas.scrape import Scrape, parse

NOW = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="small"} 3.0
vllm:num_requests_waiting{engine="0",model_name="small"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="small",reason="capacity"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="small"} 0.25
vllm:prefix_cache_queries_total{engine="0",model_name="small"} 25358.0
vllm:prefix_cache_hits_total{engine="0",model_name="small"} 10816.0
vllm:num_preemptions_total{engine="0",model_name="small"} 1.0
vllm:prompt_tokens_total{engine="0",model_name="small"} 25358.0
vllm:generation_tokens_total{engine="0",model_name="small"} 152.0
vllm:admission_rejections_total{model_name="small",reason="max_num_queued_reqs"} 4.0
vllm:admission_rejections_total{model_name="small",reason="max_num_queued_tokens"} 1.0
vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="131072",num_gpu_blocks="4096"} 1.0
process_start_time_seconds 1.7640000005e+09
"""


def test_vllm_as_it_is() -> None:
    assert parse(NOW) == Scrape(
        waiting=2,
        running=3,
        kv_usage=0.25,
        kv_cache_size_tokens=131_072,
        block_size=32,
        process_start_s=1764000000.5,
        prompt_tokens=25_358,
        generation_tokens=152,
        prefix_queries=25_358,
        prefix_hits=10_816,
        preemptions=1,
        rejections=5,
        models=("small",),
        engine="vllm",
    )


def test_vllm_as_it_was() -> None:
    assert parse(
        'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n'
        'vllm:gpu_prefix_cache_queries_total{model_name="m"} 10\n'
        'vllm:gpu_prefix_cache_hits_total{model_name="m"} 4\n'
        'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0\n'
    ) == Scrape(
        kv_usage=0.5,
        kv_cache_size_tokens=16_000,
        block_size=16,
        prefix_queries=10,
        prefix_hits=4,
        models=("m",),
        engine="vllm",
        older_names=True,
    )


def test_sglang() -> None:
    assert parse(
        'sglang:num_running_reqs{model_name="q"} 7.0\n'
        'sglang:num_queue_reqs{model_name="q"} 1.0\n'
        'sglang:token_usage{model_name="q"} 0.28\n'
        'sglang:max_total_num_tokens{model_name="q"} 454742.0\n'
        'sglang:prompt_tokens_total{model_name="q"} 8128902.0\n'
    ) == Scrape(
        waiting=1,
        running=7,
        kv_usage=0.28,
        kv_cache_size_tokens=454_742,
        prompt_tokens=8_128_902,
        models=("q",),
        engine="sglang",
    )


def test_several_engines_behind_one_address_are_added_up() -> None:
    seen = parse(
        'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="1"} 2\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="1"} 0.9\n'
        'vllm:cache_config_info{block_size="16",engine="0",kv_cache_size_tokens="100"} 1\n'
        'vllm:cache_config_info{block_size="16",engine="1",kv_cache_size_tokens="100"} 1\n'
    )
    assert (seen.running, seen.kv_usage, seen.kv_cache_size_tokens) == (3, 0.9, 200)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "<html>404</html>",
        "vllm:num_requests_running NaN",
        "vllm:num_requests_running +Inf",
        "vllm:num_requests_running -3",
        "vllm:num_requests_running 1e300",
        "vllm:num_requests_running{ 3",
        "vllm:num_requests_running three",
        'vllm:other{model_name="m"} 1',
        'vllm:cache_config_info{block_size="None",kv_cache_size_tokens="-1",num_gpu_blocks="99999999999999999999"} 1',
    ],
)
def test_nonsense_is_left_out(line: str) -> None:
    seen = parse(line)
    assert (seen.running, seen.kv_cache_size_tokens, seen.block_size, seen.models) == (None, None, None, ())


@given(st.text(max_size=300))
def test_no_text_breaks_it(text: str) -> None:
    parse(text)
    parse("vllm:num_requests_running{" + text + "} 1\n" + text)
