"""The update: optimizer state and the thread that steps (host_adamw), when an update begins and ends (update), its rate."""
