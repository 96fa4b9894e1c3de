"""Schedules as data: made, read, simulated, and the events of running one."""
