"""Whole networks, one readable file each; operators are an argument."""
