"""What a run uses over time, whoever runs it: GPU and host memory, seconds of stages. Imports neither VERL nor torch.

- gpu.py        GPU memory by process, as NVML counts it
- processes.py  which processes a run has, what each is, and the host memory they hold
- peaks.py      samples over time in a bounded number of points that keep peaks and troughs
- memory.py     the one sampling thread, and a run's memory seen with it
- monitor.py    RunMonitor: the metrics of each step, and a record with pictures at the end
- report.py     the record's file and its two pictures
"""
