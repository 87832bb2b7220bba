"""The commands of `fusedseq`, one module each: `add_arguments(parser)` and `run(args)`."""
