"""How each primitive may be split: one file per family of primitives, collected in ``families.py``."""
