"""Schedules, timelines and plans, drawn."""
