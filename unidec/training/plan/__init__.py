"""`unidec plan`: the memory and the time a training takes, reckoned before it starts.

`make_plan` names each amount of memory with the figures it comes from; `Machine` says what there is; `fits` and
`advice` compare the two and find the mildest setting that would fit; `measure` times a few real steps.
"""
