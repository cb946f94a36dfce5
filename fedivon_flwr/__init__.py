"""What the method is: posterior, optimiser, models, data, metrics, prediction, wire contract; and the thin apps."""

from fedivon_flwr import timeline as timeline  # first of all, since it notes when the package began to be imported
