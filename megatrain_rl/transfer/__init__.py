"""What crosses the link between host and device, and every stream and event.

lanes.py holds the streams. weight_ring.py brings weights, grad_slabs.py takes gradients away, activations.py moves
hidden states both ways. arena.py divides device memory.
"""
