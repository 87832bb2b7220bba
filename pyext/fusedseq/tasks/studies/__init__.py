"""Many runs of one task: a search for good settings (`fusedseq tune`), and all of a table's (`fusedseq grid`)."""
