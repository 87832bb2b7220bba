"""The experiments of the five source reports, the values they report, and our results."""
