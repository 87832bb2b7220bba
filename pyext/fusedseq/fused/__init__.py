from fusedseq.reference import *  # noqa: F403  # placeholder until the C++ operators are built (not to be landed)
