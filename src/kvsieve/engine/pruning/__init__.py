"""Pruning during prefill: deeper layers run on the kept tokens of a prompt.

layout.py      which token rows a layer sees, and what its attention is shown
model.py       the decoder layers of a model, and the call that runs them
prefill_pass.py  one forward pass in which prompts are pruned
pruner.py      the worker's part that lasts: methods, settings, what was done
"""
