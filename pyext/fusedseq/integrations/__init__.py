"""Ways in to other libraries, each in a package of its own name. None is imported by the rest of
fusedseq, and each needs its library only when it is used."""
