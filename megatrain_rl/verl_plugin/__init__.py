"""VERL's side of the trainer: the only code, with rollout/ and verl_patches/, that imports verl.

register.py is the `verl.plugins` entry point; engine.py is what VERL drives; config.py is what its yaml builds.
"""
