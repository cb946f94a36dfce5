"""What the method is: posterior, optimiser, models, data, metrics, prediction, wire contract; and the thin apps."""
