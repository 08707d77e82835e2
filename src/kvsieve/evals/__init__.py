"""Evaluation: what a budget costs in quality, against full KV in the same run."""
