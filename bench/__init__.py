"""The benchmark suite: `fusedseq bench`, `make bench`, or `python -m pytest bench/suite.py`. See README.md."""
