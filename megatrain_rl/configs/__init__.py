"""Hydra config groups (package data), found through verl_plugin/hydra_groups.py."""
