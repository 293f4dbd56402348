"""Sequences whose length an axis does not divide: arrays are padded, and sums leave padding out."""
