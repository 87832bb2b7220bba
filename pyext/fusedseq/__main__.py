"""`python -m fusedseq`: the command line."""

from fusedseq.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
