"""`zeroxla plan`: predict what a run needs and costs."""
