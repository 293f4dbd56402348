"""`zeroxla plan`: what a run will need and cost."""
