"""Inspection: what a model attends to in a prompt, and the plan that follows.

`run.inspect_model` loads a model (`model`), reads each prompt once (`prompt`, `forward`, `sliced`)
and reduces every layer as it passes by (`reading`) to what is shown: `concentration`,
`activations`, `ranks`, and the losses by what the policy would keep (`evidence`), from which
`recommend` finds a plan. `facts`, `tables`, `figures` and `page` say it, to a program and to a
person.
"""
