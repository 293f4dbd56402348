"""Data that the commands train on: text and images."""
