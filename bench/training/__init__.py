"""Whole training steps of any preset, with several operator sets side by side."""
