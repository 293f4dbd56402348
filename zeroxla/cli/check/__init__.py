"""`zeroxla check`: find what is wrong with a model on a small instance of it."""
