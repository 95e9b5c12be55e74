"""Which passes run, with which decisions: searched under a byte limit, kept as plain data."""
