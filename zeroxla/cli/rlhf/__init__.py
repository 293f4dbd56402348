"""`zeroxla rlhf`: train a language model on rewards of its own responses."""
