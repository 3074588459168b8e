"""The driver is the process of the user's command. A run is checked and its settings are filled in before Ray starts.

- prepare.py refuses a run or fills in its settings; it calls the others.
- inputs.py checks data, loggers, context and disk.
- gpu_share.py divides the card between the trainer and the rollout engine.
- environment.py sets what Ray, torch and vLLM read from the environment: who may connect, and how long Ray waits.
- hydra_groups.py adds our config groups to Hydra and names a misspelt knob's nearest neighbour.
"""
