"""Commands that need files of their own; ``pipedream2bw.__main__`` calls them."""
