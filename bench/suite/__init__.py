"""The benchmark suite of the operators: `fusedseq bench` or `python -m bench.suite`."""
