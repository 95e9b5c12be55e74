"""Rewrites that leave fewer forms for the partitioner to know; one a file."""
