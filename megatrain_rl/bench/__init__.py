"""Benchmarks, run as `megatrain-rl bench COMMAND`. Each measures, in the same run, the ceilings that its figures are
held against.

A file for each command:
- step.py      whole training steps of a real shape with random weights
- logprob.py   forward only
- shared_prompts.py   an update on several answers to each prompt, with prompts computed once and not
- head.py      the output-matrix phase
- adam.py      the host AdamW
- link.py      the link between host and device, alone and beside the host AdamW
- peers/       the same training step by other engines

What the commands share:
- arguments.py    options of their command lines, and how cases and settings are read
- record.py       the record that a command prints and leaves behind
- environment.py  hardware, versions and commit for the record
- series.py       a series of steps, timed, and the figures made of it
- memory.py       memory of this process while something is measured
- ceilings.py     what the machine can do at best: matrix product, link, host memory
- flops.py        FLOPs and bytes that a step cannot do without
- data.py         random sequences and a loss on them
- shapes.py       shapes of published models
- host_blocks.py  layers in host memory, for the host AdamW
- trace.py        a chrome trace of a step, and its picture
- tokenizer.py    a tokenizer that needs no download, for models with random weights
"""
