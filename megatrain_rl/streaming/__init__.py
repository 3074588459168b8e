"""A sweep: which layer when (schedule), the arithmetic between the transfers (executor), and the parts of both."""
