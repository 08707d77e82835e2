"""The parts of `benchmarks/selection_layer.py`."""
