"""What lives in host RAM.

store.py holds the weights, gradients.py the gradients; pinned.py allocates and pins, machine.py says what there is.
"""
