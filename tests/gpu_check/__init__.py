"""What a machine with a GPU is asked in ten minutes: ``python -m tests.gpu_check``."""
