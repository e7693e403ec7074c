"""skdigits: a Flower app with scikit-learn, on its handwritten digits."""
