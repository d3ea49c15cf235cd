"""Benchmark of the plugin inside vLLM against vLLM's own ways of drafting (docs/vllm.md)."""
