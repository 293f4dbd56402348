"""`zeroxla launch`: start, watch and end the processes of a run, on this machine or over ssh."""
