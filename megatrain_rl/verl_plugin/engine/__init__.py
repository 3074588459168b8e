"""VERL's engine on our StreamTrainer, in the trainer's process.

- engine.py is the class that VERL calls; the other files are its parts.
- loading.py loads the model on a thread while VERL goes on.
- batch.py turns VERL's batches into packs, loss.py VERL's loss into our objective; separable.py knows which
  losses may be taken pack by pack.
- weight_sync.py hands the weights to the rollout engine.
- checkpoint.py knows the folders in which VERL keeps checkpoints.
- process_group.py keeps NCCL out of the one training process.
"""
