"""The stages of this process at work."""
