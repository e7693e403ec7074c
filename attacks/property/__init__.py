"""Properties: how many records of each class a client holds, or whether it took part."""
