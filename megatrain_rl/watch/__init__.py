"""What a run uses over time, whoever runs it: GPU and host memory, seconds of stages. Knows no VERL.

memory.py samples, processes.py says which process is what, monitor.py turns samples into the metrics of a step, report.py keeps the record
and draws it.
"""
