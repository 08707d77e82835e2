"""Benchmark: what a budget saves, against stock vLLM in the same run."""
