"""Everything that touches vLLM, in small files. Nothing outside this folder imports vLLM.

What happens to a request, in order: `plugin` activates the sieve when vLLM's
configuration is made; `scheduler` and `manager` allocate and free blocks; `worker`
runs the step; `builder` shows the attention kernels the sieved rows, `observer`
keeps the last queries, and `sieve` scores and compacts after the model call.
"""
