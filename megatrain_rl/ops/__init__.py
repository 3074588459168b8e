"""Native operations, each with its torch reference: adamw.py, matmul.py; build.py compiles what lies in csrc/."""
