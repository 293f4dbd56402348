"""`zeroxla train`: train one of the models that come with zeroxla."""
