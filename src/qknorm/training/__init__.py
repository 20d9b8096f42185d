"""Training: the objective, the schedule, the loop, its checkpoints and its records."""
