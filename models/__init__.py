"""Plain Flax models to train, one file each, which import nothing of this project but parts of each other."""
