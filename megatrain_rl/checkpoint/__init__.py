"""The complete training state in a folder.

training_state.py says what is in it, checks and restores it. folder.py says which folders are ours, and what of them
may be replaced and removed. generators.py keeps the generators' states.
"""
