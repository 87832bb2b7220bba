"""A run of a task: its directory, its result, and a trained model read back from it."""
