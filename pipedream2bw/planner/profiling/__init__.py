"""Profiles: times and bytes of a model's layers on a device, measured or computed."""
