"""What the two scripts share."""

import numpy as np

START = [np.zeros((2, 2), dtype=np.float32), np.zeros(1, dtype=np.float32)]
