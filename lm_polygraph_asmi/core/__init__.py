"""How a number comes about: tensors and models, no files of users, and nothing of LM-Polygraph.

In the order of reading: `algorithm` is the paper's Algorithm 1, lines 2 to 8, with its formulas in
`maths` and the model's passes in `model`; `statistics` holds what it returns, and `scores` turns
that into the score of an answer, line 9. `engine` runs the algorithm on a model, with a store of
results; `mask_plan` derives what a config leaves open, and `identity` tells two models apart.

Nothing here imports the rest of the package, except for `config`.
"""
