"""Which values of a traced program exist in memory, until when, and how many bytes they take."""
