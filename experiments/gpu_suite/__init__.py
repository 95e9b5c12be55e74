"""What one GPU does, measured in minutes, beside what the cost model says of it: ``deepcompile bench --suite gpu``."""
