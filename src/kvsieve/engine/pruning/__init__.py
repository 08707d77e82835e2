"""Pruning during prefill: deeper layers run on the kept tokens of a prompt.

rule.py        which prompts are pruned (the scheduler's part)
layout.py      which token rows a layer sees, and what its attention is shown
host.py        what pruning needs of the worker's sieve
model.py       the decoder layers of a model, and the call that runs them
prompt.py      one prompt in a pass
carried.py     what chunks leave behind at a fixed selection layer
clock.py       what was saved
prefill_pass.py  one forward pass in which prompts are pruned
pruner.py      the worker's part that lasts: methods, settings, what was done
"""
