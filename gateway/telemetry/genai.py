"""The client metrics of OpenTelemetry's GenAI conventions, of calls to providers, for an OTLP collector.

Names, buckets and attributes as in semantic-conventions-genai ("Development", read November 2026). They count what
`metrics` counts under names of our own, so they are kept only where metrics are sent.
"""

from __future__ import annotations

from gateway.core.entry import Attempt, Outcome
from gateway.telemetry.page import Family
from gateway.telemetry.series import Histogram

OPERATION = {"chat": "chat", "responses": "chat", "messages": "chat", "embeddings": "embeddings"}
PROVIDER = {
    "gemini": "gcp.gemini",
    "vertex": "gcp.vertex_ai",
    "bedrock": "aws.bedrock",
    "azure": "azure.ai.openai",
}
#: Powers of four, as the conventions advise.
TOKENS = tuple(float(4**n) for n in range(14))
SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)

_CALL = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")


class GenAiMetrics:
    """Of one worker. Models and providers are those of the catalog, so their number is bounded; a guard cuts at 2,000."""

    def __init__(self) -> None:
        self._duration = Histogram(
            "gen_ai.client.operation.duration",
            "GenAI operation duration.",
            (*_CALL, "error.type"),
            SECONDS,
        )
        self._tokens = Histogram(
            "gen_ai.client.token.usage",
            "Number of input and output tokens used.",
            (*_CALL, "gen_ai.token.type"),
            TOKENS,
        )
        self._first = Histogram(
            "gen_ai.client.operation.time_to_first_chunk",
            "Time to receive the first chunk of a streamed answer.",
            _CALL,
            SECONDS,
        )

    def attempt(self, attempt: Attempt, outcome: Outcome) -> None:
        call = (
            OPERATION.get(attempt.operation, attempt.operation),
            PROVIDER.get(attempt.provider, attempt.provider),
            attempt.upstream_model,
        )
        self._duration.observe((*call, outcome.error), outcome.latency_ms / 1e3)
        if not outcome.error:
            self._tokens.observe((*call, "input"), float(outcome.usage.input_total))
            self._tokens.observe((*call, "output"), float(outcome.usage.output))
        if outcome.first_token_ms is not None and attempt.stream:
            self._first.observe(call, outcome.first_token_ms / 1e3)

    def read(self) -> list[Family]:
        return [self._duration.read(), self._tokens.read(), self._first.read()]
