"""The same training step by other engines, each in a process of its own. `run` starts them, `worker` is what runs in one."""
