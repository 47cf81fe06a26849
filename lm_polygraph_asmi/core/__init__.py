"""How a number comes about: tensors and models, no files of users, and nothing of LM-Polygraph.

In the order of reading: `algorithm` is the paper's Algorithm 1, lines 2 to 8, with its formulas in
`maths` and the model's passes in `model`. `statistics` declares what it returns, and `scores` turns
that into the score of an answer, line 9. `engine` runs the algorithm on a model and stores the
results. `mask_plan` derives S and p from the number of heads, and `identity` tells models apart.

Nothing here imports the rest of the package, except for `config`.
"""
