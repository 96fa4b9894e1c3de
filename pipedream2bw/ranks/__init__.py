"""Processes: who they are, how they agree, and what connects them."""
