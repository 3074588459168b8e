"""The update: optimizer state and the thread that steps, when an update begins and ends, and at which learning rate."""
