"""Ways in to other libraries, each in a package of its own name, which needs its library only when
it is used. Of the rest of fusedseq, `acceleration` alone imports one, when a model of that library
is accelerated."""
