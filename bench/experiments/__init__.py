"""Results of the source reports' experiments: their files, and the pages that show them."""
