"""What other libraries' users take in place of a class of theirs."""
