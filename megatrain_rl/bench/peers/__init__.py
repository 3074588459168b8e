"""The same training step by other engines, each in a process of its own.

- run.py     the command: starts the workers, reads their figures, reports ratios
- worker.py  runs in such a process: makes one engine and times its steps
- engine.py  the interface of an engine
- model.py   the model that the other engines train
- zero3.py   DeepSpeed ZeRO-3 with offload
- fsdp2.py   PyTorch FSDP2 with offload
- stream.py  this package, with its own schedule or the reference's
"""
