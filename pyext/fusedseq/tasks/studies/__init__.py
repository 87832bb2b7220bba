"""Many runs of one task: a hyper-parameter search, and all configurations of a table."""
