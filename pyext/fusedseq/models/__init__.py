"""Whole networks, one readable file each. Each takes its operators as the argument `ops`."""
