"""skdigits: the model, the data of one partition, and how weights go in and out."""

import warnings

import numpy as np
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

CLASSES, FEATURES = 10, 64
SPARE = 200  # images that no node gets


def shuffled():
    """All images, from 0 to 1, in an order that is the same on every node."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(2024).permutation(len(labels))
    return images[order] / 16, labels[order]


def load_data(partition_id, num_partitions):
    """One node's training images and its test images."""
    x, y = (part[SPARE:] for part in shuffled())
    mine = np.arange(partition_id, len(y), num_partitions)
    train, test = np.split(mine, [len(mine) * 3 // 4])
    return (x[train], y[train]), (x[test], y[test])


def create_model(local_epochs):
    """Logistic regression that goes on from the weights it is given, for a few steps."""
    model = LogisticRegression(max_iter=local_epochs, warm_start=True)
    model.classes_ = np.arange(CLASSES)
    set_weights(model, [np.zeros((CLASSES, FEATURES)), np.zeros(CLASSES)])
    return model


def get_weights(model):
    return [model.coef_, model.intercept_]


def set_weights(model, weights):
    model.coef_, model.intercept_ = weights


def fit(model, data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few steps do not converge, and are not to
        model.fit(*data)
