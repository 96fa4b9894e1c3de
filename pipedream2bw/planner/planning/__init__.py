"""From a profile and devices to a plan."""
