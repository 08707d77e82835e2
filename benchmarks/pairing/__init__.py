"""Stock vLLM against kvsieve, in pairs: arms, measurements and records of `paired.py`.

An *arm* is one engine in a process of its own (`arm`, `engine`). A measurement
(`throughput`, `decode`, `scoring`, `overhead`, `host`) drives two or more arms by turns
and returns ratios per repeat. Nothing here imports vLLM except `engine`, in the arms.
"""
