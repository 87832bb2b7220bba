"""Builds the distributions for a package index, and checks what their libraries depend on."""
