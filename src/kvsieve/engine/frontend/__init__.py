"""What kvsieve adds to the process that serves the API.

Proof: vLLM carries a request's report out of the engine core in `kv_transfer_params`, and
shows it in responses of one choice that are not streamed. The rest is done here, one step a
file: `parallel` keeps the reports of the children of an `n > 1` request apart, `choices`
reads and joins reports, `stream` and `sse` put one into the last chunk of its choice, and
`doors` lists the serving classes that this is done to.

Mode: `mode_route` is the HTTP route; `mode_call` is how it reaches the scheduler, and the
one file here that works in the engine core.

Protection: `protected_roles` finds the messages of protected roles in the prompt
(`marked_chat`), before a response begins.

Numbers: `metrics` puts the sieve's counters on `/metrics`.

vLLM is changed by replacing functions (`engine/wrapping.py`). Every replacement passes
through for an engine that is not configured for kvsieve, and when it fails it logs the
error and passes through: proof must never cost a client the answer.
"""
