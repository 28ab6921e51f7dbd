"""Device functions that kernels of several families share."""
