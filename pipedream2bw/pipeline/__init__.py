"""What users hold: the pipeline as a module, and how it is opened."""
