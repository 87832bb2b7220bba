"""Rejects the options that a baseline does not implement."""


def reject_options(**options):
    """Raises NotImplementedError if any of these options is not None."""
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"the baselines do not implement {name}")
