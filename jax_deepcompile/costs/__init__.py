"""What a compiled step costs, in seconds and bytes, on hardware that need not be here."""
