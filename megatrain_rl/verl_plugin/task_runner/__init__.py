"""What runs in VERL's task runner, the process that drives the steps: a subclass of VERL's trainer and what it adds to a run."""
