"""VERL's task runner is the process that drives the steps. It runs VERL's trainer, and here are our subclasses of it.

- trainer.py has the subclasses, and what they add to a run.
- lost.py counts what a step asked for and did not get.
- failures.py raises two errors of a run again with a text that says what happened.
"""
