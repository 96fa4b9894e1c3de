"""Pictures of schedules, recorded runs and plans; events as files."""
