"""`zeroxla generate`: tokens of a trained model, in the terminal or into a file."""
