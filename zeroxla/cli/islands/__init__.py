"""`zeroxla coordinate`, `zeroxla island`, and `zeroxla launch --islands`."""
