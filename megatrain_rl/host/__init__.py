"""What lives in host RAM.

store.py holds the weights, gradients.py the gradients; pinned.py allocates and pins, numa.py places; lifetime.py says
who may use it. machine.py says what there is, cgroups.py reads limits for it.
"""
