"""Calibration: at which layer each pruning method should select in a model, found by measuring.

`run.calibrate_model` makes `prompts`, reads each once and goes on from every candidate layer with
its kept tokens (`measure`, `resume`). From the curves `choose` takes layers and threshold by rules
that `docs/calibration.md` states; `tables` shows them.
"""
