"""The embedded rollout: batched generation on transformers for machines without a GPU (`rollout.name=embedded`).

`sampling.py` chooses tokens, `generation.py` runs the batch, `weights.py` takes new weights; none of the three knows
VERL. `server.py` and `embedded.py` are VERL's side of it. Importing this package imports none of them.
"""
