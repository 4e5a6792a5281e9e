"""vLLM: a fake of it against recorded answers, and, on order, the gateway and the fake against a real one: `make test-vllm`."""
