"""Training: networks, the training loop, many models trained together, losses."""
