"""Benchmarks: operators (suite), training steps (training), GPU cases (gpu), and results.

See README.md for the commands and for how everything is measured.
"""
