"""`zeroxla train`: train a model that comes with zeroxla."""
