"""Tollhouse: an OpenAI-compatible LLM gateway that keeps long-horizon agents inside their budget."""

__version__ = "0.1.0"
