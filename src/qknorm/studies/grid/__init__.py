"""Many trainings: each kept by what made it, done once, by processes on one machine or by tasks on a Ray cluster."""
