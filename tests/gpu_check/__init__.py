"""What a machine with a GPU is asked in nine minutes: ``python -m tests.gpu_check``."""
