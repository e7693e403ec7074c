"""torchdigits: a Flower app with PyTorch, on scikit-learn's handwritten digits."""
