"""From the global view to the local view: placements for every value, and the collectives between them."""
