"""`zeroxla launch`: the processes of a run, on this machine or over ssh, started, watched,
ended."""
