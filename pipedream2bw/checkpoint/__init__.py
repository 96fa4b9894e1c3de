"""What lets a run go on after it was stopped."""
