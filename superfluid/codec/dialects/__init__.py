"""How a model's conversations become tokens: one module per dialect."""
