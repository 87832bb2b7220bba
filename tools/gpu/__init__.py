"""What `make gpu` and `make gpu-train` run on a machine with a GPU."""
