"""Hydra config groups as package data. verl_plugin/driver/hydra_groups.py adds this folder to Hydra's search path."""
