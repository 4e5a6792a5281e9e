"""Cached tokens through the gateway against those of going straight to a server that really caches: `make test-vllm`."""
