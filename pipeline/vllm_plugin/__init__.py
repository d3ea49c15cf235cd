"""Drafts of the memory inside vLLM: a proposer class for its `custom_class` method (docs/vllm.md)."""
