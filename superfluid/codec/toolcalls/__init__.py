"""Tool calls: the wires that models write them on, learned from templates, and how they are read."""
