"""The driver is the process of the user's command. A run is checked and its settings are filled in before Ray starts.

- prepare.py refuses a run or fills in its settings; it calls the others.
- numbers.py checks sizes, counts and the optimizer's numbers.
- names.py looks up the names of engine, trainer and reward manager.
- algorithm.py asks VERL's functions whether they know what the run computes; trial.py calls them once.
- files.py looks at data, the user's modules, the folder of checkpoints and the one to go on from.
- inputs.py checks loggers, context, mini-batches and the disk's room.
- gpu_share.py divides the card between the trainer and the rollout engine.
- environment.py sets what Ray, torch and vLLM read from the environment: who may connect, and how long Ray waits.
- hydra_groups.py adds our config groups to Hydra and names a misspelt knob's nearest neighbour.
"""
