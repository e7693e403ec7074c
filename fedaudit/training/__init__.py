"""What learns: networks, the training loop, many models trained together, losses."""
