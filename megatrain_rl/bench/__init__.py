"""Benchmarks, run as `megatrain-rl bench COMMAND`: each measures the ceilings it is held against in the same run."""
