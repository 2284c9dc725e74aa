"""How a recipe's flags are read."""
