"""Optimizers, clipping, loss scaling and remedies for the delay."""
