"""One page, a file that opens by itself: what a step does when, where its memory goes, and how its plan came about."""
