"""The simulator held against training runs that others measured and published."""
