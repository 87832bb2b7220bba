"""What word prediction takes from elsewhere: pseudo-labels of another domain, word vectors."""
