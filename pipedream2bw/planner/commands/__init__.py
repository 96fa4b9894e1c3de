"""The command line of schedules, profiles and plans."""
