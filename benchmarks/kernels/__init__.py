"""The parts of `gpu_kernels.py`."""
