"""Plain Flax models to train, one file each: they import nothing of ours and nothing of each other."""
