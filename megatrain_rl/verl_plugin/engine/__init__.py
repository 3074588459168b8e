"""What VERL calls in the trainer's process: engine.py is its engine, the other files are that engine's parts."""
