"""From the user's call to a program in the global view."""
