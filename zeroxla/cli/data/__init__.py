"""The data that the commands train on."""
