"""Evaluation beyond a task's own metrics: ensembles, softmax temperature, dynamic evaluation."""
